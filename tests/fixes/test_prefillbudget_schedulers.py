"""Guards `prefillbudget` on real schedulers and engines: what long prefills leave to others, and when they get their turn.

Schedulers are sync and async with a clock of the test's own. Not here: the arithmetic (test_prefillbudget), random
schedules and how it composes (scheduling/test_capacity_together), and what the patch is worth (the experiment).
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
from tests.drive import Trace, make_config, make_request, make_scheduler
from tests.engines.traffic import LONG, ConstantStep, request, workload
from tests.scheduling.clocked import installed, patched, prompt, serve

BOTH = pytest.mark.parametrize("async_scheduling", [False, True])
KNOBS = {"long_prompt_tokens": 1000, "first_tokens": 200, "short_prefill_tokens": 64}
# On a clock whose steps all take 20 ms nothing can be learned: the least is then all there is.
FIXED = {**KNOBS, "least_tokens": 200, "target_step_ms": 10}


def run(
    async_scheduling: bool,
    longs: int,
    *,
    decode: bool,
    cancels: list[tuple[int, str]] | None = None,
    **knobs: Any,
) -> tuple[Trace, dict[str, Any]]:
    """Long prompts of 2,000 tokens come before step 2, beside one that decodes or all by themselves."""
    config = make_config(max_num_batched_tokens=512, async_scheduling=async_scheduling)
    chosen = {"prefillbudget": {**FIXED, **knobs}}
    with patched("prefillbudget", chosen) as (installation, clock):
        arrivals = [(0, make_request(config, "small", prompt(9, 20), max_tokens=120, arrival_time=1.0))]
        if not decode:
            arrivals = []
        arrivals += [
            (
                2,
                make_request(config, f"long{i}", prompt(i, 2000), max_tokens=2, arrival_time=2.0 + i),
            )
            for i in range(longs)
        ]
        served = serve(make_scheduler(config, 800), clock, arrivals, cancels or [])
        receipt = installation.receipt()
    return served.trace, receipt


@BOTH
def test_beside_a_decode_they_go_one_after_the_other_and_no_tokens_are_lost(async_scheduling: bool) -> None:
    """The step in which one ends is filled by the next: 6,000 tokens take 30 steps of 200."""
    trace, receipt = run(async_scheduling, 3, decode=True)
    by_step = [
        sum(tokens for name, tokens in step.items() if name.startswith("long") and tokens > 1)
        for step in trace.steps
    ]
    busy = [tokens for tokens in by_step if tokens]
    assert sum(busy) == 6000
    assert max(busy) <= 200
    assert len(busy) == 30
    assert trace.order() == ["small", "long0", "long1", "long2"]
    # The decode has its token in every step.
    assert all("small" in step for step in trace.steps[:119] if step)
    assert receipt["hooks"]["prefillbudget"]["by_hook"]["waiting_gate"] > 0
    assert receipt["metrics"]["prefillbudget"]["prefillbudget_long_tokens_per_step"] == pytest.approx(
        200, abs=5
    )


@BOTH
def test_by_themselves_they_use_whole_steps(async_scheduling: bool) -> None:
    trace, _ = run(async_scheduling, 2, decode=False)
    busy = [sum(step.values()) for step in trace.steps if max(step.values(), default=0) > 1]
    assert busy[0] == 512
    assert len(busy) <= 10
    assert sum(step.get("long0", 0) for step in trace.steps[:4]) == 2000


@BOTH
def test_when_one_is_cancelled_the_next_begins_in_that_step(async_scheduling: bool) -> None:
    trace, _ = run(async_scheduling, 2, decode=True, cancels=[(6, "long0")])
    assert trace.first_step["long1"] == 6


def test_undo_restores_vllm_exactly() -> None:
    owners = (Scheduler, AsyncScheduler, scheduler_module)
    before = [dict(vars(owner)) for owner in owners]
    with patched("prefillbudget"):
        assert [dict(vars(owner)) for owner in owners] != before
    assert [dict(vars(owner)) for owner in owners] == before


# in a real EngineCore


def test_steps_stay_near_the_target_and_long_prompts_still_end() -> None:
    """20 ms and 0.1 ms a token: beside decodes a step of 40 ms has room for 200 tokens, whatever the first guess."""
    decodes = [request(i, 0.0, prompt=30, output=300) for i in range(4)]
    documents = [request(10 + i, 0.5 + 0.1 * i, prompt=3000, output=4, tenant=LONG) for i in range(4)]
    shorts = [request(20 + i, 0.6 + 0.13 * i, prompt=40, output=4) for i in range(12)]
    flags = EngineFlags(max_model_len=4096, max_num_batched_tokens=2048)
    knobs = {
        "prefillbudget": {**KNOBS, "target_step_ms": 40, "steps_per_slo_ratio": 5.0, "first_tokens": 600}
    }
    with installed("prefillbudget", knobs) as installation:
        engine = VirtualEngine(model_dir("llama-3.1-8b"), flags, ConstantStep(), 1500)
        try:
            run = engine.run(workload([*decodes, *documents, *shorts]))
        finally:
            engine.shutdown()
        metrics = installation.receipt()["metrics"]["prefillbudget"]
    table = run.tables["requests"].to_pandas().set_index("request_id")
    assert (table.status == "ok").all()
    assert metrics["prefillbudget_decode_step_ms"] == pytest.approx(20, abs=3)
    assert metrics["prefillbudget_us_per_token"] == pytest.approx(100, rel=0.1)
    steps = run.tables["steps"].to_pandas()
    late = steps[(steps.t_ns > 2_000_000_000) & (steps.prefill_tokens > 100)]
    assert len(late) > 10
    assert ((late.end_ns - late.start_ns) / 1e6).median() == pytest.approx(40, abs=5)
    # Two steps at most before its own, however many documents wait.
    waits = (table.scheduled_ns - table.intended_ns)[[f"r{20 + i:03d}" for i in range(12)]]
    assert (waits <= 2 * 85_000_000).all()
