"""Kernels that only move data: norms, rotary embedding, activation, embedding, sampler.

Their time is a curve over the bytes that they read and write at least. A GPU without measurements of them gets
a line: what launching costs, and bytes over the memory's bandwidth (`scripts/make_gpu.py`).
"""

from __future__ import annotations

from bisect import bisect_right

from harness.profiles.gpu import Bytes, Gpu
from harness.profiles.shape import DTYPE_BYTES, ModelShape

# Read and written 16-bit numbers per token and column.
NORM_MOVES = 4  # input, residual and both again
ACT_MOVES = 3  # gate, up, product
ROPE_MOVES = EMBEDDING_MOVES = 2
# 16-bit logits read, float32 written and read again.
SAMPLER_BYTES = 10
# Norms over one head are rows of 128, at which the kernel is that much slower than over a whole token (Qwen3-32B
# on RTX PRO 6000, tables of the same project: 12.4 and 42.5 us at 512 and 2,048 tokens).
QK_NORM_SLOWER = 2.5


def moved_bytes(kernel: str, shape: ModelShape) -> int:
    """Bytes per token (per sequence for `sampler`) of a kernel for a whole model's shape or a GPU's part."""
    heads = (shape.heads + shape.kv_heads) * shape.head_dim
    if kernel == "sampler":
        return SAMPLER_BYTES * shape.vocab
    width, moves = {
        "norm": (shape.hidden, NORM_MOVES),
        "final_norm": (shape.hidden, NORM_MOVES),
        "rope": (heads, ROPE_MOVES),
        "act": (shape.intermediate, ACT_MOVES),
        "embedding": (shape.hidden, EMBEDDING_MOVES),
    }[kernel]
    return width * moves * DTYPE_BYTES


class ElementwiseTimes:
    """Reads the kernels of one GPU for one shape."""

    def __init__(self, gpu: Gpu, shape: ModelShape) -> None:
        self._curves = gpu.numbers.elementwise
        self._shape = shape

    def layer_us(self, tokens: int) -> float:
        """All of one layer: two norms, rotary embedding, activation, and norms of queries and keys if it has them."""
        us = 2.0 * self.us("norm", tokens) + self.us("rope", tokens) + self.us("act", tokens)
        if self._shape.qk_norm:
            us += _at(self._curves["norm"], QK_NORM_SLOWER * moved_bytes("rope", self._shape) * tokens)
        return us

    def us(self, kernel: str, count: int) -> float:
        """One kernel for so many tokens (sequences for `sampler`), us."""
        return _at(self._curves[kernel], float(moved_bytes(kernel, self._shape) * count))


def _at(curve: Bytes, x: float) -> float:
    """Linear between nodes, flat below the first, on along the last segment."""
    axis, us = curve.bytes, curve.us
    if x <= axis[0]:
        return us[0]
    i = min(bisect_right(axis, x) - 1, len(axis) - 2)
    return us[i] + (x - axis[i]) / (axis[i + 1] - axis[i]) * (us[i + 1] - us[i])
