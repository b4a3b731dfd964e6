"""Guards `mlfq` on real schedulers and engines: what a long prefill leaves to others, and when it gets its turn.

Schedulers are sync and async with a clock of the test's own; what a long prefill leaves to others is
also seen in a real EngineCore. Not here: the arithmetic (test_mlfq), default values of the knobs, what
the patch is worth (the experiment), and how it composes (test_pairs).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from harness.engines.flags import EngineFlags
from harness.engines.virtual.engine import VirtualEngine
from harness.profiles import model_dir
from tests.drive import Trace, cancel, make_config, make_request, make_scheduler
from tests.engines.traffic import LONG, ConstantStep, request, workload
from tests.scheduling.clocked import NS, STEP_NS, installed, patched, prompt, serve
from tests.scheduling.mlfq_policy import BOUNDS, KNOBS
from tests.seam.toys import everything

BOTH = pytest.mark.parametrize("async_scheduling", [False, True])


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    everything.clear()
    yield
    everything.clear()


# on real schedulers


def beside_a_long_prefill(
    async_scheduling: bool, new: int, *, step_tokens: int = 256, budget: int = 512
) -> tuple[Trace, dict[str, Any]]:
    """A prefill of 3,600 tokens is under way when `new` requests of 100 tokens come, before step 3."""
    config = make_config(max_num_batched_tokens=budget, async_scheduling=async_scheduling)
    long = make_request(config, "long", prompt(9, 3600), max_tokens=3, arrival_time=1.0)
    others = [
        make_request(config, f"new{i}", prompt(i, 100), max_tokens=3, arrival_time=2.0 + i)
        for i in range(new)
    ]
    knobs = {"mlfq": {**KNOBS, "last_level_step_tokens": step_tokens}}
    with patched("mlfq", knobs) as (installation, clock):
        served = serve(make_scheduler(config, 400), clock, [(0, long), *((3, r) for r in others)])
        receipt = installation.receipt()
    assert all(len(tokens) == 3 for tokens in served.trace.outputs.values())
    assert max(sum(step.values()) for step in served.trace.steps) <= budget
    return served.trace, receipt


@BOTH
@pytest.mark.parametrize("new", [1, 2])
def test_a_long_prefill_leaves_new_ones_their_tokens(async_scheduling: bool, new: int) -> None:
    trace, receipt = beside_a_long_prefill(async_scheduling, new)
    assert trace.steps[3] == {"long": 256, **{f"new{i}": 100 for i in range(new)}}
    assert receipt["hooks"]["mlfq"]["by_hook"]["token_cap"] > 0
    # Once they are gone the budget is all its own again.
    assert 512 in [step.get("long") for step in trace.steps[4:]]


@BOTH
def test_without_that_cap_it_takes_all(async_scheduling: bool) -> None:
    trace, receipt = beside_a_long_prefill(async_scheduling, 2, step_tokens=10_000)
    assert trace.first_step["new0"] == 7
    assert "token_cap" not in receipt["hooks"]["mlfq"]["by_hook"]


@BOTH
def test_alone_it_is_not_cut(async_scheduling: bool) -> None:
    trace, receipt = beside_a_long_prefill(async_scheduling, 0)
    assert [step["long"] for step in trace.steps[:7]] == [512] * 7
    assert "token_cap" not in receipt["hooks"]["mlfq"]["by_hook"]


def long_ones(async_scheduling: bool, *, decode: bool) -> tuple[Trace, dict[str, Any]]:
    """Three long prompts at once, beside one that decodes or all by themselves."""
    config = make_config(max_num_batched_tokens=512, async_scheduling=async_scheduling)
    longs = [
        make_request(config, f"long{i}", prompt(i, 3000), max_tokens=2, arrival_time=2.0 + i)
        for i in range(3)
    ]
    small = [make_request(config, "small", prompt(9, 20), max_tokens=100, arrival_time=1.0)]
    knobs = {"mlfq": {**KNOBS, "last_level_step_tokens": 256, "last_level_prefill_requests": 1}}
    with patched("mlfq", knobs) as (installation, clock):
        arrivals = [(0, r) for r in small if decode] + [(2, r) for r in longs]
        served = serve(make_scheduler(config, 800), clock, arrivals)
        receipt = installation.receipt()
    assert sum(served.trace.finished.get(f"long{i}") == "length" for i in range(3)) == 3
    return served.trace, receipt


@BOTH
def test_long_prompts_prefill_one_at_a_time_beside_others(async_scheduling: bool) -> None:
    trace, receipt = long_ones(async_scheduling, decode=True)
    assert trace.order() == ["small", "long0", "long1", "long2"]
    for step in trace.steps:
        assert sum(tokens > 1 for name, tokens in step.items() if name.startswith("long")) <= 1
        if "small" in step:
            assert sum(step.values()) <= 256 + 4
    assert receipt["hooks"]["mlfq"]["by_hook"]["waiting_gate"] > 0


@BOTH
def test_the_gate_never_holds_everybody(async_scheduling: bool) -> None:
    """Each alone would fit into the empty pool and be let in; together they must not both wait for nobody."""
    config = make_config(async_scheduling=async_scheduling)
    with patched("mlfq", {"mlfq": {**BOUNDS, "last_level_free_share": 0.1}}):
        scheduler = make_scheduler(config, 201)
        for i in range(2):
            scheduler.add_request(make_request(config, f"large{i}", prompt(i, 2960), max_tokens=2))
        scheduled_tokens = [scheduler.schedule().total_num_scheduled_tokens for _ in range(3)]
        cancel(scheduler, "large0", "large1")
    assert scheduled_tokens[0] > 0


@BOTH
def test_long_prompts_by_themselves_use_whole_steps(async_scheduling: bool) -> None:
    trace, _ = long_ones(async_scheduling, decode=False)
    prefills = [sum(step.values()) for step in trace.steps if max(step.values(), default=0) > 1]
    # 9,000 tokens, 512 a step; the last step of each prompt may be a short one.
    assert len(prefills) <= -(-9000 // 512) + 3


@BOTH
def test_several_long_prompts_by_themselves_share_one_step(async_scheduling: bool) -> None:
    """They are let in one after the other in one pass: who is in already is nobody else."""
    config = make_config(max_num_batched_tokens=8192, async_scheduling=async_scheduling)
    with patched("mlfq", {"mlfq": {**KNOBS, "last_level_step_tokens": 256}}) as (_, clock):
        longs = [
            make_request(config, f"long{i}", prompt(i, 2100), max_tokens=2, arrival_time=1.0 + i)
            for i in range(3)
        ]
        served = serve(make_scheduler(config, 800), clock, [(0, r) for r in longs])
    assert served.trace.steps[0] == {"long0": 2100, "long1": 2100, "long2": 2100}


@BOTH
@pytest.mark.parametrize("patience_s", [0.5, 1.5])
def test_long_prompts_are_let_in_once_per_patience(async_scheduling: bool, patience_s: float) -> None:
    """There are blocks for each, but never as many as they should leave free beside one that decodes."""
    config = make_config(max_num_batched_tokens=512, async_scheduling=async_scheduling)
    knobs = {"mlfq": {**KNOBS, "last_level_free_share": 0.9, "last_level_patience_s": patience_s}}
    with patched("mlfq", knobs) as (_, clock):
        small = make_request(config, "small", prompt(9, 20), max_tokens=600, arrival_time=1.0)
        longs = [
            make_request(config, f"long{i}", prompt(i, 2100), max_tokens=2, arrival_time=2.0 + i)
            for i in range(4)
        ]
        served = serve(make_scheduler(config, 600), clock, [(0, small), *((1, r) for r in longs)])
    admitted = [served.trace.first_step[f"long{i}"] for i in range(4)]
    assert admitted == sorted(admitted)
    steps = patience_s * NS / STEP_NS
    # One in flight, and the step in which the time is over.
    assert all(
        steps <= after - before <= steps + 2 for before, after in zip([0, *admitted], admitted, strict=False)
    )


@BOTH
def test_when_a_prefill_is_cancelled_the_next_begins_in_the_same_step(async_scheduling: bool) -> None:
    config = make_config(max_num_batched_tokens=512, async_scheduling=async_scheduling)
    with patched("mlfq", {"mlfq": {**KNOBS, "last_level_step_tokens": 256}}) as (_, clock):
        small = make_request(config, "small", prompt(9, 20), max_tokens=60, arrival_time=1.0)
        longs = [
            make_request(config, f"long{i}", prompt(i, 3000), max_tokens=2, arrival_time=2.0 + i)
            for i in range(2)
        ]
        served = serve(
            make_scheduler(config, 600), clock, [(0, small), *((2, r) for r in longs)], [(6, "long0")]
        )
    assert served.cancelled == ["long0"]
    assert served.trace.first_step["long1"] == 6


@BOTH
def test_what_has_consumed_much_waits_behind_what_has_not(async_scheduling: bool) -> None:
    """Preempted, stock would put it first in the line; here three new ones go before it."""
    config = make_config(max_num_seqs=1, async_scheduling=async_scheduling)
    long = make_request(config, "long", prompt(1, 600), max_tokens=20, arrival_time=1.0)
    new = [
        make_request(config, f"new{i}", prompt(2 + i, 40), max_tokens=3, arrival_time=2.0 + i)
        for i in range(3)
    ]

    def check(sched: Any) -> None:
        if sched.requests.get("new2") and not long.num_preemptions:
            everything.PREEMPT.add("long")

    with patched("mlfq,tests.seam.toys.everything", {"mlfq": KNOBS}) as (installation, clock):
        served = serve(make_scheduler(config, 200), clock, [(0, long), *((5, r) for r in new)], check=check)
        receipt = installation.receipt()
    assert served.trace.preempted == ["long"]
    assert list(served.trace.finished) == ["new0", "new1", "new2", "long"]
    assert receipt["metrics"]["mlfq"]["mlfq_promotions"] == 1
    assert len(served.trace.outputs["long"]) == 20


def test_each_bound_crossed_is_one_demotion() -> None:
    """120 prompt tokens, then decodes: 128 and 512 are passed, and the last token is never computed."""
    config = make_config()
    lone = make_request(config, "r", prompt(1, 120), max_tokens=400)
    with patched("mlfq", {"mlfq": KNOBS}) as (installation, clock):
        served = serve(make_scheduler(config, 200), clock, [(0, lone)])
        receipt = installation.receipt()
    assert sum(step.get("r", 0) for step in served.trace.steps) == 120 + 399
    nobody_waits = {f"mlfq_waiting_level_{n}": 0.0 for n in range(4)}
    assert receipt["metrics"]["mlfq"] == {"mlfq_demotions": 2.0, "mlfq_promotions": 0.0, **nobody_waits}


def test_undo_restores_vllm_exactly() -> None:
    owners = (Scheduler, AsyncScheduler, scheduler_module)
    before = [dict(vars(owner)) for owner in owners]
    with patched("mlfq"):
        assert [dict(vars(owner)) for owner in owners] != before
    assert [dict(vars(owner)) for owner in owners] == before


# in a real EngineCore


def test_short_requests_start_at_once_beside_a_long_prefill() -> None:
    """A document of 3,900 tokens fills 16 steps of 256; pairs of requests that come meanwhile do not wait for its end."""
    document = request(0, 0.0, prompt=3900, output=4, tenant=LONG)
    shorts = [request(i, 0.1 * ((i + 1) // 2), prompt=40, output=6) for i in range(1, 11)]
    flags = EngineFlags(max_model_len=4096, max_num_batched_tokens=256)
    with installed("mlfq", {"mlfq": {**KNOBS, "last_level_step_tokens": 128}}) as installation:
        engine = VirtualEngine(model_dir("llama-3.1-8b"), flags, ConstantStep(), 400)
        try:
            table = engine.run(workload([document, *shorts])).tables["requests"].to_pandas()
        finally:
            engine.shutdown()
    table = table.set_index("request_id")
    assert (table.status == "ok").all()
    assert installation.tallies["mlfq"].by_hook["token_cap"] >= 5
    # A step takes 45.6 ms at most, and one may be in flight when a request comes.
    wait_ns = (table.scheduled_ns - table.intended_ns).drop("r000")
    assert (wait_ns <= 2 * 45_600_000).all()
    assert (table.drop("r000").scheduled_ns < table.loc["r000"].first_token_ns).all()
