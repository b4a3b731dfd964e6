"""Attention kernels that take a whole batch of unequal sequences: vLLM's, torch's, and one for the CPU.

All of them: grouped queries without expanding keys, and a causal mask aligned to the last key (a chunk of q
tokens behind kv others sees kv + 1 to kv + q keys).
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import functional

from scripts.gpu_timing.kv import Lens, Placed

if TYPE_CHECKING:
    from harness.profiles.shape import ModelShape

# vLLM's limit on splits when decodes run in a captured graph (its setting
# flash_attn_max_num_splits_for_cuda_graph); elsewhere the kernel chooses.
_VLLM_GRAPH_SPLITS = 32


class Unavailable(Exception):
    """A kernel cannot be had here; the message says why."""


class Kernel(Protocol):
    """`page` is the size of a cache page that it takes, 0 for contiguous keys."""

    name: str
    page: int

    def prepare(self, lens: Lens) -> Any:
        """What is computed once a step and not once a layer; handed to each call."""
        ...

    def __call__(self, query: torch.Tensor, placed: Placed, lens: Lens, prepared: Any) -> torch.Tensor:
        """[tokens, heads, head dim] -> the same."""
        ...


class TorchFlash:
    """FlashAttention-2 as torch ships it, through the operator that `torch.nn.attention.varlen` calls.

    The operator itself, because `varlen_attn` adds a launch of its own and its variant with an output buffer
    does not fill it for grouped decodes. Pages must hold a multiple of 256 tokens.
    """

    def __init__(self, shape: ModelShape, *, paged: bool) -> None:
        self._op = torch.ops.aten._flash_attention_forward
        known = {argument.name for argument in self._op.default._schema.arguments}
        if paged and not {"seqused_k", "block_table", "num_splits"} <= known:
            raise Unavailable(f"torch {torch.__version__} has no paged FlashAttention-2")
        self.page = 256 if paged else 0
        self.name = f"torch FlashAttention-2, {'pages of 256' if paged else 'contiguous keys'}"
        self._grouped = shape.heads > shape.kv_heads

    def prepare(self, lens: Lens) -> None:
        """Nothing."""

    def __call__(self, query: torch.Tensor, placed: Placed, lens: Lens, prepared: Any) -> torch.Tensor:
        """See `Kernel`."""
        decodes = max(lens.queries) == 1
        paging: dict[str, Any] = {}
        if placed.table is not None:
            # Splitting keys over thread blocks is right only for grouped decodes, which become a batch of
            # equal queries inside; packed queries of unequal length come out wrong (pytorch issue 194167).
            splits = None if decodes and self._grouped else 1
            paging = {"seqused_k": lens.used_k, "block_table": placed.table, "num_splits": splits}
        # Not causal for decodes: one query sees all keys, and only then are the query heads grouped.
        out: torch.Tensor = self._op(
            query, placed.key, placed.value, lens.cu_q, lens.cu_k, max(lens.queries), max(lens.keys),
            0.0, not decodes, False, **paging,
        )[0]  # fmt: skip
        return out


class VllmFlash:
    """FlashAttention as vLLM builds and calls it: version 3 on compute capability 9, else 2; pages of 16."""

    page = 16

    def __init__(self, shape: ModelShape, capability: tuple[int, int], dtype: torch.dtype) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise Unavailable("vLLM is not installed")
        try:
            from vllm import vllm_flash_attn as module
        except ImportError as error:
            raise Unavailable(f"vLLM's kernels do not load: {error}") from None
        self._version = 3 if capability[0] == 9 else 2
        if not module.is_fa_version_supported(self._version):
            why = module.fa_version_unsupported_reason(self._version)
            raise Unavailable(f"vLLM's FlashAttention-{self._version}: {why}")
        self._attend, self._metadata = module.flash_attn_varlen_func, module.get_scheduler_metadata
        self._shape, self._dtype = shape, dtype
        self.name = f"vLLM FlashAttention-{self._version}, pages of 16"

    def prepare(self, lens: Lens) -> Any:
        """FlashAttention-3's schedule, which vLLM makes once a step."""
        if self._version != 3:
            return None
        return self._metadata(
            batch_size=len(lens.queries),
            max_seqlen_q=max(lens.queries),
            max_seqlen_k=max(lens.keys),
            num_heads_q=self._shape.heads,
            num_heads_kv=self._shape.kv_heads,
            headdim=self._shape.head_dim,
            cache_seqlens=lens.used_k,
            qkv_dtype=self._dtype,
            cu_seqlens_q=lens.cu_q,
            page_size=self.page,
            causal=True,
            num_splits=self._splits(lens),
        )

    def __call__(self, query: torch.Tensor, placed: Placed, lens: Lens, prepared: Any) -> torch.Tensor:
        """See `Kernel`."""
        out: torch.Tensor = self._attend(
            q=query,
            k=placed.key,
            v=placed.value,
            max_seqlen_q=max(lens.queries),
            cu_seqlens_q=lens.cu_q,
            max_seqlen_k=max(lens.keys),
            seqused_k=lens.used_k,
            causal=True,
            block_table=placed.table,
            scheduler_metadata=prepared,
            num_splits=self._splits(lens),
            fa_version=self._version,
        )
        return out

    def _splits(self, lens: Lens) -> int:
        return _VLLM_GRAPH_SPLITS if self._version == 3 and max(lens.queries) == 1 else 0


class Sdpa:
    """torch's scaled dot product, one sequence after the other: for the CPU, where speed says nothing."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.name = "torch scaled_dot_product_attention, a sequence at a time"

    def prepare(self, lens: Lens) -> None:
        """Nothing."""

    def __call__(self, query: torch.Tensor, placed: Placed, lens: Lens, prepared: Any) -> torch.Tensor:
        """See `Kernel`."""
        out = torch.empty_like(query)
        start = 0
        for i, (q, k) in enumerate(zip(lens.queries, lens.keys, strict=True)):
            key, value = keys_of(placed, lens, i)
            mask = torch.ones(q, k, dtype=torch.bool, device=query.device).tril(k - q)
            one = (x.transpose(0, 1)[None] for x in (query[start : start + q], key, value))
            attended = functional.scaled_dot_product_attention(*one, attn_mask=mask, enable_gqa=True)
            out[start : start + q] = attended[0].transpose(0, 1)
            start += q
        return out


def keys_of(placed: Placed, lens: Lens, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one sequence in order, [keys, kv heads, head dim] each."""
    count = lens.keys[sequence]
    if placed.table is None:
        start = sum(lens.keys[:sequence])
        return placed.key[start : start + count], placed.value[start : start + count]
    pages = placed.table[sequence, : -(-count // placed.key.shape[1])].long()
    return tuple(x[pages].flatten(0, 1)[:count] for x in (placed.key, placed.value))
