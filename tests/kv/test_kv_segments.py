"""The segmented free queue alone, on stand-ins for blocks (what it asks of a block is a few attributes)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from patches.kv.ghost import GhostTable
from patches.kv.segments import SegmentedFreeQueue
from patches.seam.receipt import PatchTally
from patches.seam.worth import Worth, Worths


@dataclass(eq=False)
class Block:
    block_id: int
    block_hash: bytes | None = None
    block_hash_num_tokens: int | None = None
    ref_cnt: int = 0
    is_null: bool = False
    prev_free_block: Any = None
    next_free_block: Any = None


class Bench:
    """A queue with the pool's part of the protocol: blocks are filled, freed, hit."""

    def __init__(self, count: int, *, factor: float = 4.0, worth: Worth | None = None) -> None:
        self.blocks = [Block(i) for i in range(count)]
        self.queue = SegmentedFreeQueue(
            self.blocks,
            ghost_slots=1024,
            marginal_blocks=4,
            doubling_blocks=1.0,
            start_factor=factor,
            max_factor=64.0,
            worth=worth,
        )
        self.cached: dict[int, Block] = {}

    def fill(self, *names: int) -> None:
        """Allocate, cache under these names (a chain, head first) and free again."""
        taken = self.queue.popleft_n(len(names))
        for depth, (block, name) in enumerate(zip(taken, names, strict=True), start=1):
            self._forget(block)
            block.block_hash, block.block_hash_num_tokens = _hash(name), depth
            self.cached[name] = block
        self.queue.append_n(taken[::-1])

    def hit(self, *names: int) -> None:
        blocks = [self.cached[name] for name in names]
        for block in blocks:
            self.queue.remove(block)
        self.queue.append_n(blocks[::-1])

    def evict(self, count: int) -> list[int]:
        """Reuse `count` blocks and free them with nothing cached; the names that were lost, in order."""
        lost = []
        taken = self.queue.popleft_n(count)
        for block in taken:
            lost += self._forget(block)
        self.queue.prepend_n(taken)
        return lost

    def _forget(self, block: Block) -> list[int]:
        names = [name for name, cached in self.cached.items() if cached is block]
        for name in names:
            del self.cached[name]
        block.block_hash = block.block_hash_num_tokens = None
        return names


