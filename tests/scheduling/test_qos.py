"""Guards `qos` on real schedulers and engines: the order, evictions on demand, the lines of what waits.

Schedulers are sync and async with a clock of the test's own; the absence of starvation is also seen in
a real EngineCore. Not here: the arithmetic (test_qos_ageing, test_qos_victims), default values of the
knobs, what the patch is worth (the experiment), and how it composes (test_pairs).
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from harness.engines.flags import EngineFlags
from harness.engines.virtual.engine import VirtualEngine
from harness.profiles import model_dir
from patches.seam.runtime import RUNTIME_ATTR
from tests.drive import make_config, make_request, make_scheduler
from tests.engines.traffic import LONG, NS, SHORT, ConstantStep, request, workload
from tests.scheduling.clocked import Served, evictions, installed, patched, prompt, serve

BOTH = pytest.mark.parametrize("async_scheduling", [False, True])

# on real schedulers


def shorts_and_longs(config: Any, shorts: int, longs: int) -> tuple[list[Any], list[Any]]:
    """Long prompts of priority 2, short ones of priority 0; later ids arrive later."""
    return (
        [
            make_request(config, f"short{i}", prompt(100 + i, 60), max_tokens=6, arrival_time=100.0 + i)
            for i in range(shorts)
        ],
        [
            make_request(config, f"long{i}", prompt(i, 400), max_tokens=12, arrival_time=1.0 + i, priority=2)
            for i in range(longs)
        ],
    )


@BOTH
def test_short_and_important_ones_overtake_long_ones_that_came_first(async_scheduling: bool) -> None:
    config = make_config(max_num_seqs=1, async_scheduling=async_scheduling)
    shorts, longs = shorts_and_longs(config, 3, 4)
    knobs = {"qos": {"short_prompt_tokens": 200, "ageing_floor_s": 1000.0, "preempt": False}}
    with patched("qos", knobs) as (installation, clock):
        served = serve(make_scheduler(config, 200), clock, [(0, r) for r in longs] + [(2, r) for r in shorts])
    assert served.trace.order() == ["long0", "short0", "short1", "short2", "long1", "long2", "long3"]
    assert all(len(tokens) in (6, 12) for tokens in served.trace.outputs.values())
    assert installation.tallies["qos"].by_hook["request_key"] >= 7


def crowded(async_scheduling: bool, **knobs: Any) -> tuple[Served, list[str], dict[str, Any]]:
    """A long request fills most of the pool; a short, important one finds too little left."""
    config = make_config(async_scheduling=async_scheduling)
    long = make_request(config, "long", prompt(1, 560), max_tokens=60, arrival_time=1.0, priority=2)
    short = make_request(config, "short", prompt(2, 100), max_tokens=4, arrival_time=2.0)
    settled = {
        "short_prompt_tokens": 200,
        "ageing_floor_s": 1000.0,
        "preempt_class_gap_levels": 3,
        "preempt_gain_factor": 16.0,
        "preempt_cooldown_s": 0.1,
        "victim_prompt_tokens": 0,
        **knobs,
    }
    with patched("qos", {"qos": settled}) as (installation, clock):
        scheduler = make_scheduler(config, 41)
        seen = evictions(scheduler, clock)
        served = serve(scheduler, clock, [(0, long), (10, short)])
        receipt = installation.receipt()
    assert {rid: len(tokens) for rid, tokens in served.trace.outputs.items()} == {"long": 60, "short": 4}
    return served, [eviction.request_id for eviction in seen], receipt


@BOTH
def test_a_running_long_one_yields_to_a_waiting_short_one_if_that_is_allowed(async_scheduling: bool) -> None:
    served, evicted, receipt = crowded(async_scheduling, preempt=True)
    assert evicted == served.trace.preempted == ["long"]
    assert served.trace.first_step["short"] <= 15
    assert list(served.trace.finished) == ["short", "long"]
    assert receipt["metrics"]["qos"]["qos_preemptions"] == 1
    assert receipt["hooks"]["qos"]["by_hook"]["before_schedule"] == 1


@BOTH
@pytest.mark.parametrize(
    "knobs",
    [{"preempt": False}, {"preempt_class_gap_levels": 4}, {"preempt_cooldown_s": 1000.0}],
    ids=["switched off", "gap too small", "within cooldown"],
)
def test_otherwise_it_runs_to_its_end_first(async_scheduling: bool, knobs: dict[str, Any]) -> None:
    served, evicted, receipt = crowded(async_scheduling, **knobs)
    assert evicted == served.trace.preempted == []
    assert list(served.trace.finished) == ["long", "short"]
    assert served.trace.first_step["short"] > 50
    assert receipt["metrics"]["qos"]["qos_preemptions"] == 0


def evicts(
    enable_async: bool, requests: list[tuple[int, dict[str, Any]]], **knobs: Any
) -> tuple[Served, list[str]]:
    """Serve requests (step, arguments of make_request) on 40 blocks; the ids that were evicted on demand."""
    config = make_config(async_scheduling=enable_async)
    settled = {
        "ageing_backlog_factor": 0.0,
        "preempt_class_gap_levels": 1,
        "preempt_gain_factor": 1000.0,
        "preempt_cooldown_s": 0.1,
        "victim_prompt_tokens": 0,
        **knobs,
    }
    with patched("qos", {"qos": settled}) as (_, clock):
        arrivals = [
            (step, make_request(config, arrival_time=1.0 + i, **arguments))
            for i, (step, arguments) in enumerate(requests)
        ]
        scheduler = make_scheduler(config, 41)
        seen = evictions(scheduler, clock)
        served = serve(scheduler, clock, arrivals)
    return served, [eviction.request_id for eviction in seen]


@BOTH
def test_a_victim_does_not_come_back_before_the_one_it_was_evicted_for(async_scheduling: bool) -> None:
    """The long one has run for four ageing periods, which no one that waits has been given."""
    served, evicted = evicts(
        async_scheduling,
        [
            (0, {"request_id": "long", "prompt": prompt(1, 400), "max_tokens": 230, "priority": 2}),
            (200, {"request_id": "short", "prompt": prompt(2, 256), "max_tokens": 4}),
        ],
        short_prompt_tokens=300,
        ageing_floor_s=1.0,
        preempt_class_gap_levels=3,
    )
    assert evicted == ["long"]
    assert list(served.trace.finished) == ["short", "long"]


@BOTH
def test_nobody_is_evicted_for_blocks_that_stay_in_use(async_scheduling: bool) -> None:
    """Two requests share a prefix of 20 blocks, and only one of them may be evicted: that frees 6, and 8 are lacking."""
    common = prompt(9, 320)
    served, evicted = evicts(
        async_scheduling,
        [
            (0, {"request_id": "a", "prompt": common + prompt(1, 80), "max_tokens": 30, "priority": 2}),
            (1, {"request_id": "b", "prompt": common + prompt(2, 80), "max_tokens": 30, "priority": 0}),
            (10, {"request_id": "c", "prompt": prompt(3, 250), "max_tokens": 4, "priority": 0}),
        ],
        short_prompt_tokens=1000,
        ageing_floor_s=1000.0,
    )
    assert evicted == []
    assert served.trace.preempted == []


@BOTH
@pytest.mark.parametrize(("own", "other", "expected"), [(32, 200, []), (240, 40, ["a"])])
def test_nobody_is_evicted_for_blocks_that_the_head_shares_with_it(
    async_scheduling: bool, own: int, other: int, expected: list[str]
) -> None:
    """The head needs 35 of 40 blocks, 20 of them are the victim's prefix too: only what else it holds is gained.

    In the first case that is 3 where 11 are lacking, in the second 16 where 14 are.
    """
    common = prompt(9, 320)
    _, evicted = evicts(
        async_scheduling,
        [
            (
                0,
                {
                    "request_id": "a",
                    "prompt": common + prompt(1, own),
                    "max_tokens": 40,
                    "priority": 2,
                },
            ),
            (1, {"request_id": "b", "prompt": prompt(2, other), "max_tokens": 30, "priority": 0}),
            (10, {"request_id": "c", "prompt": common + prompt(3, 240), "max_tokens": 4, "priority": 0}),
        ],
        short_prompt_tokens=1000,
        ageing_floor_s=1000.0,
    )
    assert evicted == expected


@BOTH
def test_the_lines_hold_what_waits_before_and_after_every_pass(async_scheduling: bool) -> None:
    """With preemptions of both kinds, cancels, and output that arrives after its request was preempted."""
    config = make_config(max_num_seqs=4, max_num_batched_tokens=256, async_scheduling=async_scheduling)
    knobs = {
        "short_prompt_tokens": 150,
        "ageing_floor_s": 0.1,
        "victim_prompt_tokens": 0,
        "preempt_cooldown_s": 0.05,
        "preempt_gain_factor": 50.0,
    }
    most = 0
    with patched("qos", {"qos": knobs}) as (_, clock):
        arrivals = [
            (
                3 * i,
                make_request(
                    config,
                    f"r{i}",
                    prompt(i, 60 + 97 * i % 360),
                    max_tokens=10 + 13 * i % 70,
                    arrival_time=1.0 + i,
                    priority=i % 4,
                ),
            )
            for i in range(30)
        ]
        scheduler = make_scheduler(config, 41)
        seen = evictions(scheduler, clock)
        state: Any = scheduler.__dict__[RUNTIME_ATTR].before_schedule[0].__self__

        def check(sched: Any) -> None:
            nonlocal most
            waiting = [*sched.waiting, *sched.kv_holding_waiting]
            most = max(most, len(waiting))
            expected: dict[int, int] = {}
            for one in waiting:
                standing = state._standing[one.request_id]
                # A token that was in flight when it was preempted is not in its line yet.
                assert 0 <= one.num_tokens - standing.tokens <= async_scheduling
                expected[standing.effective] = expected.get(standing.effective, 0) + standing.tokens
            assert state._line_tokens == expected
            assert all(not state._standing[one.request_id].tokens for one in sched.running)

        original = scheduler.schedule

        def schedule() -> Any:
            out = original()
            check(scheduler)
            return out

        scheduler.schedule = schedule
        served = serve(scheduler, clock, arrivals, [(40, "r9"), (60, "r17"), (61, "r3")], check=check)
    assert most > 5
    assert len(seen) > 0
    assert len(served.trace.preempted) > len(seen)
    assert state._line_tokens == {}
    assert state._standing == {}


def test_blocks_that_run_out_are_taken_from_the_worst_class() -> None:
    """Upstream takes the last that was admitted; here that one is the most important."""
    config = make_config(max_num_batched_tokens=512)
    requests = [
        make_request(config, rid, prompt(i, 60), max_tokens=60, arrival_time=float(i), priority=priority)
        for i, (rid, priority) in enumerate([("worst", 3), ("b", 1), ("c", 1), ("best", 0)])
    ]
    with patched("qos", {"qos": {"preempt": False, "ageing_floor_s": 1000.0}}) as (_, clock):
        served = serve(make_scheduler(config, 24), clock, [(0, r) for r in requests])
    assert served.trace.preempted[0] == "worst"
    assert "best" not in served.trace.preempted


def test_undo_restores_vllm_exactly() -> None:
    owners = (Scheduler, AsyncScheduler, scheduler_module)
    before = [dict(vars(owner)) for owner in owners]
    with patched("qos"):
        assert [dict(vars(owner)) for owner in owners] != before
    assert [dict(vars(owner)) for owner in owners] == before


# in a real EngineCore


def test_ageing_ends_a_wait_under_a_lasting_overload() -> None:
    """Golden requests overload the engine for 8 s; a bronze one, behind them by 3 classes, is served in the midst."""
    crowd = [request(i, 0.025 * i, tenant=SHORT) for i in range(320)]
    bronze = request(999, 1.0, prompt=900, tenant=LONG)
    knobs = {
        "qos": {
            "short_prompt_tokens": 512,
            "long_prompt_penalty_levels": 1,
            "ageing_floor_s": 1.0,
            "ageing_backlog_factor": 0.0,
            "preempt": False,
        }
    }
    with installed("qos", knobs) as installation:
        engine = VirtualEngine(
            model_dir("llama-3.1-8b"), EngineFlags(max_model_len=4096, max_num_seqs=2), ConstantStep(), 400
        )
        try:
            table = engine.run(workload([*crowd, bronze])).tables["requests"].to_pandas()
        finally:
            engine.shutdown()
    assert (table.status == "ok").all()
    assert installation.tallies["qos"].hits > 0
    table = table.set_index("request_id")
    row, others = table.loc["r999"], table.drop("r999")
    # It overtakes golden ones that come 3 periods later, and is overtaken by those that come less late.
    late = others[others.intended_ns >= row.intended_ns + 5 * NS]
    soon = others[others.intended_ns.between(row.intended_ns, row.intended_ns + 2 * NS)]
    assert len(late) and (late.scheduled_ns > row.scheduled_ns).all()
    assert len(soon) and (soon.scheduled_ns < row.scheduled_ns).all()
