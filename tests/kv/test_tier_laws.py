"""Guards that no request ever computes on KV that is not its own, whatever goes down, comes up, is lost or cancelled.

Random traffic of two tenants on real Schedulers, synchronous and asynchronous, with a pool that is too small, a host tier
that is too small, and a disk that loses blocks. Without the watch over blocks that are still being copied the
law breaks, which the last test shows. Not here: bytes (tests/kv/test_tier_engine.py), files, and what it is worth.
"""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patches.kv.tiers.connector import _to_be_written
from patches.kv.tiers.files import TENANT_BYTES, tenant_digest
from patches.kv.tiers.jobs import Move, Moves
from tests.kv.tier_world import BLOCK_BYTES, MixUp, World
from tests.scheduling.clocked import patched, prompt

BLOCKS = 40
KNOBS: dict[str, Any] = {
    "host_bytes": 60 * BLOCK_BYTES,
    "disk_bytes": 40 * BLOCK_BYTES,
    "disk_from_rank": 1,
    "save_ahead_share": 0.3,
    "reload_min_blocks": 1,
    "reload_cost_ratio": 100.0,
    "token_recompute_us": 1e5,
    "prefetch_every_ms": 1.0,
}

# (step, which common beginning, its tokens, own tokens, output, tenant, priority, cancelled after)
ASKED = st.lists(
    st.tuples(
        st.integers(0, 90),
        st.integers(0, 2),
        st.sampled_from([0, 48, 96, 160]),
        st.integers(1, 220),
        st.integers(1, 60),
        st.sampled_from("ab"),
        st.integers(0, 2),
        st.one_of(st.none(), st.none(), st.integers(0, 60)),
    ),
    min_size=8,
    max_size=26,
)
# Before any was measured: about two loads of this traffic, a microsecond or two each.
TWO_LOADS_MS = 12 * BLOCK_BYTES / 20e9 * 1e3
LATE = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def run(
    asked: list[Any],
    seed: int,
    *,
    async_scheduling: bool,
    loss: float = 0.1,
    resets: Collection[int] = (),
    **knobs: Any,
) -> World:
    """A run to the end; every token of each request that was not cancelled came."""
    with patched("tiering", {"tiering": KNOBS | knobs}) as (_, clock):
        world = World(KNOBS | knobs, BLOCKS, seed, async_scheduling=async_scheduling, loss=loss)
        loads: list[tuple[str, bytes]] = []
        load = world.tiers.moves.load

        def noted(move: Move) -> int:
            loads.extend((move.request_id, key) for key in move.keys)
            return load(move)

        world.tiers.moves.load = noted
        arrivals, cancels, wanted = [], {}, {}
        for number, (at, common, shared, own, output, tenant, priority, after) in enumerate(asked):
            name = f"{tenant}{number}"
            tokens = prompt(common, 160)[:shared] + prompt(100 + number, own)
            arrivals.append((at, world.request(name, tokens, output, tenant, priority)))
            wanted[name] = output
            if after is not None:
                cancels[at + after] = name
        world.run(arrivals, cancels, clock, resets)
        pool = world.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == BLOCKS - 1
        assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
        for name, output in wanted.items():
            if name not in cancels.values():
                assert world.finished[name] == output, name
        for name, key in loads:
            assert key[:TENANT_BYTES] == tenant_digest(name[0]), "a block of another tenant was loaded"
        assert world.tiers._reserved == 0
        world.loaded = loads
    return world


@pytest.mark.parametrize("async_scheduling", [False, True])
@LATE
@given(asked=ASKED, seed=st.integers(0, 1000), sync_ms=st.sampled_from([0.0, TWO_LOADS_MS, 1000.0]))
def test_every_request_computes_on_its_own_kv(
    async_scheduling: bool, asked: list[Any], seed: int, sync_ms: float
) -> None:
    run(asked, seed, async_scheduling=async_scheduling, reload_sync_ms=sync_ms)


def busy() -> list[Any]:
    """Traffic that preempts, pushes out and comes back."""
    return [(3 * i, i % 3, 96, 40 + 17 * (i % 9), 50, "ab"[i % 2], i % 3, None) for i in range(24)]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_traffic_of_these_tests_uses_all_tiers(async_scheduling: bool) -> None:
    world = run(busy(), 5, async_scheduling=async_scheduling)
    assert world.tiers.recoveries.preempted > 0
    assert world.tiers.counts.loads > 0 and world.tiers.counts.d2h_bytes > 0
    assert world.disk.kept


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_blocks_that_lost_their_hash_are_watched_too(async_scheduling: bool) -> None:
    """A reset of the prefix cache preempts all and takes the hashes: what is handed out then tells nobody that it goes."""
    for seed in range(4):
        world = run(
            busy(), seed, async_scheduling=async_scheduling, resets=range(5, 200, 7), reload_sync_ms=1000.0
        )
        assert world.tiers.counts.flushed_saves > 0


