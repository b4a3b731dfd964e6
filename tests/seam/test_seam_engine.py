"""The adapter on real Schedulers, sync and async, with toy patches: order, gates, caps, preemption, undo."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.core.sched.scheduler import Scheduler

from patches.seam import adapter
from patches.seam.plan import resolve
from patches.seam.runtime import RUNTIME_ATTR
from tests.drive import cancel, free_blocks, make_config, make_request, make_scheduler, run_to_end
from tests.seam.toys import everything, hold

BOTH = pytest.mark.parametrize("async_scheduling", [False, True])


@contextmanager
def installed(enable: str, **more: Any) -> Iterator[adapter.Installation]:
    installation = adapter.install(resolve(enable, **more))
    try:
        yield installation
    finally:
        installation.undo()


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    everything.clear()
    hold.ASKED.clear()
    hold.OPEN_AFTER_STEPS["steps"] = 5
    yield
    assert adapter.active() is None


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 1000) for _ in range(length)]


@BOTH
def test_key_orders_waiting_requests(async_scheduling: bool) -> None:
    config = make_config(max_num_seqs=1, async_scheduling=async_scheduling)
    with installed("tests.seam.toys.reverse") as installation:
        scheduler = make_scheduler(config, 200)
        assert scheduler.__dict__[RUNTIME_ATTR]
        trace = run_to_end(scheduler, [make_request(config, f"r{i}", prompt(i, 40)) for i in range(6)])
    assert trace.order() == ["r5", "r4", "r3", "r2", "r1", "r0"]
    assert installation.tallies["reverse"].by_hook["request_key"] == 6


def test_ranks_decide_the_order_of_parts() -> None:
    # reverse (rank 10, two to a bucket) is outermost; longfirst (rank 20) decides within a bucket.
    config = make_config(max_num_seqs=1)
    lengths = [10, 30, 20, 40]
    orders = {}
    for enable in ("tests.seam.toys.reverse,tests.seam.toys.longfirst", "tests.seam.toys.longfirst"):
        sets = ["reverse.bucket_requests=2"] if "reverse" in enable else []
        with installed(enable, sets=sets):
            requests = [
                make_request(config, f"r{i}", prompt(i, n), max_tokens=1) for i, n in enumerate(lengths)
            ]
            orders[enable] = run_to_end(make_scheduler(config, 200), requests).order()
    assert list(orders.values()) == [["r3", "r2", "r1", "r0"], ["r3", "r1", "r2", "r0"]]


def test_native_priority_stays_outermost_unless_replaced() -> None:
    config = make_config(max_num_seqs=1, policy="priority")
    with installed("tests.seam.toys.reverse"):
        scheduler = make_scheduler(config, 200)
        requests = [make_request(config, f"r{i}", prompt(i, 20), priority=i // 2) for i in range(4)]
        assert run_to_end(scheduler, requests).order() == ["r1", "r0", "r3", "r2"]


@BOTH
def test_pressure_preempts_the_worst_key_and_all_requests_end(async_scheduling: bool) -> None:
    config = make_config(max_num_seqs=8, max_num_batched_tokens=256, async_scheduling=async_scheduling)
    with installed("tests.seam.toys.reverse"):
        scheduler = make_scheduler(config, 40)
        start = free_blocks(scheduler)
        requests = [make_request(config, f"r{i}", prompt(i, 60), max_tokens=90) for i in range(8)]
        trace = run_to_end(scheduler, requests)
    assert trace.preempted
    # The latest arrival has the best key: it is never the victim while others run.
    assert "r7" not in trace.preempted
    assert set(trace.finished) == {f"r{i}" for i in range(8)}
    assert all(len(tokens) == 90 for tokens in trace.outputs.values())
    assert free_blocks(scheduler) == start
    assert all(
        block.ref_cnt == 0 for block in scheduler.kv_cache_manager.block_pool.blocks if not block.is_null
    )


@BOTH
def test_random_arrivals_and_cancels_leak_nothing(async_scheduling: bool) -> None:
    config = make_config(max_num_seqs=6, max_num_batched_tokens=128, async_scheduling=async_scheduling)
    rng = random.Random(3)
    with installed("tests.seam.toys.reverse,tests.seam.toys.everything,tests.seam.toys.mru"):
        scheduler = make_scheduler(config, 50)
        start = free_blocks(scheduler)
        requests = [
            make_request(
                config, f"r{i}", prompt(i % 5, rng.randrange(20, 300)), max_tokens=rng.randrange(1, 80)
            )
            for i in range(60)
        ]
        pending = list(requests)

        def each(step: int, sched: Any) -> None:
            for _ in range(rng.randrange(3)):
                if pending:
                    sched.add_request(pending.pop())
            if rng.random() < 0.2 and sched.requests:
                cancel(sched, rng.choice(sorted(sched.requests)))
            if rng.random() < 0.2 and sched.running:
                everything.PREEMPT.add(rng.choice(sched.running).request_id)
            if rng.random() < 0.1 and sched.requests:
                everything.EXPIRE.add(rng.choice(sorted(sched.requests)))

        while pending:
            run_to_end(scheduler, each=each)
    assert len(everything.LOG["add"]) == 60
    assert sorted(rid for rid, _ in everything.LOG["finish"]) == sorted(r.request_id for r in requests)
    assert everything.LOG["preempt"]
    assert everything.LOG["touch"]
    assert everything.LOG["evict"]
    assert free_blocks(scheduler) == start
    assert not scheduler.requests
    assert not len(scheduler.waiting)
    assert all(
        block.ref_cnt == 0 for block in scheduler.kv_cache_manager.block_pool.blocks if not block.is_null
    )


def test_gate_holds_inside_the_queue_and_lets_others_pass() -> None:
    config = make_config()
    with installed("tests.seam.toys.hold") as installation:
        scheduler = make_scheduler(config, 400)
        requests = [
            make_request(config, f"r{i}", prompt(i, 20), max_tokens=3, tenant="held" if i < 30 else "free")
            for i in range(32)
        ]
        trace = run_to_end(scheduler, requests)
    # Held ones are first in line, yet the two free ones run at once and the held ones after 5 steps.
    assert trace.order()[:2] == ["r30", "r31"]
    assert {trace.first_step[f"r{i}"] for i in range(30)} == {5}
    # Refusing costs one question a step for the best held one, not one for each of the 30.
    assert len(hold.ASKED) <= 32 + 2 * 5 + 30 + 2
    assert installation.tallies["hold"].by_hook["waiting_gate"] >= 30


def test_gate_that_holds_all_keeps_the_engine_alive_without_asking_all_each_step() -> None:
    hold.OPEN_AFTER_STEPS["steps"] = None
    config = make_config()
    with installed("tests.seam.toys.hold"):
        scheduler = make_scheduler(config, 100)
        for i in range(50):
            scheduler.add_request(make_request(config, f"r{i}", prompt(i, 20), tenant="held"))
        for _ in range(20):
            out = scheduler.schedule()
            assert out.total_num_scheduled_tokens == 0
            assert scheduler.has_unfinished_requests()
            assert scheduler.get_request_counts() == (0, 50)
        assert len(hold.ASKED) == 50 + 19
        runtime = scheduler.__dict__[RUNTIME_ATTR]
        assert runtime.held_requests() == 50
        # A released one is asked at once, although others that are held come before it.
        hold.ASKED.clear()
        runtime.release(scheduler.requests["r40"])
        scheduler.schedule()
        assert sorted(hold.ASKED) == ["r0", "r40"]
        assert runtime.held_requests() == 50
        cancel(scheduler, *[f"r{i}" for i in range(50)])
        assert not scheduler.has_unfinished_requests()
        assert runtime.held_requests() == 0


def test_token_cap_cuts_prefills_only_and_never_stops_a_waiting_request() -> None:
    config = make_config()
    everything.CAP.update(a=32, b=0)
    with installed("tests.seam.toys.everything") as installation:
        scheduler = make_scheduler(config, 200)
        requests = [make_request(config, rid, prompt(i, 100), max_tokens=4) for i, rid in enumerate("abc")]
        trace = run_to_end(scheduler, requests[:1] + requests[2:])
        assert [step.get("a", 0) for step in trace.steps] == [32, 32, 32, 4, 1, 1, 1]
        assert trace.steps[0]["c"] == 100
        assert installation.tallies["everything"].by_hook["token_cap"] == 3
        # A cap of 0 lets a waiting request in with one token, and a running one wait.
        scheduler.add_request(requests[1])
        assert scheduler.schedule().num_scheduled_tokens == {"b": 1}
        assert scheduler.schedule().num_scheduled_tokens == {}
        cancel(scheduler, "b")


@BOTH
def test_external_preemption_resumes_and_delivers_the_same_output(async_scheduling: bool) -> None:
    config = make_config(async_scheduling=async_scheduling)
    with installed("tests.seam.toys.everything") as installation:
        scheduler = make_scheduler(config, 200)
        requests = [make_request(config, f"r{i}", prompt(i, 50), max_tokens=12) for i in range(3)]

        def each(step: int, sched: Any) -> None:
            if step == 5:
                everything.PREEMPT.add("r1")

        trace = run_to_end(scheduler, requests, each=each)
    assert trace.preempted == ["r1"]
    assert everything.LOG["preempt"] == ["r1"]
    assert {rid: len(tokens) for rid, tokens in trace.outputs.items()} == {"r0": 12, "r1": 12, "r2": 12}
    assert installation.tallies["everything"].by_hook["before_schedule"] == 1


@BOTH
def test_expiry_reaches_the_client_with_its_reason(async_scheduling: bool) -> None:
    config = make_config(async_scheduling=async_scheduling)
    with installed("tests.seam.toys.everything"):
        scheduler = make_scheduler(config, 200)
        requests = [make_request(config, f"r{i}", prompt(i, 50), max_tokens=12) for i in range(2)]

        def each(step: int, sched: Any) -> None:
            if step == 4:
                everything.EXPIRE.update({"r0", "unknown"})

        trace = run_to_end(scheduler, requests, each=each)
    assert trace.finished["r0"] == "abort"
    assert trace.stop_reasons == {"r0": "too late", "r1": None}
    assert len(trace.outputs["r1"]) == 12


def test_victim_hint_outweighs_arrival() -> None:
    config = make_config(max_num_seqs=4, max_num_batched_tokens=512)
    with installed("tests.seam.toys.everything") as installation:
        scheduler = make_scheduler(config, 24)
        requests = [
            make_request(config, rid, prompt(i, 60), max_tokens=60)
            for i, rid in enumerate(["victim", "b", "c", "d"])
        ]
        trace = run_to_end(scheduler, requests)
    # Stock would take "d", the last to be admitted.
    assert trace.preempted[0] == "victim"
    assert installation.tallies["everything"].by_hook["victim_hint"] > 0


def test_bare_block_pool_gets_the_owner_and_other_pools_do_not() -> None:
    with installed("tests.seam.toys.mru") as installation:
        assert type(BlockPool(8, True, 16).free_block_queue).__name__ == "MruQueue"
        assert type(BlockPool(8, True, 16, medium="CPU").free_block_queue) is FreeKVCacheBlockQueue
    assert installation.tallies["mru"].hits == 1
    assert type(BlockPool(8, True, 16).free_block_queue) is FreeKVCacheBlockQueue


def test_evictions_are_told_at_once_and_also_those_by_number() -> None:
    config = make_config()
    with installed("tests.seam.toys.everything"):
        scheduler = make_scheduler(config, 40)
        run_to_end(scheduler, [make_request(config, "r", prompt(1, 160), max_tokens=2)])
        pool = scheduler.kv_cache_manager.block_pool
        held = sorted(block.block_id for block in pool.blocks if block.block_hash is not None)
        assert len(held) == 10 and "evict" not in everything.LOG
        pool.evict_blocks(set(held[:2]))
        taken = pool.get_new_blocks(pool.get_num_free_blocks())
    assert [sorted(told) for told in everything.LOG["evict"]] == [held[:2], held[2:]]
    assert not any(block.block_hash for block in taken)


def test_stock_and_patched_schedulers_side_by_side() -> None:
    config = make_config(max_num_seqs=1)
    stock = make_scheduler(config, 100)
    plan = resolve("tests.seam.toys.reverse,tests.seam.toys.everything,tests.seam.toys.mru")

    def requests(prefix: str) -> list[Any]:
        return [make_request(config, f"{prefix}{i}", prompt(i, 20), max_tokens=2) for i in range(3)]

    installation = adapter.install(plan)
    patched = make_scheduler(config, 100)
    assert run_to_end(stock, requests("s")).order() == ["s0", "s1", "s2"]
    assert not everything.LOG
    assert run_to_end(patched, requests("p")).order() == ["p2", "p1", "p0"]
    installation.undo()
    assert run_to_end(stock, requests("t")).order() == ["t0", "t1", "t2"]
    again = adapter.install(plan)
    assert run_to_end(patched, requests("q")).order() == ["q2", "q1", "q0"]
    again.undo()


def test_build_must_return_what_the_patch_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    from patches.seam.kinds import HookError
    from patches.seam.patch import Hooks
    from tests.seam.toys import reverse

    monkeypatch.setitem(reverse.PATCH.__dict__, "build", lambda knobs, context: Hooks())
    with installed("tests.seam.toys.reverse"), pytest.raises(HookError, match="reverse"):
        make_scheduler(make_config(), 100)


def test_hook_with_the_wrong_arguments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from patches.seam.kinds import HookError
    from patches.seam.patch import Hooks
    from tests.seam.toys import reverse

    wrong: Any = lambda request: (0, None)  # noqa: E731
    monkeypatch.setitem(reverse.PATCH.__dict__, "build", lambda knobs, context: Hooks(request_key=wrong))
    with installed("tests.seam.toys.reverse"), pytest.raises(HookError, match="must take 2 positional"):
        make_scheduler(make_config(), 100)


def test_key_that_is_not_a_number_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from patches.seam.kinds import HookError
    from patches.seam.patch import Hooks
    from tests.seam.toys import reverse

    hooks = Hooks(request_key=lambda request, now: (float("nan"), None))
    monkeypatch.setitem(reverse.PATCH.__dict__, "build", lambda knobs, context: hooks)
    config = make_config()
    with installed("tests.seam.toys.reverse"):
        scheduler = make_scheduler(config, 100)
        with pytest.raises(HookError, match="NaN"):
            scheduler.add_request(make_request(config, "r", [1, 2]))


def test_decodes_come_before_prefills_whatever_their_keys() -> None:
    # The late arrival has the better key and a long prompt; the early one must go on decoding.
    config = make_config(max_num_batched_tokens=64)
    with installed("tests.seam.toys.reverse"):
        scheduler = make_scheduler(config, 200)
        scheduler.add_request(make_request(config, "early", prompt(0, 20), max_tokens=30))

        def each(step: int, sched: Any) -> None:
            if step == 2:
                sched.add_request(make_request(config, "late", prompt(1, 400), max_tokens=2))

        trace = run_to_end(scheduler, each=each)
    assert all(step.get("early") for step in trace.steps[:10])


def test_running_prefills_are_ordered_by_key() -> None:
    config = make_config(max_num_batched_tokens=64, long_prefill_token_threshold=48)
    with installed("tests.seam.toys.reverse"):
        scheduler = make_scheduler(config, 200)
        scheduler.add_request(make_request(config, "early", prompt(0, 300), max_tokens=1))

        def each(step: int, sched: Any) -> None:
            if step == 1:
                sched.add_request(make_request(config, "late", prompt(1, 100), max_tokens=1))

        trace = run_to_end(scheduler, each=each)
    # Once admitted with what "early" left over (16 tokens), "late" comes first and takes its full chunk.
    assert trace.steps[1] == {"early": 48, "late": 16}
    assert trace.steps[2] == {"late": 48, "early": 16}


def test_installed_wrappers_are_the_ones_that_the_plan_needs() -> None:
    before = dict(vars(Scheduler))
    with installed("tests.seam.toys.reverse"):
        changed = {name for name, value in vars(Scheduler).items() if before.get(name) is not value}
        assert changed == {"__init__", "schedule"}
    with installed("tests.seam.toys.mru"):
        changed = {name for name, value in vars(Scheduler).items() if before.get(name) is not value}
        assert changed == {"__init__"}
