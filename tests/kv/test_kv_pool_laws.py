"""Laws of the segmented queue inside vLLM's own BlockPool, over random traffic.

Guards: conservation, exact counts, reference counts, chains evicted from their tail, LRU at factor 1.
Does not guard: that the policy is any good (see the replay tests).
"""

from __future__ import annotations

import hashlib
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cache_policies import QUEUES, QueueFactory
from harness.cache_replay import make_pool
from patches.kv.slru import SlruKnobs, make_queue
from patches.kv.zones import ZonedFreeQueue
from patches.seam.receipt import PatchTally
from patches.seam.worth import Worth

_TOKENS = 512
Path = tuple[int, ...]

# Steps of a random history: start a request on a path of the tree (3 ways at each depth), grow one, end one.
_paths = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
_starts = st.tuples(st.just("start"), _paths)
_steps = st.one_of(
    _starts,
    _starts,
    st.tuples(st.just("grow"), st.integers(0, 9), st.integers(0, 2)),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("end"), st.integers(0, 9)),
)
_rude = st.one_of(
    _steps,
    st.tuples(st.just("evict"), st.sets(st.integers(1, 12), max_size=4)),
    st.tuples(st.just("partial"), st.integers(1, 3)),
    st.tuples(st.just("unpin"), st.integers(0, 9)),
    st.tuples(st.just("reset")),
)
_knobs = st.builds(
    SlruKnobs,
    ghost_times=st.sampled_from([0.1, 1.0, 4.0]),
    start_factor=st.sampled_from([1.0, 4.0, 64.0]),
    marginal_share=st.sampled_from([0.125, 1.0]),
    doubling_share=st.sampled_from([0.0625, 1.0]),
)


class World:
    """Requests on a pool, served as vLLM's KV manager does it."""

    def __init__(self, queue: QueueFactory, blocks: int) -> None:
        self.pool = make_pool(queue, blocks)
        self.size = blocks
        self.live: list[tuple[Path, list[Any]]] = []
        self.bare: list[Any] = []  # blocks of requests whose content was never complete
        self.hits: list[int] = []
        self.order: list[int] = []  # ids of the blocks handed out

    def apply(self, step: tuple[Any, ...]) -> None:
        getattr(self, step[0])(*step[1:])

    def start(self, path: Path) -> None:
        found: list[Any] = []
        for depth in range(1, len(path) + 1):
            cached = self.pool.get_cached_block(_hash(path[:depth]), [0])
            if cached is None:
                break
            found += cached
        need = len(path) - len(found)
        if self.pool.get_num_free_blocks() - sum(block.ref_cnt == 0 for block in found) < need:
            return
        self.pool.touch(found)
        blocks = found + self._new(need)
        self._cache(path, blocks, len(found))
        self.hits.append(len(found))
        self.live.append((path, blocks))

    def grow(self, which: int, branch: int) -> None:
        if self.live and self.pool.get_num_free_blocks():
            path, blocks = self.live.pop(which % len(self.live))
            path, blocks = (*path, branch), blocks + self._new(1)
            self._cache(path, blocks, len(blocks) - 1)
            self.live.append((path, blocks))

    def end(self, which: int) -> None:
        if self.live:
            self.pool.free_blocks(reversed(self.live.pop(which % len(self.live))[1]))

    def partial(self, count: int) -> None:
        """A request that ends before any block of it is full."""
        if self.pool.get_num_free_blocks() >= count:
            self.bare += self._new(count)
        if len(self.bare) > 3:
            self.pool.free_blocks(reversed(self.bare))
            self.bare = []

    def unpin(self, which: int) -> None:
        if self.live:
            self.pool.unpin_blocks(self.live.pop(which % len(self.live))[1][::-1], lambda block: None)

    def evict(self, ids: set[int]) -> None:
        self.pool.evict_blocks({block for block in ids if block <= self.size})

    def reset(self) -> None:
        if not self.live and not self.bare:
            assert self.pool.reset_prefix_cache()

    def _new(self, count: int) -> list[Any]:
        blocks: list[Any] = self.pool.get_new_blocks(count)
        self.order += [block.block_id for block in blocks]
        return blocks

    def _cache(self, path: Path, blocks: list[Any], cached: int) -> None:
        hashes = [_hash(path[:depth]) for depth in range(1, len(path) + 1)]
        self.pool.cache_full_blocks(
            SimpleNamespace(block_hashes=hashes), blocks, cached, len(path), _TOKENS, 0
        )

    # laws

    def check_books(self) -> None:
        pool = self.pool
        listed = pool.free_block_queue.get_all_free_blocks()
        ids = [block.block_id for block in listed]
        assert len(ids) == len(set(ids)), "a block is listed twice"
        assert pool.get_num_free_blocks() == len(ids)
        held: dict[int, int] = {}
        for _, blocks in [*self.live, ((), self.bare)]:
            for block in blocks:
                held[block.block_id] = held.get(block.block_id, 0) + 1
        assert {*ids} | {*held} == {*range(1, self.size + 1)}, "a block was lost"
        assert not {*ids} & {*held}, "a block is both free and held"
        for block in pool.blocks[1:]:
            assert block.ref_cnt == held.get(block.block_id, 0)

    def check_chains(self, paths: set[Path]) -> None:
        for path in paths:
            for depth in range(2, len(path) + 1):
                if self._findable(path[:depth]):
                    assert self._findable(path[: depth - 1]), f"{path[:depth]} outlived its parent"

    def _findable(self, path: Path) -> bool:
        return self.pool.get_cached_block(_hash(path), [0]) is not None


