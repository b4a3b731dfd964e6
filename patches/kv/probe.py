"""How much of a request the prefix cache holds, asked often and cheaply; looking changes nothing.

Upstream's own look (`find_longest_cache_hit`) walks the whole prefix, some 200 us for 1,600 tokens. Hashes are chained
and chains lose their tail first, so a block is cached only if all before it are: the end is found by bisection, and an
end that was known is confirmed by two look-ups, whatever has been cached or evicted since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# What upstream's table appends to a block's hash for the first KV cache group.
_GROUP_0 = bytes(4)
_KNOWN_ATTR = "patchbench_cached_blocks"
_SEEN_ATTR = "patchbench_uncached_seen"

#: What a look at a request saw: the last cached block and the first that is not, as the pool calls them (None: there is
#: none, or it does not matter), and the tokens that are not cached.
_Seen = tuple[bytes | None, bytes | None, int]


class PrefixProbe:
    """Cached prefixes on one scheduler. Nothing is kept here: what is known of a request lives on it.

    Costs O(log blocks) look-ups for a request's first look, 2 for one whose prefix has not changed, O(log change)
    otherwise. Models with several KV cache groups, a sliding window or sharded contexts are looked up by upstream's
    own walk, for at most `walks_a_step` requests between two calls of `begin_step`; the others keep what was known.
    """

    def __init__(self, scheduler: Any, walks_a_step: int = 8) -> None:
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._block_tokens = int(scheduler.block_size)
        self._walks_a_step = self._walks_left = walks_a_step
        self._chained = _is_chained(self._manager.coordinator)

    def begin_step(self) -> None:
        """Allow so many whole walks again."""
        self._walks_left = self._walks_a_step

    def usable_blocks(self, request: Any) -> int:
        """Blocks that a hit can cover: all full ones, but the last token is always computed."""
        if not self._manager.prefix_cache_lookup_enabled(request):
            return 0
        return min((request.num_tokens - 1) // self._block_tokens, len(request.block_hashes))

    def uncached_tokens(self, requests: Sequence[Any]) -> list[int]:
        """Tokens of each request that a hit would not cover now: what its prefill would compute."""
        if not self._chained:
            return [request.num_tokens - self.cached_tokens(request) for request in requests]
        there = self._pool.cached_block_hash_to_block._cache
        out = []
        for request in requests:
            seen = request.__dict__.get(_SEEN_ATTR)
            # Confirmed where it stood, as nearly all are: the last block is there and the next one is not.
            if (
                seen is None
                or (seen[0] is not None and seen[0] not in there)
                or (seen[1] is not None and seen[1] in there)
            ):
                seen = self._look(request)
            out.append(seen[2])
        return out

    def forget(self, request: Any) -> None:
        """Its tokens may grow from now on."""
        request.__dict__.pop(_SEEN_ATTR, None)

    def _look(self, request: Any) -> _Seen:
        known, hashes = self.cached_blocks(request), request.block_hashes
        last = hashes[known - 1] + _GROUP_0 if known else None
        following = hashes[known] + _GROUP_0 if known < self.usable_blocks(request) else None
        seen: _Seen = (last, following, request.num_tokens - known * self._block_tokens)
        setattr(request, _SEEN_ATTR, seen)
        return seen

    def cached_tokens(self, request: Any) -> int:
        """Tokens of the request that a hit would cover now."""
        if self._chained:
            return self.cached_blocks(request) * self._block_tokens
        known: int | None = request.__dict__.get(_KNOWN_ATTR)
        if self._walks_left > 0 and self._manager.prefix_cache_lookup_enabled(request):
            self._walks_left -= 1
            found = self._manager.coordinator.find_longest_cache_hit(
                request.block_hashes, request.num_tokens - 1
            )
            known = int(found[1])
            setattr(request, _KNOWN_ATTR, known)
        return known or 0

    def cached_blocks(self, request: Any) -> int:
        """The same in full blocks, where blocks are chained; elsewhere rounded down."""
        if not self._chained:
            return self.cached_tokens(request) // self._block_tokens
        usable = self.usable_blocks(request)
        known = min(request.__dict__.get(_KNOWN_ATTR, 0), usable)
        if usable:
            known = self._end(request.block_hashes, known, usable)
        setattr(request, _KNOWN_ATTR, known)
        return known

    def _end(self, hashes: Any, known: int, usable: int) -> int:
        """Number of leading blocks that are cached, from a guess: strides that double, then bisection."""
        found = self._pool.cached_block_hash_to_block.get_one_block

        def cached(block: int) -> bool:
            return found(hashes[block] + _GROUP_0) is not None

        stride = 1
        if known and not cached(known - 1):
            # It has shrunk: `high` is the first index known to be missing.
            high = known - 1
            low = max(0, high - stride)
            while low and not cached(low - 1):
                high = low - 1
                stride *= 2
                low = max(0, high - stride)
        else:
            low = high = known
            while high < usable and cached(high):
                low = high + 1
                high = min(usable, high + stride)
                stride *= 2
        # The first `low` blocks are cached, and block `high` is not (or is beyond the usable ones).
        while low < high:
            middle = (low + high) // 2
            if cached(middle):
                low = middle + 1
            else:
                high = middle
        return low


def common_blocks(one: Any, other: Any, least: int, most: int) -> int:
    """Leading blocks that both requests have alike, up to `most`; the first `least` are known to be. O(log blocks)."""
    mine, theirs = one.block_hashes, other.block_hashes
    low, high = least, min(most, len(mine), len(theirs))
    while low < high:
        middle = (low + high + 1) // 2
        if mine[middle - 1] == theirs[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _is_chained(coordinator: Any) -> bool:
    """Whether a hit is what the chain of full blocks says: one group of full attention, not sharded, no draft layer."""
    from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    if type(coordinator) is not UnitaryKVCacheCoordinator:
        return False
    return (
        type(coordinator.single_type_managers[0]) is FullAttentionManager
        and isinstance(coordinator.kv_cache_spec, FullAttentionSpec)
        and coordinator.dcp_world_size == 1
        and coordinator.pcp_world_size == 1
        and not coordinator.eagle_group_ids
        and coordinator.block_pool.hash_block_size == coordinator.block_size
    )
