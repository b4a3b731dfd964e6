"""The shape of a dense, Llama-like model: what its config.json says that decides what a step costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import UserError

DTYPE_BYTES = 2
_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model, or of the part of it that one of several GPUs holds (see `shard`).

    `heads`, `kv_heads`, `intermediate` and `vocab` are per GPU; `hidden` and `layers` are not divided.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    qk_norm: bool = False

    @property
    def qkv(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def gemms(self) -> tuple[tuple[str, int, int], ...]:
        """(name, n, k) of the matrix products of one layer: weights are n x k."""
        return (
            ("qkv_proj", self.qkv, self.hidden),
            ("o_proj", self.hidden, self.heads * self.head_dim),
            ("gate_up_proj", 2 * self.intermediate, self.hidden),
            ("down_proj", self.hidden, self.intermediate),
        )

    @property
    def parameters(self) -> int:
        """Weights held, norms included, biases not; a tied output head is held once."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        layer = sum(n * k for _, n, k in self.gemms) + norms
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + embeddings + self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token over all layers, bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES

    def shard(self, gpus: int) -> ModelShape:
        """What one of `gpus` holds under tensor parallelism; key-value heads are replicated below one a GPU.

        Raises UserError when vLLM could not divide the model so.
        """
        for what, value in (
            ("attention heads", self.heads),
            ("intermediate columns", self.intermediate),
        ):
            if value % gpus:
                raise UserError(f"{value} {what} cannot be shared by {gpus} GPUs: it must divide evenly")
        if self.kv_heads % gpus and gpus % self.kv_heads:
            raise UserError(f"{self.kv_heads} key-value heads cannot be shared by {gpus} GPUs")
        return ModelShape(
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads // gpus,
            kv_heads=max(self.kv_heads // gpus, 1),
            head_dim=self.head_dim,
            intermediate=self.intermediate // gpus,
            vocab=-(-self.vocab // gpus),
            tied=self.tied,
            qk_norm=self.qk_norm,
        )

    @staticmethod
    def from_config(config: Mapping[str, Any], where: str) -> ModelShape:
        """The shape that a config.json describes; UserError names what it lacks."""
        lacking = [key for key in _NEEDED if not isinstance(config.get(key), int) or config[key] <= 0]
        if lacking:
            raise UserError(
                f"{where}: no {', '.join(lacking)}; a dense decoder's config.json is expected "
                f"(it needs {', '.join(_NEEDED)})"
            )
        heads = config["num_attention_heads"]
        return ModelShape(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings")),
            qk_norm="Qwen3" in "".join(config.get("architectures") or ()),
        )
