"""The prefix probe against upstream's own look, on a real scheduler's cache as it changes; and it must change nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patches.kv.probe import PrefixProbe, common_blocks
from tests.drive import make_config, make_request, make_scheduler, run_to_end
from tests.scheduling.clocked import prompt

BLOCKS = 40
TREE = [prompt(seed, 48) for seed in range(6)]
# A prompt as a path of parts: prefixes are shared at every depth, and lengths do not end on blocks.
PATHS = st.lists(st.integers(0, 5), min_size=1, max_size=6).map(tuple)


def tokens(path: tuple[int, ...], cut: int) -> list[int]:
    whole = [token for part in path for token in TREE[part]]
    return whole[: max(1, len(whole) - cut)]


@pytest.fixture(scope="module")
def config() -> Any:
    return make_config(max_num_seqs=4, max_num_batched_tokens=64)


def upstream(scheduler: Any, request: Any) -> int:
    manager = scheduler.kv_cache_manager
    return int(manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[1])


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    served=st.lists(st.tuples(PATHS, st.integers(0, 20)), min_size=1, max_size=14),
    asked=st.lists(st.tuples(PATHS, st.integers(0, 20)), min_size=1, max_size=4),
)
def test_it_says_what_upstream_would_find_whenever_it_is_asked(config: Any, served: Any, asked: Any) -> None:
    """In a pool that evicts; asked in every step, so that what was known grows and shrinks."""
    scheduler = make_scheduler(config, BLOCKS)
    probe = PrefixProbe(scheduler)
    watched = [make_request(config, f"w{i}", tokens(*one)) for i, one in enumerate(asked)]
    free = scheduler.kv_cache_manager.block_pool.free_block_queue

    def look(step: int, sched: Any) -> None:
        order = [block.block_id for block in free.get_all_free_blocks()]
        for request in watched:
            hit = upstream(sched, request)
            # In either way first, and what one has noted is there for the other.
            if step % 2:
                assert probe.uncached_tokens([request]) == [request.num_tokens - hit]
            assert probe.cached_tokens(request) == hit
        assert probe.uncached_tokens(watched) == [r.num_tokens - upstream(sched, r) for r in watched]
        assert [block.block_id for block in free.get_all_free_blocks()] == order

    requests = [
        make_request(config, f"r{i}", tokens(*one), max_tokens=8, arrival_time=i)
        for i, one in enumerate(served)
    ]
    run_to_end(scheduler, requests, each=look)
    look(0, scheduler)


def test_few_looks_for_a_long_prompt(config: Any) -> None:
    scheduler = make_scheduler(make_config(max_model_len=8192, max_num_batched_tokens=8192), 600)
    whole = prompt(1, 4096)
    probe = PrefixProbe(scheduler)
    request = make_request(config, "long", whole)
    looks = 0
    table = scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
    original = table.get_one_block

    def counted(key: Any) -> Any:
        nonlocal looks
        looks += 1
        return original(key)

    table.get_one_block = counted
    assert probe.cached_tokens(request) == 0
    assert looks == 1
    run_to_end(scheduler, [make_request(config, "first", whole[:3000], max_tokens=1)])
    looks = 0
    assert probe.cached_tokens(request) == 3000 // 16 * 16
    assert looks <= 17
    looks = 0
    assert probe.cached_tokens(request) == 3000 // 16 * 16
    assert looks == 2


def test_a_request_that_must_not_read_the_cache_has_nothing_cached(config: Any) -> None:
    scheduler = make_scheduler(config, BLOCKS)
    whole = prompt(1, 128)
    run_to_end(scheduler, [make_request(config, "first", whole, max_tokens=1)])
    probe = PrefixProbe(scheduler)
    request = make_request(config, "second", whole)
    assert probe.cached_tokens(request) == 112
    request.skip_reading_prefix_cache = True
    assert probe.cached_tokens(request) == 0
    assert probe.uncached_tokens([request]) == [128]


def test_other_models_are_walked_for_a_few_requests_a_step(config: Any) -> None:
    scheduler = make_scheduler(config, BLOCKS)
    whole = prompt(1, 128)
    run_to_end(scheduler, [make_request(config, "first", whole, max_tokens=1)])
    probe = PrefixProbe(scheduler, walks_a_step=2)
    probe._chained = False
    requests = [make_request(config, f"r{i}", whole) for i in range(3)]
    assert [probe.cached_tokens(request) for request in requests] == [112, 112, 0]
    probe.begin_step()
    assert [probe.cached_tokens(request) for request in reversed(requests)] == [112, 112, 112]


@given(shared=st.integers(0, 200), one=st.integers(0, 90), other=st.integers(0, 90), known=st.integers(0, 5))
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_common_blocks(config: Any, shared: int, one: int, other: int, known: int) -> None:
    common = prompt(7, shared)
    a = make_request(config, "a", common + prompt(8, one) + [1])
    b = make_request(config, "b", common + prompt(9, other) + [2])
    least = min(known, shared // 16)
    expected = 0
    for x, y in zip(a.block_hashes, b.block_hashes, strict=False):
        if x != y:
            break
        expected += 1
    assert common_blocks(a, b, least, 100) == expected
    assert common_blocks(a, b, 0, 3) == min(expected, 3)
