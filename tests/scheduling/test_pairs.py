"""Guards `qos` and `mlfq` together (and with `slru`): neither is without effect beside the other, nothing leaks.

The pair law runs in real EngineCores, the random schedule of arrivals, cancels and preemptions on
real Schedulers, sync and async. Not here: each patch's own rules (test_qos, test_mlfq), generated
tokens (tests/real), and whether the combination is worth anything (the experiment).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engines.flags import EngineFlags
from harness.engines.virtual.engine import VirtualEngine, VirtualRun
from harness.profiles import model_dir
from patches.seam.plan import resolve
from tests.drive import make_config, make_request, make_scheduler
from tests.engines.traffic import LONG, SHORT, ConstantStep, request, workload
from tests.scheduling.clocked import STEP_NS, Eviction, evictions, installed, patched, prompt, serve

KNOBS: dict[str, dict[str, Any]] = {
    "qos": {
        "short_prompt_tokens": 200,
        "long_prompt_penalty_levels": 1,
        "ageing_floor_s": 2.0,
        "preempt_class_gap_levels": 2,
        "victim_prompt_tokens": 0,
        "preempt_gain_factor": 8.0,
        "preempt_cooldown_s": 0.1,
        "preempt_max_requests": 2,
        "preempt_max_times": 2,
    },
    "mlfq": {
        "level0_tokens": 64,
        "level1_tokens": 128,
        "level2_tokens": 256,
        "last_level_step_tokens": 64,
        "last_level_prefill_requests": 1,
        "last_level_free_share": 0.0,
    },
}


def knobs(enable: str) -> dict[str, dict[str, Any]]:
    """The knobs of the patches in this plan."""
    return {name: values for name, values in KNOBS.items() if name in enable.split(",")}


# the pair law

# Long prefills are under way when important ones come (mlfq cuts), with few seats, so that important ones pass
# bronze ones in the queue (qos orders).
TRAFFIC = [
    *(request(i, 0.02 * i, prompt=2500, output=30, tenant=LONG) for i in range(6)),
    *(request(10 + i, 0.5 + 0.15 * i, prompt=60, output=10, tenant=SHORT) for i in range(20)),
]


@cache
def run_of(enable: str) -> tuple[VirtualRun, dict[str, int]]:
    """The traffic on a fresh engine, and each patch's hits."""
    flags = EngineFlags(max_model_len=4096, max_num_batched_tokens=512, max_num_seqs=4)
    with installed(enable, knobs(enable)) as installation:
        engine = VirtualEngine(model_dir("llama-3.1-8b"), flags, ConstantStep(), 500)
        try:
            run = engine.run(workload(TRAFFIC))
        finally:
            engine.shutdown()
        hits = {name: installation.tallies[name].hits for name in installation.plan.names}
    return run, hits


@pytest.mark.parametrize("left_out", ["qos", "mlfq"])
def test_leaving_either_out_changes_the_schedule(left_out: str) -> None:
    both, hits = run_of("qos,mlfq")
    one, _ = run_of("mlfq" if left_out == "qos" else "qos")
    assert min(hits.values()) > 0
    for run in (both, one):
        assert set(run.tables["requests"].column("status").to_pylist()) == {"ok"}
    assert both.schedule_digest != one.schedule_digest


def test_priority_comes_before_level() -> None:
    """The order of the parts does not depend on the order on the command line, and qos is the outer one."""
    assert resolve("mlfq,qos").order()["request_key"] == ("qos", "mlfq")
    config = make_config(max_num_seqs=1)
    with patched("mlfq,qos", knobs("qos,mlfq")) as (_, clock):
        requests = [
            make_request(config, f"r{i}", prompt(i, 40), max_tokens=2, arrival_time=float(i), priority=3 - i)
            for i in range(4)
        ]
        served = serve(make_scheduler(config, 100), clock, [(0, r) for r in requests])
    assert served.trace.order() == ["r3", "r2", "r1", "r0"]


@pytest.mark.parametrize("enable", ["mlfq", "qos,mlfq"])
def test_no_step_is_empty_while_somebody_could_run(enable: str) -> None:
    """Three long prompts, one at a time: when one is through, the next begins in the very next step."""
    config = make_config(max_num_batched_tokens=512)
    with patched(enable, knobs(enable)) as (_, clock):
        requests = [
            make_request(config, f"r{i}", prompt(i, 600), max_tokens=1, arrival_time=float(i))
            for i in range(4)
        ]
        served = serve(make_scheduler(config, 400), clock, [(0, r) for r in requests])
    assert all(served.trace.steps)


