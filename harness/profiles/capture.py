"""The CUDA-graph capture sizes that vLLM 0.32.0 resolves, and how a batch is padded to them.

The rule is the default of `VllmConfig._set_cudagraph_sizes` for one token a decode (no speculation) and
the "balanced" performance mode: a batch of at most the largest captured size runs as the next captured
size, a larger one runs as it is.
"""

from __future__ import annotations

PLATFORM_MAX_CAPTURE = 512  # 1,024 on data-centre Blackwell (capability 10.x) only


def capture_sizes(
    max_num_seqs: int, max_num_batched_tokens: int, platform_max: int = PLATFORM_MAX_CAPTURE
) -> tuple[int, ...]:
    """The captured batch sizes in tokens, ascending, for these limits."""
    largest = min(2 * max_num_seqs, platform_max)
    decode_size = {max_num_seqs} if max_num_seqs <= largest else set()
    largest = min(largest, max_num_batched_tokens)
    sizes = {size for size in (1, 2, 4) if size <= largest}
    sizes.update(range(8, min(largest + 1, 256), 8))
    sizes.update(range(256, largest + 1, 16))
    if max_num_batched_tokens <= largest:
        sizes.add(max_num_batched_tokens)
    sizes.update(size for size in decode_size if size <= max_num_batched_tokens)
    return tuple(sorted(sizes))
