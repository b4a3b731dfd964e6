"""Exchange between GPUs under tensor parallelism; modelled, never measured here.

A layer sums its output over the GPUs twice (after attention and after the MLP), the embedding once, and the
logits are gathered. A sum is a ring: every GPU sends 2 (g - 1) / g of the data.
"""

from __future__ import annotations

from harness.profiles.gpu import GpuSpec
from harness.profiles.shape import DTYPE_BYTES

SUMS_A_LAYER = 2
SUMS_A_STEP = 1  # the embedding, whose rows are spread over the GPUs
# What collectives reach of a link's rated speed. An assumption: large sums over NVLink are commonly seen at
# three quarters to nine tenths of it.
LINK_SHARE = 0.8


def all_reduce_us(spec: GpuSpec, tokens: int, hidden: int, gpus: int) -> float:
    """Sum of tokens x hidden 16-bit numbers over the GPUs, us."""
    sent = 2.0 * (gpus - 1) / gpus * tokens * hidden * DTYPE_BYTES
    return _transfer_us(spec, sent, gpus)


def gather_us(spec: GpuSpec, sequences: int, vocab: int, gpus: int) -> float:
    """Logits of each sequence from all GPUs, us."""
    return _transfer_us(spec, (gpus - 1) / gpus * sequences * vocab * DTYPE_BYTES, gpus)


def _transfer_us(spec: GpuSpec, sent_bytes: float, gpus: int) -> float:
    if gpus == 1:
        return 0.0
    return spec.interconnect_latency_us + sent_bytes / (spec.interconnect_gb_s * 1e3 * LINK_SHARE)