def test_what_is_too_much_for_one_step_has_the_next() -> None:
    """And only a load that is longer than all of that is made beside steps, or one that was put off for long."""
    knobs = KNOBS | {"reload_sync_ms": TWO_LOADS_MS, "save_ahead_share": 0.0}
    with patched("tiering", {"tiering": knobs}) as (_, clock):
        world = World(knobs, BLOCKS, 1, async_scheduling=False)
        asked = [world.request(name, prompt(number, 160), 4, "a", 2) for number, name in enumerate("xa")]
        world.run([(20 * number, request) for number, request in enumerate(asked)], {}, clock)
        tiers = world.tiers
        tiers.before_schedule(1.0)
        again = world.request("b", prompt(0, 160), 4, "a", 2)
        held = tiers.match(again, 0)[0]
        assert held and tiers.match(again, 0) == (held, False)
        tiers._sync_left_s = 0.0
        assert tiers.match(again, 0) == tiers.match(again, 0) == (None, False)
        # What is under way does not make the load itself longer.
        tiers.rates.load.begin(60 * BLOCK_BYTES)
        assert tiers.match(again, 0) == (None, False)
        assert tiers.counts.next_step_loads == 1
        clock.advance_to(clock.now_ns + 600_000_000)
        assert tiers.match(again, 0) == (held, True)
        tiers.rates.load.end(60 * BLOCK_BYTES)
        tiers.before_schedule(2.0)
        assert tiers.match(again, 0) == (held, False)
        tiers._sync_left_s = 0.0
        assert tiers.match(again, 0) == (None, False)
        tiers.rates.load.bytes_per_s /= 100
        assert tiers.match(again, 0) == (held, True)
        tiers.rates.load.bytes_per_s /= 1e9
        assert tiers.match(again, 0) == tiers.match(again, 0) == (0, False)
        assert (tiers.counts.next_step_loads, tiers.counts.dear_loads) == (1, 1)


def test_patience_that_has_ended_does_not_begin_again() -> None:
    """Whatever else comes and goes meanwhile."""
    with patched("tiering", {"tiering": KNOBS}) as (_, clock):
        world = World(KNOBS, BLOCKS, 1, async_scheduling=False)
        tiers, asked = world.tiers, world.request("a", prompt(0, 160), 4, "a", 2)
        world.run([(0, world.request("x", prompt(1, 160), 4, "a", 2))], {}, clock)
        state = tiers._state(asked)
        # Being written, for ever.
        assert tiers.host.add(state.keys[0], True, must=True) is not None
        assert tiers.match(asked, 0) == (None, False)
        clock.advance_to(clock.now_ns + 600_000_000)
        assert tiers.match(asked, 0) == (0, False)
        tiers.host.version += 1
        assert tiers.match(asked, 0) == (0, False)
        assert tiers.counts.patience_ended == 1


def test_only_what_a_pass_writes_to_is_named() -> None:
    """Not what one that resumes has found."""
    out = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(block_ids=([1, 2, 3],), num_computed_tokens=32)],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["back", "runs", "same"],
            resumed_req_ids={"back"},
            new_block_ids=[([4, 5, 6],), ([7],), None],
            num_computed_tokens=[16, 48, 5],
        ),
    )
    assert list(_to_be_written(out, 16)) == [3, 5, 6, 7]


def test_saves_within_a_pass_are_counted() -> None:
    """Those of whom the pass preempts, with all others."""
    with patched("tiering", {"tiering": KNOBS}) as (installation, clock):
        world = World(KNOBS, BLOCKS, 1, async_scheduling=False)
        arrivals = [(0, world.request(f"a{i}", prompt(i, 100), 100, "a", 2)) for i in range(6)]
        saves: list[Move] = []
        save = world.tiers.moves.save

        def noted(move: Move) -> int:
            saves.append(move)
            return save(move)

        world.tiers.moves.save = noted
        world.run(arrivals, {}, clock)
        assert world.tiers.recoveries.preempted > 0
        counted = installation.tallies["tiering"].by_hook["saved_blocks"]
        assert counted == sum(len(move.keys) for move in saves)


def run_seeds(count: int, async_scheduling: bool) -> None:
    """The busy traffic, with other delays each time."""
    for seed in range(count):
        run(busy(), seed, async_scheduling=async_scheduling)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_without_the_watch_over_saves_the_law_breaks(
    async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Moves, "overwritten", lambda self, block: None)
    with pytest.raises(MixUp):
        run_seeds(30, async_scheduling)