def _hash(path: Path) -> bytes:
    return hashlib.blake2b(repr(path).encode(), digest_size=32).digest()


@settings(max_examples=150, deadline=None)
@given(knobs=_knobs, blocks=st.integers(1, 14), history=st.lists(_rude, max_size=60))
def test_no_block_is_lost_doubled_or_both_free_and_held(
    knobs: SlruKnobs, blocks: int, history: list[tuple[Any, ...]]
) -> None:
    world = World(lambda all_blocks: make_queue(all_blocks, knobs), blocks)
    for step in history:
        world.apply(step)
        world.check_books()


@settings(max_examples=60, deadline=None)
@given(knobs=_knobs, blocks=st.integers(4, 16), seed=st.integers(0, 2**32))
def test_a_child_never_outlives_its_parent(knobs: SlruKnobs, blocks: int, seed: int) -> None:
    """Long histories with much sharing, which a search by small steps seldom reaches."""
    world = World(lambda all_blocks: make_queue(all_blocks, knobs), blocks)
    rng = random.Random(seed)
    seen: set[Path] = set()
    for _ in range(150):
        which = rng.randrange(10)
        if which < 4:
            world.start(tuple(int(rng.random() < 0.4) for _ in range(rng.randint(1, 5))))
        elif which < 5:
            world.grow(rng.randrange(10), rng.randrange(2))
        else:
            world.end(rng.randrange(10))
        seen |= {path for path, _ in world.live}
        world.check_chains(seen)


@settings(max_examples=100, deadline=None)
@given(blocks=st.integers(1, 14), history=st.lists(_rude, max_size=60))
def test_blocks_with_nothing_cached_are_reused_first(blocks: int, history: list[tuple[Any, ...]]) -> None:
    """Freed with nothing cached: `evict` and `reset` (of blocks already free) and `unpin` are left out."""
    world = World(QUEUES["slru"], blocks)
    for step in history:
        if step[0] in ("start", "grow", "end", "partial"):
            world.apply(step)
    free = world.pool.free_block_queue.get_all_free_blocks()
    empty = sum(block.block_hash is None for block in free)
    taken = world.pool.free_block_queue.popleft_n(len(free))
    assert all(block.block_hash is None for block in taken[:empty])


@settings(max_examples=150, deadline=None)
@given(blocks=st.integers(1, 14), history=st.lists(_steps, max_size=60))
def test_at_factor_one_every_choice_is_lrus(blocks: int, history: list[tuple[Any, ...]]) -> None:
    flat = SlruKnobs(start_factor=1, max_factor=1)
    ours, stock = World(lambda all_blocks: make_queue(all_blocks, flat), blocks), World(QUEUES["lru"], blocks)
    for step in history:
        ours.apply(step)
        stock.apply(step)
    assert ours.hits == stock.hits
    assert ours.order == stock.order


# with worths


class Marks:
    """Worths as patches give them: a need of a path is one of all its prefixes, a dead path's descendants are dead too."""

    def __init__(self) -> None:
        self.wanted: dict[Path, float] = {}
        self.dead: dict[Path, float] = {}
        self.paths: dict[bytes, Path] = {}

    def __call__(self, block: Any) -> float:
        path = self.paths.get(block.block_hash[:-4]) if block.block_hash is not None else None
        if path is None:
            return 0.0
        depth = len(path)
        wanted = sum(value for other, value in self.wanted.items() if other[:depth] == path)
        return wanted - sum(value for other, value in self.dead.items() if path[: len(other)] == other)


