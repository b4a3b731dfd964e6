"""The rows outside attention: matrix products with weights from memory, the small kernels between them, the head."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from scripts.gpu_timing.timer import Call

if TYPE_CHECKING:
    from harness.profiles.shape import ModelShape

_EPS = 1e-5
# Compiling takes about 20 s; a machine that needs much longer has better things to do with its time.
_COMPILE_S = 90.0


class Dense:
    """Makes the calls of a row.

    A matrix product goes round as many copies of its weights as it takes to outgrow the L2 cache, because a
    model's next layer has other weights; its input is what a kernel has just written, and stays in the cache.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        max_tokens: int,
        max_sequences: int,
        l2_bytes: int,
        dtype: torch.dtype,
        device: str,
        fuse: bool,
    ) -> None:
        self._shape = shape
        self._make: dict[str, Any] = {"dtype": dtype, "device": device}
        widest = max(shape.hidden, 2 * shape.intermediate, shape.qkv)
        # One run of noise, of which each row takes as much as it needs.
        self._noise = torch.randn(max_tokens * widest, **self._make)
        self._more = torch.randn(max_tokens * shape.hidden, **self._make)
        self._weights = {name: self._copies(n, k, l2_bytes) for name, n, k in shape.gemms}
        self._out = torch.empty(max(max_tokens * widest, max_sequences * shape.vocab), **self._make)
        self._head = torch.randn(shape.vocab, shape.hidden, **self._make)
        self._scale = torch.randn(shape.hidden, **self._make)
        self._head_scale = torch.randn(shape.head_dim, **self._make)
        self._logits = torch.randn(max_sequences, shape.vocab, **self._make)
        # Several sets of rows, so that those of the next call are not in the cache.
        self._ids = torch.randint(shape.vocab, (8, max_tokens), device=device)
        self._angles = torch.randn(max_tokens, shape.head_dim, **self._make)
        self.fused = fuse
        self._norm, self._act = add_norm, silu_and_mul
        self._rotate, self._qk_norm = _rotary(shape), _qk_norm(shape)
        if fuse:
            self._fuse()

    def calls(self, layer: str, size: int, launches: int) -> list[Call]:
        """`launches` calls of one kernel of the tables, for `size` tokens or sequences."""
        shape = self._shape
        if layer in self._weights:
            weights = self._weights[layer]
            x = self._take(self._noise, size, weights.shape[2])
            out = self._take(self._out, size, weights.shape[1])
            turns = [weights[i % weights.shape[0]].t() for i in range(launches)]
            return [lambda w=w: torch.mm(x, w, out=out) for w in turns]  # type: ignore[misc]
        x = self._take(self._noise, size, shape.hidden)
        call: Call
        if layer in ("layernorm", "final_layernorm"):
            residual = self._take(self._more, size, shape.hidden)
            call = lambda: self._norm(x, residual, self._scale)  # noqa: E731
        elif layer == "act_fn":
            gates = self._take(self._noise, size, 2 * shape.intermediate)
            call = lambda: self._act(gates)  # noqa: E731
        elif layer == "rotary_emb":
            qkv = self._take(self._noise, size, shape.qkv)
            angles = self._angles[:size]
            call = lambda: self._rotate(qkv, angles)  # noqa: E731
        elif layer == "qk_norm":
            qkv = self._take(self._noise, size, shape.qkv)
            call = lambda: self._qk_norm(qkv, self._head_scale)  # noqa: E731
        elif layer == "embedding":
            sets = [self._ids[i % len(self._ids), :size] for i in range(launches)]
            return [lambda ids=ids: functional.embedding(ids, self._head) for ids in sets]  # type: ignore[misc]
        elif layer == "lm_head":
            out = self._take(self._out, size, shape.vocab)
            call = lambda: torch.mm(x, self._head.t(), out=out)  # noqa: E731
        elif layer == "sampler":
            logits = self._logits[:size]
            call = lambda: logits.float().argmax(dim=-1)  # noqa: E731
        else:
            raise ValueError(f"no kernel called {layer}")
        return [call] * launches

    def _copies(self, n: int, k: int, l2_bytes: int) -> torch.Tensor:
        each = n * k * torch.empty((), **self._make).element_size()
        weights = torch.empty(3 * l2_bytes // each + 1, n, k, **self._make)
        for one in weights:
            one.normal_()
        return weights

    @staticmethod
    def _take(noise: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        return noise[: rows * columns].view(rows, columns)

    def _fuse(self) -> None:
        """Let torch.compile make one kernel of each small function, as vLLM has; else leave them as they are."""
        # One process compiles what little there is; a pool of them would outlive its use.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        plain = self._norm, self._act, self._rotate, self._qk_norm
        compiled = (torch.compile(function, dynamic=True) for function in plain)
        self._norm, self._act, self._rotate, self._qk_norm = compiled
        layers = ("layernorm", "act_fn", "rotary_emb", *(["qk_norm"] if self._shape.qk_norm else []))
        begun = time.monotonic()
        try:
            for size, layer in product((self._ids.shape[1], 1), layers):
                self.calls(layer, size, 1)[0]()
                if time.monotonic() - begun > _COMPILE_S:
                    raise TimeoutError
        # Whatever the compiler meets on a machine (no C compiler, no Triton, no time), plain kernels are there.
        except Exception:
            self._norm, self._act, self._rotate, self._qk_norm = plain
            self.fused = False


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to the residual stream and normalise: both results, [tokens, hidden]."""
    total = x + residual
    return functional.rms_norm(total, total.shape[-1:], scale, _EPS), total


def silu_and_mul(gates: torch.Tensor) -> torch.Tensor:
    """[tokens, 2 x intermediate] -> [tokens, intermediate]."""
    gate, up = gates.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _rotary(shape: ModelShape) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Rotary embedding of queries and keys: [tokens, qkv], [tokens, head dim] -> [tokens, heads, head dim]."""

    def rotate(qkv: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        cos, sin = angles[:, None].chunk(2, dim=-1)
        first, second = _queries_and_keys(shape, qkv).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    return rotate


def _qk_norm(shape: ModelShape) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Norm of each head of queries and keys: [tokens, qkv], [head dim] -> [tokens, heads, head dim]."""

    def norm(qkv: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(_queries_and_keys(shape, qkv), (shape.head_dim,), scale, _EPS)

    return norm


def _queries_and_keys(shape: ModelShape, qkv: torch.Tensor) -> torch.Tensor:
    heads = shape.heads + shape.kv_heads
    return qkv[:, : heads * shape.head_dim].unflatten(1, (heads, shape.head_dim))
