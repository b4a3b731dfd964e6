"""Attention that was not measured: a chunk behind prior tokens, and a chunk beside decodes.

Both rest on two numbers of a GPU and geometry: what one query row costs per key it meets when the GPU is full
(`row_us`, from the longest measured prompts), and how many query rows fill it (`full_rows`).
"""

from __future__ import annotations

# Of the memory bandwidth, when a kernel reads keys and values: .75 to .93 on the measured GPUs.
KV_BANDWIDTH_SHARE = 0.85
# FlashAttention 2 runs paged batches in tiles of 64 query rows, one to a multiprocessor.
TILE_ROWS = 64
# A decode beside a prefill gets a whole tile in FlashAttention 2: it costs as that many query rows of a
# prefill, those 64 and their overhead (tables of RTX 4090 and RTX PRO 6000: 80 fits both).
MIXED_DECODE_ROWS = 80


def full_rows(
    kernel: str, sms: int, heads: float, kv_bytes: float, bandwidth_gb_s: float, row_us: float
) -> float:
    """Query rows from which a chunk's cost goes by its rows; `kv_bytes` are those of one token's keys and values.

    Fewer rows wait for the memory, and under FlashAttention 2 leave multiprocessors idle.
    """
    rows = kv_bytes / (bandwidth_gb_s * 1e3 * KV_BANDWIDTH_SHARE) / row_us
    return max(rows, TILE_ROWS * sms / heads) if kernel == "fa2" else rows


def context_us(q: int, kv: int, full: float, row_us: float) -> float:
    """What kv prior tokens add to a chunk of q: every row meets each of them.

    On the two GPUs with such rows it is off by 3% at the median, 5 to 10% at the 90th percentile.
    """
    return max(q, full) * kv * row_us


def mixed_us(
    kernel: str,
    q: int,
    n: int,
    ctx: int,
    prefill_us: float,
    decode_us: float,
    launch_us: float,
    full: float,
    row_us: float,
) -> float:
    """A chunk of q tokens beside n decodes at context ctx, from what each takes alone and one launch.

    FlashAttention 2: a decode takes a whole tile of query rows in a mixed step, and walks its context
    alone; a prefill that does not fill the GPU leaves room beside it. On the two GPUs with mixed rows it is off
    by 10 to 14% at the median, where the plain sum is off by 24 to 34%.
    FlashAttention 3 packs the query heads of a group into one tile whatever the batch, so a decode stays
    bound by memory: the sum less one launch. No table of it with mixed rows is public.
    """
    decodes = max(decode_us - launch_us, 0.0)
    if kernel != "fa2":
        return prefill_us + decodes
    tiles = max(MIXED_DECODE_ROWS * n, full) * ctx * row_us
    beside = min(1.0, q / full) * max(prefill_us - launch_us, 0.0)
    return max(prefill_us, launch_us + beside + max(tiles, decodes))
