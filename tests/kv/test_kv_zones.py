"""The zones of the free queue alone, on stand-ins for blocks: what worth does to the order of eviction.

Not here: vLLM's pool (test_kv_pool_laws), the segments (test_kv_segments).
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from patches.kv.segments import SegmentedFreeQueue
from patches.kv.zones import ZonedFreeQueue
from patches.seam.receipt import PatchTally
from patches.seam.worth import Worth, Worths
from tests.kv.test_kv_segments import Block, _hash

KINDS = ("lru", "slru")


class Bench:
    """A queue, and a table that says what its blocks are worth."""

    def __init__(self, count: int, kind: str = "lru", *, demotes: bool = True) -> None:
        self.table = Worths(demotes=demotes)
        worth = Worth([("toy", self.table, PatchTally())])
        self.blocks = [Block(i) for i in range(count)]
        if kind == "lru":
            self.queue: Any = ZonedFreeQueue(self.blocks, worth)
        else:
            self.queue = SegmentedFreeQueue(
                self.blocks,
                ghost_slots=64,
                marginal_blocks=4,
                doubling_blocks=1.0,
                start_factor=1.0,
                max_factor=1.0,
                worth=worth,
            )

    def fill(self, *names: int) -> list[Any]:
        """A chain of blocks, head first, that is cached and freed."""
        taken: list[Any] = self.queue.popleft_n(len(names))
        for depth, (block, name) in enumerate(zip(taken, names, strict=True), start=1):
            block.block_hash, block.block_hash_num_tokens = _hash(name), depth
        self.queue.append_n(taken[::-1])
        return taken

    def worth(self, block: Any, value: float) -> None:
        if value:
            self.table[block.block_hash] = value
        else:
            self.table.pop(block.block_hash, None)
        self.queue.revalue(block)

    def evict(self, count: int) -> list[int]:
        """Hashes' names of the next blocks, which are kept out."""
        names = {_hash(name): name for name in range(1000)}
        return [names[block.block_hash] for block in self.queue.popleft_n(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_dead_first_then_the_rest_then_spared_the_least_worth_first(kind: str) -> None:
    bench = Bench(5, kind)
    first, second, third, fourth, fifth = (bench.fill(name)[0] for name in (1, 2, 3, 4, 5))
    bench.worth(first, 2.0)
    bench.worth(second, 0.5)
    bench.worth(third, -4.0)
    bench.worth(fifth, -1.0)
    assert (bench.queue.dead_blocks, bench.queue.num_free_blocks) == (2, 5)
    assert bench.evict(5) == [3, 5, 4, 2, 1]
    assert (bench.queue.dead_evicted, bench.queue.spared_evicted) == (2, 2)
    assert bench.queue.num_free_blocks == bench.queue.spared_blocks == bench.queue.dead_blocks == 0
    assert fourth.prev_free_block is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_lost_its_worth_goes_where_it_would_be_by_now(kind: str) -> None:
    bench = Bench(4, kind)
    first, second = bench.fill(1)[0], bench.fill(2)[0]
    bench.fill(3)
    bench.fill(4)
    bench.worth(first, 2.0)
    bench.worth(second, 2.0)
    assert bench.evict(1) == [3]  # both were come upon
    assert bench.queue.spared_blocks == 2
    bench.worth(second, 0)
    bench.worth(first, 0)
    assert bench.queue.spared_blocks == 0
    assert bench.evict(3) == [1, 2, 4]


def test_a_block_that_eviction_did_not_reach_stays_in_its_place() -> None:
    bench = Bench(3)
    blocks = [bench.fill(name)[0] for name in (1, 2, 3)]
    bench.worth(blocks[1], 3.0)
    assert bench.evict(1) == [1]
    assert bench.queue.spared_blocks == 0
    bench.worth(blocks[1], 0)
    assert bench.evict(2) == [2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_on_a_spared_block_counts_and_frees_it_as_any_other(kind: str) -> None:
    bench = Bench(3, kind)
    first = bench.fill(1)[0]
    bench.fill(2)
    bench.fill(3)
    bench.worth(first, 2.0)
    assert bench.evict(1) == [2]
    bench.queue.remove(first)
    assert (bench.queue.spared_hits, bench.queue.spared_blocks) == (1, 0)
    bench.table.clear()
    bench.queue.append_n([first])
    assert bench.evict(2) == [3, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_block_is_known_as_such_when_it_is_freed_and_may_rise_again(kind: str) -> None:
    bench = Bench(3, kind)
    first, second, third = (bench.fill(name)[0] for name in (1, 2, 3))
    for block in (second, third):
        bench.queue.remove(block)
        bench.table[block.block_hash] = -4.0
        bench.queue.append_n([block])
    assert bench.queue.dead_blocks == 2
    bench.worth(third, 0)
    bench.worth(second, 2.5)
    assert bench.queue.dead_blocks == 0
    assert bench.evict(3) == [3, 1, 2]
    assert first.next_free_block is None


def test_of_equal_worth_the_deepest_goes_first_whatever_the_order_of_the_calls() -> None:
    bench = Bench(6)
    long, other = bench.fill(1, 2, 3), bench.fill(7, 8, 9)
    for block in (*long, *other):
        bench.worth(block, 2.0)
    for block in (*other, *long):
        bench.worth(block, -1.0)
    order = bench.evict(6)
    assert [order.index(name) for name in (3, 2, 1)] == sorted(order.index(name) for name in (3, 2, 1))
    assert [order.index(name) for name in (9, 8, 7)] == sorted(order.index(name) for name in (9, 8, 7))


def test_a_spared_block_whose_worth_has_grown_unseen_is_asked_again() -> None:
    bench = Bench(2)
    first, second = bench.fill(1)[0], bench.fill(2)[0]
    bench.table |= {first.block_hash: 1.0, second.block_hash: 2.0}
    bench.queue._set_aside(first, 3, 1.0)
    bench.queue._set_aside(second, 3, 2.0)
    bench.table[first.block_hash] = 3.0
    assert bench.evict(2) == [2, 1]


def test_nothing_is_asked_while_nobody_says_anything() -> None:
    asked = []

    class Table(Worths):
        def __call__(self, block: Any) -> float:
            asked.append(block)
            return super().__call__(block)

    bench = Bench(3)
    table = Table()
    bench.queue._worth = Worth([("toy", table, PatchTally())])
    blocks = [bench.fill(name)[0] for name in (1, 2, 3)]
    bench.queue.append_n(bench.queue.popleft_n(3))
    assert asked == []
    table[blocks[0].block_hash] = 1.0
    bench.queue.append_n(bench.queue.popleft_n(1))
    assert asked == [blocks[0], blocks[1]], "only what is about to be evicted, and nothing that is freed"


def test_a_table_that_is_empty_is_not_asked_beside_one_that_is_not() -> None:
    class Silent(Worths):
        def __call__(self, block: Any) -> float:
            raise AssertionError("asked")

    block, table = Block(1), Worths()
    block.block_hash, table[_hash(1)] = _hash(1), 2.0
    silent, other, tally = ("toy", Silent(), PatchTally()), ("other", table, PatchTally()), PatchTally()
    worth = Worth([silent, other])
    assert worth(block) == 2.0
    assert worth.single() is table
    assert Worth([silent]).single() is None
    assert Worth([other, ("third", table, tally)]).single() is None
    assert Worth([other, ("hook", lambda block: 0.0, tally)]).single() is None, (
        "it may say something at any time"
    )


def test_revaluing_a_block_that_is_not_free_or_holds_nothing_does_nothing() -> None:
    bench = Bench(2)
    bench.queue.revalue(bench.blocks[0])
    block = bench.queue.popleft()
    block.block_hash = _hash(1)
    bench.table[block.block_hash] = -1.0
    bench.queue.revalue(block)
    assert (bench.queue.dead_blocks, bench.queue.num_free_blocks) == (0, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_books_hold_under_random_worths(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(20, kind)
    for block in bench.blocks:
        block.block_hash, block.block_hash_num_tokens = _hash(block.block_id), 1 + block.block_id % 4
    bench.queue.append_n(bench.queue.popleft_n(20))
    held: list[Any] = []
    for _ in range(2000):
        what = rng.randrange(4)
        if what == 0 and held:
            bench.queue.append_n([held.pop(rng.randrange(len(held)))])
        elif what == 1 and bench.queue.num_free_blocks:
            held += bench.queue.popleft_n(rng.randint(1, min(3, bench.queue.num_free_blocks)))
        elif what == 2:
            free = bench.queue.get_all_free_blocks()
            if free:
                held.append(rng.choice(free))
                bench.queue.remove(held[-1])
        else:
            bench.worth(rng.choice(bench.blocks), rng.choice([0, 0, -1.0, 2.0, 3.0]))
        listed = {block.block_id for block in bench.queue.get_all_free_blocks()}
        assert listed == {block.block_id for block in bench.blocks} - {block.block_id for block in held}
        assert bench.queue.num_free_blocks == len(listed)
        assert bench.queue.dead_blocks == sum(
            bench.table.get(block.block_hash, 0) < 0 for block in bench.queue.get_all_free_blocks()
        )
        assert len(bench.queue._aside) <= 64 + 2 * 20 + 1
    assert len(bench.evict(bench.queue.num_free_blocks)) == 20 - len(held)
