"""What a row must compute and move at least, and so how long it may take: an estimate, never a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.gpu_timing.rows import ATTENTION, Row

if TYPE_CHECKING:
    from harness.profiles.shape import ModelShape

BYTES = 2
# A launch and its gap; kernels below this do not get shorter with less work.
LAUNCH_US = 4.0


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations and bytes of device memory."""

    flops: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reached on one large matrix product and one large copy."""

    flops_per_s: float
    bytes_per_s: float

    def us(self, work: Work) -> float:
        """About how long the work takes, us: 70% of the ceiling that binds."""
        return LAUNCH_US + 1e6 / 0.7 * max(work.flops / self.flops_per_s, work.bytes / self.bytes_per_s)


def work_of(row: Row, shape: ModelShape) -> Work:
    """The least work of a row."""
    if row.table == ATTENTION:
        return _attention(row, shape)
    (size,) = row.sizes
    gemms = {name: (n, k) for name, n, k in shape.gemms} | {"lm_head": (shape.vocab, shape.hidden)}
    if row.layer in gemms:
        n, k = gemms[row.layer]
        return Work(2.0 * size * n * k, BYTES * float(n * k + size * (n + k)))
    widths = {
        "act_fn": 3 * shape.intermediate,
        "qk_norm": 2 * (shape.heads + shape.kv_heads) * shape.head_dim,
        "rotary_emb": 2 * (shape.heads + shape.kv_heads) * shape.head_dim,
        "sampler": 3 * shape.vocab,
        "embedding": 2 * shape.hidden,
    }
    return Work(0.0, BYTES * float(size * widths.get(row.layer, 4 * shape.hidden)))


def kv_tokens(sizes: tuple[int, ...]) -> int:
    """Keys that an attention row reads."""
    chunk, kv, n, ctx = sizes
    return (kv + chunk if chunk else 0) + n * (ctx + 1)


def kv_token_bytes(shape: ModelShape) -> int:
    """Keys and values of one token in one layer, bytes."""
    return 2 * shape.kv_heads * shape.head_dim * BYTES


def _attention(row: Row, shape: ModelShape) -> Work:
    chunk, kv, n, ctx = row.sizes
    pairs = n * (ctx + 1) + chunk * kv + chunk * (chunk + 1) / 2
    queries = 2 * (chunk + n) * shape.heads * shape.head_dim * BYTES
    return Work(
        4.0 * pairs * shape.heads * shape.head_dim,
        float(kv_tokens(row.sizes) * kv_token_bytes(shape) + queries),
    )
