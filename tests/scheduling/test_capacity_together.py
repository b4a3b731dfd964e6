"""Guards `watermark`, `ratelimit`, `prefillbudget` and `mlfq` together: random schedules on real schedulers, and pairs.

Sync and async, small pools, cancels and preemptions on demand. Not here: each patch's own rules, and whether the
combination is worth anything (the experiment).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from harness.engines.flags import EngineFlags
from harness.engines.virtual.engine import VirtualEngine
from harness.profiles import model_dir
from patches.seam.plan import resolve
from tests.drive import make_config, make_request, make_scheduler
from tests.engines.traffic import LONG, SHORT, ConstantStep, request, workload
from tests.scheduling.clocked import installed, patched, prompt, serve

ALL = ("watermark", "ratelimit", "mlfq", "prefillbudget")
KNOBS: dict[str, dict[str, Any]] = {
    "watermark": {"patience_s": 0.5, "first_output_tokens": 30, "short_prompt_tokens": 50},
    "ratelimit": {
        "burst_tokens": 32,
        "most_rate_tokens": 16,
        "least_rate_tokens": 4,
        "first_tokens": 40,
        "target_step_ms": 15,
    },
    "mlfq": {
        "level0_tokens": 32,
        "level1_tokens": 64,
        "level2_tokens": 128,
        "last_level_step_tokens": 48,
        "last_level_free_share": 0.1,
        "last_level_patience_s": 0.5,
    },
    "prefillbudget": {
        "long_prompt_tokens": 129,
        "short_prefill_tokens": 32,
        "least_tokens": 16,
        "first_tokens": 40,
        "target_step_ms": 15,
        "patience_s": 1.0,
        "late_turn_requests": 3,
    },
}


def knobs(enable: str) -> dict[str, dict[str, Any]]:
    """The knobs of the patches in this plan."""
    return {name: values for name, values in KNOBS.items() if name in enable.split(",")}


# the pair law

# Memory for a few documents only; shorts of two classes come while documents prefill, some of them in answers that grow.
TRAFFIC = [
    *(request(i, 0.04 * i, prompt=2500, output=60, tenant=LONG) for i in range(8)),
    *(request(50 + i, 0.1 + 0.11 * i, prompt=120, output=20, tenant=SHORT) for i in range(24)),
    *(request(90 + i, 0.7 + 0.5 * i, prompt=700, output=30, tenant=LONG) for i in range(6)),
]
CHOSEN: dict[str, dict[str, Any]] = {
    "watermark": {},
    "ratelimit": {"burst_tokens": 128, "target_step_ms": 40, "steps_per_slo_ratio": 4.0},
    "mlfq": {"last_level_step_tokens": 150},
    "prefillbudget": {"long_prompt_tokens": 1000, "steps_per_slo_ratio": 5.0, "late_turn_requests": 2},
}


@cache
def run_of(enable: str) -> tuple[str, dict[str, int]]:
    """The schedule's digest of the traffic on a fresh engine, and each patch's hits."""
    flags = EngineFlags(
        max_model_len=4096, max_num_batched_tokens=1024, max_num_seqs=16, scheduling_policy="priority"
    )
    chosen = {name: values for name, values in CHOSEN.items() if name in enable.split(",")}
    with installed(enable, chosen) as installation:
        engine = VirtualEngine(model_dir("llama-3.1-8b"), flags, ConstantStep(), 700)
        try:
            run = engine.run(workload(TRAFFIC))
        finally:
            engine.shutdown()
        hits = {name: installation.tallies[name].hits for name in installation.plan.names}
    assert set(run.tables["requests"].column("status").to_pylist()) == {"ok"}
    return run.schedule_digest, hits


@pytest.mark.parametrize(
    "pair", [(a, b) for n, a in enumerate(ALL) for b in ALL[n + 1 :]], ids=lambda pair: "-".join(pair)
)
def test_leaving_either_out_changes_the_schedule(pair: tuple[str, str]) -> None:
    both, hits = run_of(",".join(pair))
    assert min(hits.values()) > 0
    assert both not in {run_of(pair[0])[0], run_of(pair[1])[0]}


def test_their_order_is_declared() -> None:
    order = resolve(",".join(reversed(ALL))).order()
    assert order["token_cap"] == ("watermark", "ratelimit", "prefillbudget", "mlfq")
    assert order["waiting_gate"] == ("watermark", "ratelimit", "prefillbudget", "mlfq")


# random schedules


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
    priority=st.integers(0, 2),
    cancelled_after=st.one_of(st.none(), st.none(), st.integers(0, 80)),
)
SUBSETS = st.sets(st.sampled_from([*ALL, "qos", "slru"]), min_size=1).map(
    lambda names: ",".join(sorted(names))
)
_CONFIGS: dict[bool, Any] = {}


@pytest.mark.parametrize("async_scheduling", [False, True])
@settings(max_examples=40, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(drawn=st.lists(PLANNED, min_size=8, max_size=30), enable=SUBSETS, blocks=st.integers(45, 90))
def test_every_request_ends_and_every_block_returns(
    async_scheduling: bool, drawn: list[Planned], enable: str, blocks: int
) -> None:
    """Any subset, also with qos and slru. No pass is empty while somebody could run; limits hold; charges add up."""
    if async_scheduling not in _CONFIGS:
        _CONFIGS[async_scheduling] = make_config(
            max_num_seqs=5, max_num_batched_tokens=128, async_scheduling=async_scheduling
        )
    config = _CONFIGS[async_scheduling]
    with patched(enable, knobs(enable)) as (installation, clock):
        common = prompt(99, 160)
        arrivals, cancels = [], []
        for number, planned in enumerate(drawn):
            tokens = common[: planned.shared_tokens] + prompt(number, planned.prompt_tokens)
            name = f"r{number}"
            made = make_request(
                config,
                name,
                tokens,
                max_tokens=planned.output_tokens,
                arrival_time=1.0 + planned.arrives,
                priority=planned.priority,
                tenant=f"t{planned.priority}",
            )
            arrivals.append((planned.arrives, made))
            if planned.cancelled_after is not None:
                cancels.append((planned.arrives + planned.cancelled_after, name))
        waiting: list[bool] = []
        served = serve(
            make_scheduler(config, blocks),
            clock,
            arrivals,
            cancels,
            check=lambda sched: waiting.append(sched.has_unfinished_requests()),
        )
        receipt = installation.receipt()
    for number, planned in enumerate(drawn):
        name = f"r{number}"
        if name in served.cancelled:
            assert name not in served.trace.finished
        else:
            assert served.trace.finished[name] == "length"
            assert len(served.trace.outputs[name]) == planned.output_tokens
    empty = 0
    for unfinished, step in zip(waiting, served.trace.steps, strict=True):
        assert sum(step.values()) <= 128
        assert len(step) <= 5
        # With output in flight there may be nothing to schedule for a moment; a held queue is no reason.
        empty = empty + 1 if unfinished and not step else 0
        assert empty <= (3 if async_scheduling else 0)
    if "ratelimit" in enable:
        metrics = receipt["metrics"]["ratelimit"]
        computed = sum(sum(step.values()) for step in served.trace.steps)
        assert metrics["ratelimit_paid_tokens"] + metrics["ratelimit_spare_tokens"] == computed