@pytest.mark.parametrize("enable", ["mlfq", "qos,mlfq"])
def test_when_a_prefill_is_cancelled_the_next_begins_in_the_same_step(enable: str) -> None:
    """Whichever patch looks at the queue first in a pass: the gate knows already."""
    config = make_config(max_num_batched_tokens=512)
    with patched(enable, knobs(enable)) as (_, clock):
        small = make_request(config, "small", prompt(9, 20), max_tokens=40, arrival_time=0.0)
        longs = [
            make_request(config, f"long{i}", prompt(i, 600), max_tokens=1, arrival_time=1.0 + i)
            for i in range(2)
        ]
        served = serve(
            make_scheduler(config, 400), clock, [(0, small), *((2, r) for r in longs)], [(5, "long0")]
        )
    assert served.cancelled == ["long0"]
    assert served.trace.first_step["long1"] == 5


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.1])
def test_whom_room_was_made_for_is_let_in(async_scheduling: bool, share: float) -> None:
    """All are in the last level; the victim is lifted out of it, which must not hold the one it made room for."""
    config = make_config(async_scheduling=async_scheduling)
    chosen = {
        "qos": {**KNOBS["qos"], "preempt_class_gap_levels": 1, "preempt_gain_factor": 1000.0},
        "mlfq": {**KNOBS["mlfq"], "last_level_free_share": share},
    }
    with patched("qos,mlfq", chosen) as (_, clock):
        bronze = make_request(config, "bronze", prompt(1, 500), max_tokens=40, arrival_time=1.0, priority=3)
        gold = make_request(config, "gold", prompt(2, 600), max_tokens=4, arrival_time=2.0)
        scheduler = make_scheduler(config, 41)
        seen = evictions(scheduler, clock)
        served = serve(scheduler, clock, [(0, bronze), (10, gold)])
    assert [(one.request_id, one.head) for one in seen] == [("bronze", "gold")]
    assert "gold" in served.trace.steps[seen[0].step]
    assert list(served.trace.finished) == ["gold", "bronze"]


def test_a_change_of_level_does_not_age_what_runs() -> None:
    """The key of a running request is computed anew at each demotion; its class is what it was let in with."""
    config = make_config()
    keys = set()
    aged = {"qos": {"ageing_floor_s": 0.1}, "mlfq": KNOBS["mlfq"]}
    with patched("qos,mlfq", aged) as (_, clock):
        lone = make_request(config, "r", prompt(1, 40), max_tokens=300, priority=3)

        def check(sched: Any) -> None:
            if sched.running:
                keys.add(tuple(int(part) for part in lone.patchbench_ticket.key[:2]))

        serve(make_scheduler(config, 100), clock, [(0, lone)], check=check)
    # Its levels by service, all in one class.
    assert keys == {(3, level) for level in range(4)}


# a random schedule


@dataclass(frozen=True)
class Planned:
    """One request as hypothesis draws it; steps count from the run's start."""

    arrives: int
    prompt_tokens: int
    shared_tokens: int
    output_tokens: int
    priority: int
    cancelled_after: int | None


PLANNED = st.builds(
    Planned,
    arrives=st.integers(0, 60),
    prompt_tokens=st.integers(1, 420),
    shared_tokens=st.sampled_from([0, 0, 64, 160]),
    output_tokens=st.integers(1, 60),
    priority=st.integers(0, 4),
    cancelled_after=st.one_of(st.none(), st.none(), st.integers(0, 80)),
)

_CONFIGS: dict[bool, Any] = {}


def config_of(async_scheduling: bool) -> Any:
    """A small engine: 40 blocks cannot hold much more than one of the largest requests."""
    if async_scheduling not in _CONFIGS:
        _CONFIGS[async_scheduling] = make_config(
            max_num_seqs=5, max_num_batched_tokens=128, async_scheduling=async_scheduling
        )
    return _CONFIGS[async_scheduling]


