"""A free-block queue with two segments whose balance follows the evidence of a ghost list.

Layout: that of `ZonedFreeQueue`, with a marker in its own order:

    head -> [nothing cached] -> mark -> [probation, oldest first] -> mark -> [protected, oldest first] -> mark -> ...

Every operation of that order is O(1) per block and creates no object that outlives it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from patches.kv.ghost import GhostTable
from patches.kv.zones import Marker, Worth, ZonedFreeQueue, join

_PROBATION, _PROTECTED = 0, 1
# Instead of the number of an eviction, which starts at 1.
_NO_VOTE = 0


class SegmentedFreeQueue(ZonedFreeQueue):
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
        worth: as in `ZonedFreeQueue`.

    Attributes (beside those of `ZonedFreeQueue`):
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
        worth: Worth | None = None,
    ) -> None:
        super().__init__(blocks, worth)
        count = len(blocks)
        self.protect_factor = start_factor
        self._max_factor = max_factor
        self._marginal = marginal_blocks
        self._gain = 2.0 ** (1.0 / doubling_blocks)
        self._ghosts = GhostTable(ghost_slots)

        # Per block id: segment it is in, or will be freed into; age stamp. Arrays, so that no int stays alive.
        self._segment = bytearray(count)
        self._stamp = array("q", bytes(8 * count))
        self._clock = 0
        self._evictions = [0, 0]

        self._protected = Marker()
        join(self._own, self._protected)
        join(self._protected, self._own_end)

        self.hits_probation = self.hits_protected = self.hits_in_use = 0
        self.ghost_hits_probation = self.ghost_hits_protected = 0

    @property
    def evicted_probation(self) -> int:
        return self._evictions[_PROBATION]

    @property
    def evicted_protected(self) -> int:
        return self._evictions[_PROTECTED]

    # taking blocks

    def popleft_n(self, n: int) -> list[Any]:
        """The next `n` blocks to reuse, worth least first; `n` is at most `num_free_blocks`."""
        assert 0 <= n <= self.num_free_blocks
        ask = self._worth is not None and self._worth.any()
        single = self._worth.single() if self._worth is not None and ask else None
        segment, evictions, remember, aside = self._segment, self._evictions, self._ghosts.put, self._aside
        taken: list[Any] = []
        for _ in range(n):
            block = self._head.next_free_block
            voted = True
            if block is self._own:
                if aside or (ask and single is None):
                    block, voted = self._evict(ask)
                else:
                    block = self._victim()
                    # Worth nothing to the only one who says anything, as nearly all are.
                    if single is not None and single(block):
                        block, voted = self._evict(ask)
            self._clock += 1
            before, after = block.prev_free_block, block.next_free_block
            before.next_free_block = after
            after.prev_free_block = before
            block.prev_free_block = block.next_free_block = None
            index = block.block_id
            if (name := block.block_hash) is not None:
                level = segment[index]
                evictions[level] += 1
                # Others had set it aside: that it went says nothing about the balance of the segments.
                remember(name, level, evictions[level] if voted else _NO_VOTE)
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
        index = block.block_id
        if self._zone[index]:
            self._hit_aside(block)
        if self._segment[index]:
            self.hits_protected += 1
        else:
            self.hits_probation += 1
            self._segment[index] = _PROTECTED

    def on_touch(self, blocks: Iterable[Any]) -> int:
        """Note a hit on blocks that other requests hold; free ones are noted by `remove`, which must follow.

        Returns the number of those blocks that are free only because they are protected.
        """
        segment, zone = self._segment, self._zone
        protected = 0
        for block in blocks:
            if block.ref_cnt == 0:
                protected += segment[block.block_id] and not zone[block.block_id]
            elif not block.is_null:
                self.hits_in_use += 1
                segment[block.block_id] = _PROTECTED
        return protected

    # giving blocks back

    def append_n(self, blocks: list[Any]) -> None:
        """Free cached blocks; of a chain the tail comes first."""
        self._clock += 1  # what is freed later is younger, also if nothing was handed out between
        segment, stamp, now = self._segment, self._stamp, self._clock
        known = self._ghosts.__contains__
        floor = _PROBATION  # the highest segment among the descendants seen so far
        depth = 0
        for block in blocks:
            index = block.block_id
            level = segment[index]
            if level == _PROBATION and (name := block.block_hash) is not None and known(name):
                level = self._returned(name)
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
            end = self._own_end if level else self._protected
            before = end.prev_free_block
            before.next_free_block = block
            block.prev_free_block = before
            block.next_free_block = end
            end.prev_free_block = block
        self.num_free_blocks += len(blocks)
        self._bury(blocks)

    def prepend_n(self, blocks: list[Any]) -> None:
        """Free blocks with nothing cached; they are reused before all others, the first of them first."""
        super().prepend_n(blocks)
        for block in blocks:
            self._segment[block.block_id] = _PROBATION

    # looking

    def protected_blocks(self) -> int:
        """Free blocks in the protected segment; walks it."""
        count, block = 0, self._protected.next_free_block
        while block is not self._own_end:
            count, block = count + 1, block.next_free_block
        return count

    # deciding

    def _victim(self) -> Any:
        newcomer = self._own.next_free_block
        regular = self._protected.next_free_block
        if newcomer is self._protected:
            return None if regular is self._own_end else regular
        if regular is self._own_end or newcomer.block_hash is None:
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
        recent = eviction != _NO_VOTE and self._evictions[segment] - eviction < self._marginal
        if segment == _PROTECTED:
            self.ghost_hits_protected += 1
            if recent:
                self.protect_factor = min(self._max_factor, self.protect_factor * self._gain)
        else:
            self.ghost_hits_probation += 1
            if recent:
                self.protect_factor = max(1.0, self.protect_factor / self._gain)
        return _PROTECTED
