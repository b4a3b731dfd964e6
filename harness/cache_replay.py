"""Replays a trace of prefix blocks through vLLM's own BlockPool, without a scheduler."""

from __future__ import annotations

import hashlib
import importlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from harness.cache_bounds import belady_hits, infinite_hits
from harness.cache_policies import QUEUES, Ahead, QueueFactory
from harness.cache_trace import BlockTrace, served

_BLOCK_TOKENS = 512

#: Called now and then with the number of requests done.
Progress = Callable[[int], None]


@dataclass(frozen=True)
class CacheResult:
    """Counts of one replay.

    `requested` and `hits` are blocks, of all requests as served, those of a scan included (which cannot hit).
    A request longer than the pool keeps its first blocks only, the rest is in neither count; `truncated` says
    how many requests that were.
    """

    requested: int
    hits: int
    truncated: int

    @property
    def hit_rate(self) -> float:
        """Hit blocks / requested blocks."""
        return self.hits / self.requested


def measure(
    trace: BlockTrace,
    policy: str,
    blocks: int,
    *,
    scan: bool,
    in_flight: int = 1,
    progress: Progress | None = None,
) -> CacheResult:
    """One policy (of `POLICIES`) on one size; `in_flight` does not change the bounds."""
    if policy in QUEUES:
        return replay(served(trace, scan), QUEUES[policy], blocks, in_flight=in_flight, progress=progress)
    # An infinite pool truncates where the finite ones beside it do not have to, so it asks for all blocks.
    limit = blocks if policy == "belady" else max(map(len, trace.requests))
    requested = (1 + scan) * sum(min(len(request), limit) for request in trace.requests)
    truncated = (1 + scan) * sum(len(request) > limit for request in trace.requests)
    hits = belady_hits(trace, blocks, scan) if policy == "belady" else infinite_hits(trace)
    return CacheResult(requested, hits, truncated)


def replay(
    requests: Iterable[tuple[int, ...]],
    queue: QueueFactory,
    blocks: int,
    *,
    in_flight: int = 1,
    progress: Progress | None = None,
) -> CacheResult:
    """Serve the requests one after the other from a pool of `blocks` usable blocks.

    Each request touches the longest prefix of its blocks that is cached, takes new blocks for the rest and
    caches them. It is freed, tail first, once `in_flight` - 1 further requests have come, or sooner if the pool
    cannot serve the next one otherwise.
    """
    pool = make_pool(queue, blocks)
    names: dict[int, bytes] = {}
    held: deque[list[Any]] = deque()
    requested = hits = truncated = 0

    def hashes_of(request: tuple[int, ...]) -> list[bytes]:
        return [names.get(block) or names.setdefault(block, _hash(block)) for block in request[:blocks]]

    if isinstance(queue, Ahead):
        requests = queue.look(requests, hashes_of)
    for index, request in enumerate(requests):
        if len(request) > blocks:
            truncated += 1
            request = request[:blocks]
        hashes = hashes_of(request)
        while len(held) >= in_flight:
            pool.free_blocks(reversed(held.popleft()))
        found = _longest_prefix(pool, hashes)
        pool.touch(found)
        while pool.get_num_free_blocks() < len(request) - len(found):
            pool.free_blocks(reversed(held.popleft()))
        own = found + pool.get_new_blocks(len(request) - len(found))
        pool.cache_full_blocks(
            SimpleNamespace(block_hashes=hashes), own, len(found), len(own), _BLOCK_TOKENS, 0
        )
        held.append(own)
        requested += len(request)
        hits += len(found)
        if progress is not None and index % 256 == 255:
            progress(index + 1)
    return CacheResult(requested, hits, truncated)


def make_pool(queue: QueueFactory, blocks: int) -> Any:
    """vLLM's BlockPool with `blocks` usable blocks whose free ones are kept by `queue`'s product."""
    module: Any = importlib.import_module("vllm.v1.core.block_pool")

    class Pool(module.BlockPool):
        """Tells the queue of hits on blocks in use, as the adapter does in an engine."""

        def touch(self, blocks: Any) -> None:
            notice = getattr(self.free_block_queue, "on_touch", None)
            if notice is not None:
                notice(blocks)
            super().touch(blocks)

    stock = module.FreeKVCacheBlockQueue
    module.FreeKVCacheBlockQueue = queue
    try:
        # One block more: the pool sets one aside as its null block.
        return Pool(blocks + 1, True, _BLOCK_TOKENS)
    finally:
        module.FreeKVCacheBlockQueue = stock


def _hash(block: int) -> bytes:
    return hashlib.blake2b(block.to_bytes(9, "little", signed=True), digest_size=32).digest()


def _longest_prefix(pool: Any, hashes: list[bytes]) -> list[Any]:
    found: list[Any] = []
    for block_hash in hashes:
        cached = pool.get_cached_block(block_hash, [0])
        if cached is None:
            break
        found.append(cached[0])
    return found