def _hash(name: int) -> bytes:
    return (name * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little") + bytes(28)


def test_starts_in_order_of_id_and_ends_with_an_error() -> None:
    queue = Bench(3).queue
    assert [queue.popleft().block_id for _ in range(3)] == [0, 1, 2]
    assert queue.num_free_blocks == 0
    with pytest.raises(ValueError, match="No free blocks"):
        queue.popleft()


def test_removing_a_block_that_is_not_free_is_an_error() -> None:
    queue = Bench(2).queue
    with pytest.raises(RuntimeError, match="invalid block"):
        queue.remove(queue.popleft())


def test_blocks_with_nothing_cached_go_first_the_latest_of_them_at_the_front() -> None:
    bench = Bench(4)
    bench.fill(1, 2)
    taken = bench.queue.popleft_n(2)
    bench.queue.prepend_n([taken[1], taken[0]])
    assert [bench.queue.popleft() for _ in range(2)] == [taken[1], taken[0]]


def test_a_chain_loses_its_tail_first() -> None:
    bench = Bench(3)
    bench.fill(1, 2, 3)
    assert [bench.evict(1), bench.queue.num_free_blocks] == [[3], 3]
    bench.fill(9)
    assert bench.evict(3) == [2, 1, 9]


def test_a_block_that_was_hit_survives_a_scan_that_lru_would_lose_it_to() -> None:
    bench = Bench(8)
    bench.fill(1)
    bench.hit(1)
    for name in range(100, 112):
        bench.fill(name)
    assert 1 in bench.cached
    assert (bench.queue.hits_probation, bench.queue.hits_protected) == (1, 0)
    bench.hit(1)
    assert bench.queue.hits_protected == 1


def test_a_protected_block_that_nobody_asks_for_leaves_in_the_end() -> None:
    bench = Bench(8, factor=4.0)
    bench.fill(1)
    bench.hit(1)
    survived = 0
    while 1 in bench.cached:
        bench.fill(100 + survived)
        survived += 1
        assert survived < 100
    # Probation is 7 blocks deep, so 7 more go by before the two ages can be compared.
    assert 4 * 7 - 7 <= survived <= 4 * 7 + 8
    assert bench.queue.evicted_protected == 1


def test_factor_one_is_lru() -> None:
    bench = Bench(4, factor=1.0)
    for name in (1, 2, 3, 4):
        bench.fill(name)
    bench.hit(1)
    assert bench.evict(4) == [2, 3, 4, 1]


def test_a_protected_block_waits_for_older_ones_on_probation_even_if_overdue() -> None:
    """They might be its descendants."""
    bench = Bench(3, factor=1.0)
    bench.fill(1, 2)
    bench.hit(1)  # 1 is protected, its child 2 is not, and both are far past any factor
    bench.fill(50)
    assert bench.evict(3) == [2, 1, 50]


def test_a_returning_ghost_is_protected_at_once() -> None:
    bench = Bench(3)
    bench.fill(1, 2)
    assert bench.evict(3) == [2, 1]
    bench.fill(1)
    assert bench.queue.ghost_hits_probation == 1
    assert bench.queue.protected_blocks() == 1
    bench.fill(7)
    assert bench.queue.protected_blocks() == 1, "a block that was never seen is on probation"


def test_ghosts_of_probation_lower_the_factor_and_those_of_protection_raise_it() -> None:
    bench = Bench(2, factor=4.0)
    bench.fill(1)
    bench.evict(2)
    bench.fill(1)  # evicted from probation just now: one vote is one halving here
    assert bench.queue.protect_factor == pytest.approx(2.0)
    bench.evict(2)
    bench.fill(1)  # this time from the protected segment
    assert bench.queue.protect_factor == pytest.approx(4.0)
    assert (bench.queue.ghost_hits_probation, bench.queue.ghost_hits_protected) == (1, 1)


def test_an_old_ghost_is_protected_but_has_no_vote() -> None:
    bench = Bench(2, factor=4.0)
    bench.fill(1)
    for name in range(10, 20):
        bench.fill(name)
    bench.fill(1)
    assert bench.queue.ghost_hits_probation == 1
    assert bench.queue.protect_factor == 4.0


def test_the_factor_stays_between_one_and_its_limit() -> None:
    bench = Bench(2, factor=1.0)
    for name in range(20):
        bench.fill(name)
        bench.evict(2)
        bench.fill(name)
        assert bench.queue.protect_factor >= 1.0
        for _ in range(10):
            bench.evict(2)
            bench.fill(name)
            assert bench.queue.protect_factor <= 64.0
    assert bench.queue.protect_factor == 64.0


def test_a_hit_on_a_block_in_use_counts_as_well() -> None:
    bench = Bench(2)
    block = bench.queue.popleft()
    block.block_hash, block.block_hash_num_tokens, block.ref_cnt = _hash(1), 1, 1
    assert bench.queue.on_touch([block]) == 0
    block.ref_cnt = 0
    bench.queue.append_n([block])
    assert bench.queue.hits_in_use == 1
    assert bench.queue.protected_blocks() == 1
    assert bench.queue.on_touch([block]) == 1


def test_an_ancestor_is_never_below_its_descendant() -> None:
    bench = Bench(4)
    bench.fill(1, 2)
    taken = bench.cached[2], bench.cached[1]
    bench.queue.remove(taken[1])
    bench.queue.remove(taken[0])
    bench.queue._segment[taken[1].block_id] = 0  # as after a clash in the ghost table
    bench.queue.append_n(list(taken))
    assert bench.queue.protected_blocks() == 2


def test_what_others_set_aside_has_no_vote_when_it_is_evicted() -> None:
    table = Worths(demotes=True)
    bench = Bench(2, worth=Worth([("toy", table, PatchTally())]))
    bench.fill(1)
    table[_hash(1)] = -1.0
    bench.queue.revalue(bench.cached[1])
    assert bench.evict(2) == [1]
    table.clear()
    bench.fill(1)
    assert bench.queue.ghost_hits_probation == 1
    assert bench.queue.protected_blocks() == 1, "it did come back"
    assert bench.queue.protect_factor == 4.0, "but probation had not given it up"


def test_the_listing_has_each_free_block_once_and_goes_on_after_a_cursor() -> None:
    bench = Bench(6)
    bench.fill(1, 2)
    bench.hit(1)
    listed = bench.queue.get_all_free_blocks()
    assert sorted(block.block_id for block in listed) == list(range(6))
    assert listed[-2:] == [bench.cached[2], bench.cached[1]]
    for position, block in enumerate(listed):
        assert list(bench.queue.iter_blocks_after(block)) == listed[position + 1 :]


def test_ghosts_are_bounded_and_forgotten_once_found() -> None:
    table = GhostTable(100)
    assert len(table) == 128
    for name in range(10_000):
        table.put(_hash(name), name % 2, name)
    found = [name for name in range(10_000) if _hash(name) in table]
    assert 0 < len(found) <= 128
    assert [table.take(_hash(name)) for name in found] == [(name % 2, name) for name in found]
    assert not any(_hash(name) in table for name in range(10_000))
