"""What no policy can pass: hit counts with a clairvoyant, and with an infinite, cache."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from harness.cache_trace import BlockTrace, served

_NEVER = 1 << 60


def infinite_hits(trace: BlockTrace) -> int:
    """Blocks found again if nothing is ever evicted. A scan adds none."""
    return trace.blocks - len({block for request in trace.requests for block in request})


def belady_hits(trace: BlockTrace, blocks: int, scan: bool) -> int:
    """Blocks found again if the block whose next use is farthest off is always the one that goes.

    As in the pool, a request holds all of its blocks before it ends, and a block counts only if all before it
    are there. A block is never needed later than the blocks that follow it, so on equal times the deepest goes
    first and a prefix stays whole. (Belady, IBM Systems Journal 5(2), 1966.)
    """
    requests = [request[:blocks] for request in served(trace, scan)]
    next_use = _next_uses(requests)
    cached: dict[int, int] = {}  # block -> request that uses it next
    farthest: list[tuple[int, int, int]] = []  # (-next use, -depth, block), with stale entries
    hits = 0
    for request, uses in zip(requests, next_use, strict=True):
        found = 0
        while found < len(request) and request[found] in cached:
            found += 1
        hits += found
        for block in request[:found]:
            del cached[block]
        while len(cached) > blocks - len(request):
            use, _, block = heapq.heappop(farthest)
            if cached.get(block) == -use:
                del cached[block]
        for depth, (block, use) in enumerate(zip(request, uses, strict=True)):
            cached[block] = use
            heapq.heappush(farthest, (-use, -depth, block))
    return hits


def _next_uses(requests: Sequence[tuple[int, ...]]) -> list[list[int]]:
    following: dict[int, int] = {}
    uses: list[list[int]] = [[] for _ in requests]
    for index in range(len(requests) - 1, -1, -1):
        uses[index] = [following.get(block, _NEVER) for block in requests[index]]
        following.update(dict.fromkeys(requests[index], index))
    return uses
