"""A free-block queue in which what a block is worth to other patches comes before its place in the order.

It takes the place of vLLM's `FreeKVCacheBlockQueue` and imports nothing of vLLM: a block is anything with
`block_id`, `block_hash`, `block_hash_num_tokens`, `ref_cnt`, `is_null`, `prev_free_block` and `next_free_block`.

Layout: one doubly linked list, threaded through the blocks themselves as upstream's is, cut by markers:

    head -> [nothing cached] -> mark -> [the queue's own order, oldest first] -> mark -> [set aside] -> tail
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

# The zones of what is set aside, in order of eviction; the queue's own order stands between the second and the third.
_OWN, _DEAD, _RETURNED, _SPARED = 0, 1, 2, 3

#: Zone, order within it, minus depth in its chain, number of the entry, block. Stale if the number is not the block's.
_Aside = tuple[int, float, int, int, Any]


class Worth(Protocol):
    """What patches say a block is worth: `patches.seam.worth.Worth`, or anything that answers alike."""

    def __call__(self, block: Any) -> float: ...

    def any(self) -> bool:
        """Whether any block may have a worth other than 0 now."""

    def single(self) -> Callable[[Any], float] | None:
        """What alone has something to say of blocks now; None if there are several, or nothing."""

    def any_below(self) -> bool:
        """Whether any block may have a worth below 0 now."""


class Marker:
    """An end or a border of the list; looks like a block that holds nothing."""

    __slots__ = ("block_hash", "block_id", "next_free_block", "prev_free_block", "ref_cnt")

    def __init__(self) -> None:
        self.block_id = -1
        self.ref_cnt = 0
        self.block_hash: Any = None
        self.prev_free_block: Any = None
        self.next_free_block: Any = None


def join(left: Any, right: Any) -> None:
    """Make them neighbours."""
    left.next_free_block = right
    right.prev_free_block = left


def link_before(end: Any, block: Any) -> None:
    """Put a block in front of another, or of a border."""
    before = end.prev_free_block
    before.next_free_block = block
    block.prev_free_block = before
    block.next_free_block = end
    end.prev_free_block = block


def unlink(block: Any) -> None:
    """Take a block out of the list."""
    before, after = block.prev_free_block, block.next_free_block
    before.next_free_block = after
    after.prev_free_block = before
    block.prev_free_block = block.next_free_block = None


class ZonedFreeQueue:
    """Free blocks by zone: nothing cached, dead (worth below 0), the queue's own order, spared (above 0).

    The own order here is LRU; subclasses have another. Dead blocks go least worth first, and so do spared ones;
    on equal worth the deepest in its chain goes first. All blocks count as free, and all are handed out if need be.

    A block's worth is asked when it would be evicted: only then is it set aside as spared, and counted. If it loses
    its worth it goes back to the head of the order, where it would be by now. So nothing is done for a spared block
    that eviction never reaches, and with no worth left the order is what it had been without. A worth below 0
    must be known at once: it is asked when the block is freed, as long as `any_below` says so, and on `revalue`.

    A chain is evicted from its tail if the own order does so and no block is worth less than a descendant.

    Args:
        blocks: the pool's blocks, ids 0 to n-1, all free.
        worth: what other patches say of a block; None if there are none.

    Attributes:
        num_free_blocks: exact after every call.
        spared_hits: blocks hit while they were set aside as spared: without that they were gone.
        spared_evicted: spared blocks handed out for reuse all the same.
        dead_evicted: dead blocks handed out for reuse.
        spared_blocks, dead_blocks: free blocks that are set aside now.
    """

    def __init__(self, blocks: list[Any], worth: Worth | None = None) -> None:
        count = len(blocks)
        self.num_free_blocks = count
        self._worth = worth
        # Per block id: zone, and number of its entry in the heap of those set aside (0: none).
        self._zone = bytearray(count)
        self._entry = array("q", bytes(8 * count))
        # Also: when eviction came upon it, for one that is spared.
        self._reached = array("q", bytes(8 * count))
        self._aside: list[_Aside] = []
        self._numbers = 0
        self._in_zone = [0, 0, 0, 0]

        self._head, self._own, self._own_end, self._tail = (Marker() for _ in range(4))
        last: Any = self._head
        for block in blocks:
            join(last, block)
            last = block
        join(last, self._own)
        join(self._own, self._own_end)
        join(self._own_end, self._tail)
        self.spared_hits = self.spared_evicted = self.dead_evicted = 0

    @property
    def spared_blocks(self) -> int:
        return self._in_zone[_SPARED]

    @property
    def dead_blocks(self) -> int:
        return self._in_zone[_DEAD]

    # taking blocks

    def popleft(self) -> Any:
        """The block to reuse next. Raises ValueError if none is free."""
        if self.num_free_blocks == 0:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """The next `n` blocks to reuse, worth least first; `n` is at most `num_free_blocks`."""
        assert 0 <= n <= self.num_free_blocks
        ask = self._worth is not None and self._worth.any()
        taken: list[Any] = []
        for _ in range(n):
            block = self._head.next_free_block
            if block is self._own:
                block, _ = self._evict(ask)
            unlink(block)
            taken.append(block)
        self.num_free_blocks -= n
        return taken

    def remove(self, block: Any) -> None:
        """Take a free block out because a request hit it."""
        if block.prev_free_block is None or block.next_free_block is None:
            raise RuntimeError(f"remove() called on an invalid block: {block}")
        if self._zone[block.block_id]:
            self._hit_aside(block)
        unlink(block)
        self.num_free_blocks -= 1

    # giving blocks back

    def append(self, block: Any) -> None:
        """Free one cached block."""
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        """Free cached blocks; of a chain the tail comes first."""
        last = self._own_end.prev_free_block
        for block in blocks:
            last.next_free_block = block
            block.prev_free_block = last
            last = block
        join(last, self._own_end)
        self.num_free_blocks += len(blocks)
        self._bury(blocks)

    def prepend_n(self, blocks: list[Any]) -> None:
        """Free blocks with nothing cached; they are reused before all others, the first of them first."""
        last: Any = self._head
        after = last.next_free_block
        for block in blocks:
            join(last, block)
            last = block
        join(last, after)
        self.num_free_blocks += len(blocks)

    # worth

    def revalue(self, block: Any) -> None:
        """A block's worth may have changed; O(log of those set aside), nothing for one that is not free."""
        if self._worth is None or block.next_free_block is None or block.block_hash is None:
            return
        zone, worth = self._zone[block.block_id], self._worth(block)
        if worth < 0:
            self._set_aside(block, _DEAD, worth)
        elif zone != _OWN:
            if worth > 0:
                self._set_aside(block, _SPARED, worth)
            elif zone == _SPARED:
                # In the order in which eviction came upon them: the oldest first.
                self._set_aside(block, _RETURNED, float(self._reached[block.block_id]))
            elif zone == _DEAD:
                # Its age is forgotten; its descendants, deeper, were dead as well.
                self._set_aside(block, _RETURNED, 0.0)

    # looking

    def get_all_free_blocks(self) -> list[Any]:
        """All free blocks, in the order of `iter_blocks_after`."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: Any | None) -> Iterator[Any]:
        """Free blocks after the cursor: nothing cached, the own order, what is set aside.

        That is the order of eviction as far as nothing is worth more or less than others.
        """
        block = self._head if cursor is None else cursor
        while (block := block.next_free_block) is not None:
            if block.block_id >= 0:
                yield block

    # for subclasses

    def _victim(self) -> Any:
        """The next block of the own order; None if it is empty."""
        block = self._own.next_free_block
        return None if block is self._own_end else block

    def _bury(self, blocks: Iterable[Any]) -> None:
        """Set those aside that are dead; for blocks just freed."""
        worth = self._worth
        if worth is None or not worth.any_below():
            return
        for block in blocks:
            if (value := worth(block)) < 0:
                self._set_aside(block, _DEAD, value)

    def _evict(self, ask: bool) -> tuple[Any, bool]:
        """The cached block to give up, still linked but in no zone, and whether the own order chose it.

        `ask` says whether worths are to be asked.
        """
        aside, worth = self._aside, self._worth
        while True:
            while aside and self._entry[aside[0][4].block_id] != aside[0][3]:
                heapq.heappop(aside)
            if aside and aside[0][0] < _SPARED:
                return self._evict_aside(), False
            block = self._victim()
            if block is None:
                # Asked again: it may be worth more by now.
                _, known, _, _, block = aside[0]
                if worth is None or (value := worth(block)) <= known:
                    return self._evict_aside(), False
                self._set_aside(block, _SPARED, value)
            elif not ask or worth is None or block.block_hash is None or (value := worth(block)) <= 0:
                return block, True
            else:
                self._set_aside(block, _SPARED, value)
                self._reached[block.block_id] = self._numbers

    def _evict_aside(self) -> Any:
        zone, block = self._aside[0][0], self._aside[0][4]
        self.spared_evicted += zone == _SPARED
        self.dead_evicted += zone == _DEAD
        heapq.heappop(self._aside)
        self._forget(block)
        return block

    def _hit_aside(self, block: Any) -> None:
        self.spared_hits += self._zone[block.block_id] == _SPARED
        self._forget(block)

    def _set_aside(self, block: Any, zone: int, order: float) -> None:
        index = block.block_id
        if self._zone[index] == _OWN:
            unlink(block)
            link_before(self._tail, block)
        self._in_zone[self._zone[index]] -= 1
        self._in_zone[zone] += 1
        self._zone[index] = zone
        if zone == _DEAD:
            self._reached[index] = 0
        self._numbers += 1
        self._entry[index] = self._numbers
        heapq.heappush(self._aside, (zone, order, -(block.block_hash_num_tokens or 0), self._numbers, block))
        if len(self._aside) > 64 + 2 * self.num_free_blocks:
            self._aside[:] = [item for item in self._aside if self._entry[item[4].block_id] == item[3]]
            heapq.heapify(self._aside)

    def _forget(self, block: Any) -> None:
        """It is no longer set aside."""
        index = block.block_id
        self._in_zone[self._zone[index]] -= 1
        self._zone[index] = _OWN
        self._entry[index] = 0
