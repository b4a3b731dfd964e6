"""A free-block queue with two segments whose balance follows the evidence of a ghost list.

It takes the place of vLLM's `FreeKVCacheBlockQueue` and imports nothing of vLLM: a block is anything with
`block_id`, `block_hash`, `block_hash_num_tokens`, `ref_cnt`, `is_null`, `prev_free_block` and `next_free_block`.

Layout: one doubly linked list, threaded through the blocks themselves as upstream's is, cut by two markers:

    head -> [nothing cached] -> mark -> [probation, oldest first] -> mark -> [protected, oldest first] -> tail

Every operation is O(1) per block and creates no object that outlives it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from patches.kv.ghost import GhostTable

#: Value of a block for the owner: above 0 protects it, below 0 keeps it in probation, 0 is no opinion.
Hint = Callable[[Any], float]

_PROBATION, _PROTECTED = 0, 1


class _Marker:
    """An end or a border of the list; looks like a block that holds nothing."""

    __slots__ = ("block_hash", "block_id", "next_free_block", "prev_free_block", "ref_cnt")

    def __init__(self) -> None:
        self.block_id = -1
        self.ref_cnt = 0
        self.block_hash: Any = None
        self.prev_free_block: Any = None
        self.next_free_block: Any = None


def _join(left: Any, right: Any) -> None:
    left.next_free_block = right
    right.prev_free_block = left


class SegmentedFreeQueue:
    """Free blocks in two segments: those never hit since they were filled, and those hit at least once.

    Which segment gives up its oldest block is one comparison: a protected block goes only if it is the older
    of the two by more than `protect_factor`, where age is the number of blocks handed out, and of calls that
    freed some, since it was freed. At factor 1 that is LRU exactly. The factor follows the ghosts: a returning
    block that protection evicted a moment ago raises it, one that probation evicted a moment ago lowers it, so
    it settles where one more block is worth the same in either segment.

    A chain is evicted from its tail: within a segment the order of `append_n` is kept, no block is given a
    lower segment than a descendant freed with it, and a protected block never goes before an older or equally
    old one in probation (where its descendants may be).

    Args:
        blocks: the pool's blocks, ids 0 to n-1, all free.
        ghost_slots: how many evicted blocks are remembered, at least; rounded up to a power of two.
        marginal_blocks: how many evictions long an evicted block counts as evidence for its segment.
        doubling_blocks: surplus of such evidence, in blocks, that doubles (halves) the factor.
        max_factor: upper limit of the factor; the lower one is 1.
        hint: asked once for each cached block that is freed.

    Attributes:
        num_free_blocks: exact after every call.
        protect_factor: the present factor.
        hits_probation, hits_protected: blocks hit while they were free, by segment.
        hits_in_use: blocks hit while another request held them (through `on_touch` only).
        ghost_hits_probation, ghost_hits_protected: refilled blocks whose eviction was remembered, by the
            segment that had evicted them.
        evicted_probation, evicted_protected: cached blocks handed out for reuse, by segment.
    """

    def __init__(
        self,
        blocks: list[Any],
        *,
        ghost_slots: int,
        marginal_blocks: int,
        doubling_blocks: float,
        start_factor: float,
        max_factor: float,
        hint: Hint | None = None,
    ) -> None:
        count = len(blocks)
        self.num_free_blocks = count
        self.protect_factor = start_factor
        self._max_factor = max_factor
        self._marginal = marginal_blocks
        self._gain = 2.0 ** (1.0 / doubling_blocks)
        self._hint = hint
        self._ghosts = GhostTable(ghost_slots)

        # Per block id: segment it is in, or will be freed into; age stamp. Arrays, so that no int stays alive.
        self._segment = bytearray(count)
        self._stamp = array("q", bytes(8 * count))
        self._clock = 0
        self._evictions = [0, 0]

        self._head, self._probation, self._protected, self._tail = (_Marker() for _ in range(4))
        last: Any = self._head
        for block in blocks:
            _join(last, block)
            last = block
        _join(last, self._probation)
        _join(self._probation, self._protected)
        _join(self._protected, self._tail)

        self.hits_probation = self.hits_protected = self.hits_in_use = 0
        self.ghost_hits_probation = self.ghost_hits_protected = 0

    @property
    def evicted_probation(self) -> int:
        return self._evictions[_PROBATION]

    @property
    def evicted_protected(self) -> int:
        return self._evictions[_PROTECTED]

    # taking blocks

    def popleft(self) -> Any:
        """The block to reuse next. Raises ValueError if none is free."""
        if self.num_free_blocks == 0:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """The next `n` blocks to reuse, worth least first; `n` is at most `num_free_blocks`."""
        assert 0 <= n <= self.num_free_blocks
        segment, evictions, remember = self._segment, self._evictions, self._ghosts.put
        taken: list[Any] = []
        for _ in range(n):
            block = self._head.next_free_block
            if block is self._probation:
                block = self._victim()
            self._clock += 1
            before, after = block.prev_free_block, block.next_free_block
            before.next_free_block = after
            after.prev_free_block = before
            block.prev_free_block = block.next_free_block = None
            index = block.block_id
            if (name := block.block_hash) is not None:
                level = segment[index]
                evictions[level] += 1
                remember(name, level, evictions[level])
            segment[index] = _PROBATION
            taken.append(block)
        self.num_free_blocks -= n
        return taken

    def remove(self, block: Any) -> None:
        """Take a free block out because a request hit it; it is protected when it is freed again."""
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise RuntimeError(f"remove() called on an invalid block: {block}")
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1
        if self._segment[block.block_id]:
            self.hits_protected += 1
        else:
            self.hits_probation += 1
            self._segment[block.block_id] = _PROTECTED

    def on_touch(self, blocks: Iterable[Any]) -> int:
        """Note a hit on blocks that other requests hold; free ones are noted by `remove`, which must follow.

        Returns the number of those blocks that are free only because they are protected.
        """
        segment = self._segment
        protected = 0
        for block in blocks:
            if block.ref_cnt == 0:
                protected += segment[block.block_id]
            elif not block.is_null:
                self.hits_in_use += 1
                segment[block.block_id] = _PROTECTED
        return protected

    # giving blocks back

    def append(self, block: Any) -> None:
        """Free one cached block."""
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        """Free cached blocks; of a chain the tail comes first."""
        self._clock += 1  # what is freed later is younger, also if nothing was handed out between
        segment, stamp, now, hint = self._segment, self._stamp, self._clock, self._hint
        known = self._ghosts.__contains__
        floor = _PROBATION  # the highest segment among the descendants seen so far
        depth = 0
        for block in blocks:
            index = block.block_id
            level = segment[index]
            if level == _PROBATION and (name := block.block_hash) is not None and known(name):
                level = self._returned(name)
            if hint is not None and (worth := hint(block)):
                level = _PROTECTED if worth > 0 else _PROBATION
            tokens = block.block_hash_num_tokens or 0
            if tokens >= depth:  # not an ancestor of the one before: another chain begins
                floor = level
            elif level < floor:
                level = floor
            else:
                floor = level
            depth = tokens
            segment[index] = level
            stamp[index] = now
            end = self._tail if level else self._protected
            before = end.prev_free_block
            before.next_free_block = block
            block.prev_free_block = before
            block.next_free_block = end
            end.prev_free_block = block
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: list[Any]) -> None:
        """Free blocks with nothing cached; they are reused before all others, the first of them first."""
        segment = self._segment
        last: Any = self._head
        after = last.next_free_block
        for block in blocks:
            segment[block.block_id] = _PROBATION
            _join(last, block)
            last = block
        _join(last, after)
        self.num_free_blocks += len(blocks)

    # looking

    def get_all_free_blocks(self) -> list[Any]:
        """All free blocks, in the order of `iter_blocks_after`."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: Any | None) -> Iterator[Any]:
        """Free blocks after the cursor: nothing cached, probation, protected, each oldest first.

        That is the order of eviction but for protected blocks that are overdue.
        """
        block = self._head if cursor is None else cursor
        while (block := block.next_free_block) is not None:
            if block.block_id >= 0:
                yield block

    def protected_blocks(self) -> int:
        """Free blocks in the protected segment; walks it."""
        count, block = 0, self._protected.next_free_block
        while block is not self._tail:
            count, block = count + 1, block.next_free_block
        return count

    # deciding

    def _victim(self) -> Any:
        newcomer = self._probation.next_free_block
        regular = self._protected.next_free_block
        if newcomer is self._protected:
            return regular
        if regular is self._tail or newcomer.block_hash is None:
            return newcomer
        if regular.block_hash is None:
            return regular
        since_new, since_regular = self._stamp[newcomer.block_id], self._stamp[regular.block_id]
        now = self._clock
        # The factor is at least 1, so this never passes over what is as old or older on probation.
        if now - since_regular > self.protect_factor * (now - since_new):
            return regular
        return newcomer

    def _returned(self, block_hash: bytes) -> int:
        """The segment for a block that was evicted and had to be filled again; moves the factor if it is recent."""
        segment, eviction = self._ghosts.take(block_hash)
        recent = self._evictions[segment] - eviction < self._marginal
        if segment == _PROTECTED:
            self.ghost_hits_protected += 1
            if recent:
                self.protect_factor = min(self._max_factor, self.protect_factor * self._gain)
        else:
            self.ghost_hits_probation += 1
            if recent:
                self.protect_factor = max(1.0, self.protect_factor / self._gain)
        return _PROTECTED