def requests_of(config: Any, drawn: list[Planned]) -> dict[str, tuple[Planned, Any]]:
    """Real requests by id."""
    common = prompt(99, 160)
    out = {}
    for number, planned in enumerate(drawn):
        tokens = common[: planned.shared_tokens] + prompt(number, planned.prompt_tokens)
        out[f"r{number}"] = (
            planned,
            make_request(
                config,
                f"r{number}",
                tokens,
                max_tokens=planned.output_tokens,
                arrival_time=1.0 + planned.arrives,
                priority=planned.priority,
            ),
        )
    return out


@pytest.mark.parametrize("async_scheduling", [False, True])
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(drawn=st.lists(PLANNED, min_size=10, max_size=30))
def test_every_request_ends_and_every_block_returns(async_scheduling: bool, drawn: list[Planned]) -> None:
    """With qos, mlfq and slru on; `serve` checks the pool. No request is evicted beyond qos's limit."""
    check_random_schedule(async_scheduling, drawn)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_such_a_schedule_does_evict_and_demote(async_scheduling: bool) -> None:
    """The law above is not idle: this one of its schedules contains what it is about."""
    drawn = [
        *(Planned(0, 420, 0, 60, 4, None) for _ in range(2)),
        Planned(0, 40, 0, 60, 4, None),
        *(Planned(15 + 25 * i, 240, 0, 8, 0, None) for i in range(4)),
        Planned(40, 300, 0, 60, 4, 30),
    ]
    evicted, metrics = check_random_schedule(async_scheduling, drawn)
    assert evicted > 0
    assert metrics["mlfq"]["mlfq_demotions"] > 0
    assert metrics["mlfq"]["mlfq_promotions"] > 0


def check_random_schedule(async_scheduling: bool, drawn: list[Planned]) -> tuple[int, dict[str, Any]]:
    """Run it and check the laws; the number of evictions on demand, and the receipt's metrics."""
    config = config_of(async_scheduling)
    enable = "qos,mlfq,slru"
    with patched(enable, knobs(enable)) as (installation, clock):
        # Requests are made inside: they carry the adapter's ticket for one engine only.
        planned = requests_of(config, drawn)
        scheduler = make_scheduler(config, 45)
        seen = evictions(scheduler, clock)

        def check(sched: Any) -> None:
            # A victim stands behind the one that it made room for, as long as that one waits.
            places = {one.request_id: place for place, one in enumerate(sched.waiting)}
            for eviction in behind[:]:
                if eviction.head not in places:
                    behind.remove(eviction)
                else:
                    assert places[eviction.head] < places.get(eviction.request_id, len(places))
            behind.extend(eviction for eviction in seen[noted[0] :] if eviction.head in places)
            noted[0] = len(seen)

        behind: list[Eviction] = []
        noted = [0]
        served = serve(
            scheduler,
            clock,
            [(p.arrives, r) for p, r in planned.values()],
            [
                (p.arrives + p.cancelled_after, rid)
                for rid, (p, _) in planned.items()
                if p.cancelled_after is not None
            ],
            check=check,
        )
        metrics = installation.receipt()["metrics"]
    qos = KNOBS["qos"]
    # Each request ended, with all of its tokens unless it was cancelled.
    for rid, (plan, _) in planned.items():
        if rid in served.cancelled:
            assert rid not in served.trace.finished
        else:
            assert served.trace.finished[rid] == "length"
            assert len(served.trace.outputs[rid]) == plan.output_tokens
    # No step exceeds the engine's limits.
    for step in served.trace.steps:
        assert sum(step.values()) <= 128
        assert len(step) <= 5
    # Evictions on demand: none of a request that was preempted too often, at most so many a pass.
    assert all(eviction.preempted_before < qos["preempt_max_times"] for eviction in seen)
    for rid in planned:
        assert sum(eviction.request_id == rid for eviction in seen) <= qos["preempt_max_times"]
    by_pass: dict[int, int] = {}
    last: dict[str, int] = {}
    for eviction in seen:
        by_pass[eviction.at_ns] = by_pass.get(eviction.at_ns, 0) + 1
        # The cooldown is between an admission and an eviction, so between two evictions too.
        before = last.get(eviction.request_id)
        assert before is None or eviction.at_ns - before >= qos["preempt_cooldown_s"] * 1e9 - STEP_NS
        last[eviction.request_id] = eviction.at_ns
    assert max(by_pass.values(), default=0) <= qos["preempt_max_requests"]
    assert metrics["qos"]["qos_preemptions"] == len(seen)
    return len(seen), metrics