def worth_world(kind: str, knobs: SlruKnobs, blocks: int) -> tuple[World, Marks]:
    """A world whose queue asks marks."""
    marks = Marks()
    worth = Worth([("marks", marks, PatchTally())])
    make: QueueFactory = (
        (lambda all_blocks: ZonedFreeQueue(all_blocks, worth))
        if kind == "lru"
        else lambda all_blocks: make_queue(all_blocks, knobs, worth)
    )
    return World(make, blocks), marks


def mark(world: World, marks: Marks, rng: random.Random, path: Path) -> None:
    """Change one mark, and tell the queue of every block, in any order."""
    table = rng.choice([marks.wanted, marks.dead])
    if path in table:
        del table[path]
    else:
        table[path] = rng.choice([0.5, 2.0, 4.0])
    for block in rng.sample(world.pool.blocks, len(world.pool.blocks)):
        if block.ref_cnt == 0 and not block.is_null:
            world.pool.free_block_queue.revalue(block)


@pytest.mark.parametrize("kind", ["lru", "slru"])
@settings(max_examples=60, deadline=None)
@given(knobs=_knobs, blocks=st.integers(4, 16), seed=st.integers(0, 2**32))
def test_with_any_worths_no_block_is_lost_and_no_child_outlives_its_parent(
    kind: str, knobs: SlruKnobs, blocks: int, seed: int
) -> None:
    world, marks = worth_world(kind, knobs, blocks)
    rng = random.Random(seed)
    seen: set[Path] = set()
    for _ in range(120):
        which = rng.randrange(12)
        if which < 4:
            world.start(tuple(int(rng.random() < 0.4) for _ in range(rng.randint(1, 5))))
        elif which < 5:
            world.grow(rng.randrange(10), rng.randrange(2))
        elif which < 10:
            world.end(rng.randrange(10))
        else:
            mark(world, marks, rng, tuple(rng.randrange(2) for _ in range(rng.randint(1, 4))))
        for path, _ in world.live:
            seen |= {path[:depth] for depth in range(1, len(path) + 1)}
        marks.paths = {_hash(path): path for path in seen}
        world.check_books()
        world.check_chains(seen)


@pytest.mark.parametrize("kind", ["lru", "slru"])
@settings(max_examples=60, deadline=None)
@given(blocks=st.integers(2, 14), history=st.lists(_steps, max_size=60), seed=st.integers(0, 2**32))
def test_a_worth_that_came_and_went_leaves_the_order_as_it_was(
    kind: str, blocks: int, history: list[tuple[Any, ...]], seed: int
) -> None:
    """Sparing that lapses before anything was saved by it is as none; both at LRU, whose order is plain."""
    flat = SlruKnobs(start_factor=1, max_factor=1)
    (ours, marks), stock = worth_world(kind, flat, blocks), World(QUEUES["lru"], blocks)
    rng = random.Random(seed)
    for step in history:
        ours.apply(step)
        stock.apply(step)
        marks.paths = {_hash(path[:d]): path[:d] for path, _ in ours.live for d in range(1, len(path) + 1)}
        for path, _ in ours.live:
            marks.wanted[path] = 2.0
        # As if eviction came upon some of the oldest: they are set aside, and then nobody wants them any more.
        queue = ours.pool.free_block_queue
        for _ in range(rng.randrange(4)):
            block = queue._victim()
            if block is not None and block.block_hash is not None and marks(block) > 0:
                queue._set_aside(block, 3, marks(block))
                queue._reached[block.block_id] = queue._numbers
        marks.wanted.clear()
        for block in rng.sample(ours.pool.blocks, len(ours.pool.blocks)):
            if block.ref_cnt == 0 and not block.is_null:
                ours.pool.free_block_queue.revalue(block)
    assert ours.hits == stock.hits
    assert ours.order == stock.order


def test_the_laws_can_fail() -> None:
    """A queue that evicts parents first, and one that miscounts, are both caught."""

    class ParentsFirst(type(QUEUES["lru"]([]))):  # type: ignore[misc]
        def append_n(self, blocks: list[Any]) -> None:
            super().append_n(blocks[::-1])

    world = World(ParentsFirst, 3)
    world.start((0, 0, 0))
    world.end(0)
    world.start((1,))
    with pytest.raises(AssertionError, match="outlived"):
        world.check_chains({(0, 0, 0)})

    world = World(QUEUES["slru"], 3)
    world.pool.free_block_queue.num_free_blocks += 1
    with pytest.raises(AssertionError):
        world.check_books()
