"""Guards `wfq` on real schedulers and engines: shares, bounds, charges, work conservation, and its pair law.

Schedulers are sync and async. Not here: the arithmetic (test_wfq), the queue of tenants
(test_seam_tenants), and what the patch is worth (the experiment).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from harness.engines.flags import EngineFlags
from harness.engines.virtual.engine import VirtualEngine
from harness.profiles import model_dir
from tests.drive import make_config, make_scheduler
from tests.engines.traffic import LONG, SHORT, ConstantStep, request, workload
from tests.scheduling.clocked import Served, installed, patched, serve
from tests.scheduling.tenants import (
    PLANNED,
    Planned,
    arrivals,
    cancels,
    of,
    requests_of,
    service,
    waiting_tenants,
)

BOTH = pytest.mark.parametrize("async_scheduling", [False, True])
BUDGET, SEATS = 128, 4


def flood(
    enable: str, async_scheduling: bool, weight: float, *, lengths: tuple[int, int] = (90, 90)
) -> tuple[Served, list[set[str]]]:
    """60 requests of tenant a, then as many of b, all there at once; a has weight 1, b `weight`."""
    config = make_config(max_num_seqs=SEATS, max_num_batched_tokens=BUDGET, async_scheduling=async_scheduling)
    waiting: list[set[str]] = []
    with patched(enable) as (_, clock):
        requests = [of(config, f"a{i}", lengths[0], tokens=10, at=float(i)) for i in range(60)] + [
            of(config, f"b{i}", lengths[1], tokens=10, weight=weight, at=60.0 + i) for i in range(60)
        ]
        served = serve(
            make_scheduler(config, 400), clock, [(0, r) for r in requests], check=waiting_tenants(waiting)
        )
    return served, waiting


def furthest_apart(served: Served, waiting: list[set[str]], weight: float) -> float:
    """The most that one tenant was ahead, per weight, while both waited."""
    had = {"a": 0.0, "b": 0.0}
    worst = 0.0
    for tokens, before in zip(service(served), waiting, strict=False):
        if before != {"a", "b"}:
            break
        had["a"] += tokens.get("a", 0)
        had["b"] += tokens.get("b", 0) / weight
        worst = max(worst, abs(had["a"] - had["b"]))
    return worst


@BOTH
@pytest.mark.parametrize("weight", [1.0, 3.0])
@pytest.mark.parametrize("lengths", [(90, 90), (300, 40)])
def test_tenants_that_both_wait_stay_within_the_bound(
    async_scheduling: bool, weight: float, lengths: tuple[int, int]
) -> None:
    """One step's tokens, and the rest of what runs; first come, first served is far beyond it."""
    bound = BUDGET + SEATS * (max(lengths) + 10)
    served, waiting = flood("wfq", async_scheduling, weight, lengths=lengths)
    assert furthest_apart(served, waiting, weight) <= bound
    assert all(len(tokens) == 10 for tokens in served.trace.outputs.values())
    stock, waiting = flood("", async_scheduling, weight, lengths=lengths)
    assert furthest_apart(stock, waiting, weight) > 2 * bound


@BOTH
def test_the_share_of_who_wants_nothing_is_used_by_others(async_scheduling: bool) -> None:
    """A tenant alone is served exactly as without the patch."""

    def run(enable: str) -> Any:
        config = make_config(
            max_num_seqs=SEATS, max_num_batched_tokens=BUDGET, async_scheduling=async_scheduling
        )
        with patched(enable) as (_, clock):
            requests = [of(config, f"a{i}", 60 + 40 * (i % 5), tokens=5, at=float(i)) for i in range(30)]
            return serve(make_scheduler(config, 400), clock, [(i, r) for i, r in enumerate(requests)])

    assert run("wfq").trace.steps == run("").trace.steps


@BOTH
def test_a_newcomer_does_not_wait_for_the_end_of_anothers_long_prefill(async_scheduling: bool) -> None:
    first = {}
    for yields in (True, False):
        config = make_config(max_num_batched_tokens=256, async_scheduling=async_scheduling)
        with patched("wfq", {"wfq": {"prefills_yield": yields}}) as (_, clock):
            long = of(config, "z", 3800, at=1.0)
            new = [of(config, f"{name}0", 100, at=2.0 + i) for i, name in enumerate("abc")]
            served = serve(make_scheduler(config, 400), clock, [(0, long), *((4, r) for r in new)])
        first[yields] = [served.trace.first_step[r.request_id] for r in new]
    assert first[False][0] >= 14
    assert max(first[True]) <= 8


@BOTH
def test_no_step_is_empty_and_the_flooded_tenant_is_not_starved(async_scheduling: bool) -> None:
    """Requests of b come all the time; the one of a that came late is served after a bounded number of them."""
    config = make_config(max_num_seqs=1, max_num_batched_tokens=BUDGET, async_scheduling=async_scheduling)
    with patched("wfq") as (_, clock):
        requests = [(0, of(config, f"b{i}", 60, tokens=3, weight=4.0, at=float(i))) for i in range(40)]
        late = (10, of(config, "a0", 60, tokens=3, at=100.0))
        served = serve(make_scheduler(config, 100), clock, [*requests, late])
    if not async_scheduling:
        assert all(served.trace.steps)
    came = served.arrived["a0"]
    before = [
        n for n, step in served.trace.first_step.items() if came <= step < served.trace.first_step["a0"]
    ]
    # It starts where b is, so at most the one that runs and one that was as far.
    assert len(before) <= 2


def test_undo_restores_vllm_exactly() -> None:
    owners = (Scheduler, AsyncScheduler, scheduler_module)
    before = [dict(vars(owner)) for owner in owners]
    with patched("wfq,tenant"):
        assert [dict(vars(owner)) for owner in owners] != before
    assert [dict(vars(owner)) for owner in owners] == before


# a random schedule

_CONFIGS: dict[bool, Any] = {}


def config_of(async_scheduling: bool) -> Any:
    """A small engine: 40 blocks cannot hold much more than one of the largest requests."""
    if async_scheduling not in _CONFIGS:
        _CONFIGS[async_scheduling] = make_config(
            max_num_seqs=5, max_num_batched_tokens=BUDGET, async_scheduling=async_scheduling
        )
    return _CONFIGS[async_scheduling]


@pytest.mark.parametrize("enable", ["wfq", "wfq,tenant", "tenant", "qos,mlfq,wfq,tenant,slru"])
@BOTH
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(drawn=st.lists(PLANNED, min_size=10, max_size=30))
def test_every_request_ends_and_charges_equal_the_tokens_computed(
    enable: str, async_scheduling: bool, drawn: list[Planned]
) -> None:
    check_random_schedule(enable, async_scheduling, drawn)


@BOTH
def test_such_a_schedule_does_preempt(async_scheduling: bool) -> None:
    """The law above is not idle: this one of its schedules computes something again."""
    drawn = [Planned("abc"[i % 3], i, 150, 60, None) for i in range(9)]
    assert check_random_schedule("wfq,tenant", async_scheduling, drawn)["wfq_recomputed_tokens"] > 0


def check_random_schedule(enable: str, async_scheduling: bool, drawn: list[Planned]) -> dict[str, float]:
    """Run it and check the laws; the metrics of wfq."""
    config = config_of(async_scheduling)
    with patched(enable) as (installation, clock):
        planned = requests_of(config, drawn)
        served = serve(make_scheduler(config, 45), clock, arrivals(planned), cancels(planned))
        metrics: dict[str, float] = installation.receipt()["metrics"].get("wfq", {})
    for name, (one, _) in planned.items():
        if name not in served.cancelled:
            assert served.trace.finished[name] == "length"
            assert len(served.trace.outputs[name]) == one.output_tokens
    for step in served.trace.steps:
        assert sum(step.values()) <= BUDGET
        assert len(step) <= 5
    if metrics:
        computed = sum(sum(step.values()) for step in served.trace.steps)
        assert metrics["wfq_charged_tokens"] + metrics["wfq_recomputed_tokens"] == computed
        if not served.cancelled:
            # Nobody pays twice: prompts are all different, and the last token is never computed.
            once = sum(one.prompt_tokens + one.output_tokens - 1 for one, _ in planned.values())
            assert metrics["wfq_charged_tokens"] == once
    return metrics


# in a real EngineCore: the pair law

# Long prompts of one tenant, short ones of another, and important long ones of the first in between.
TRAFFIC = [
    *(request(i, 0.02 * i, prompt=2500, output=30, tenant=LONG) for i in range(6)),
    *(request(10 + i, 0.5 + 0.15 * i, prompt=60, output=10, tenant=SHORT) for i in range(20)),
    *(request(40 + i, 1.0 + 0.5 * i, prompt=700, output=20, tenant=SHORT) for i in range(6)),
]


@cache
def run_of(enable: str) -> tuple[str, dict[str, int]]:
    """The traffic on a fresh engine: its schedule's digest, and each patch's hits."""
    flags = EngineFlags(max_model_len=4096, max_num_batched_tokens=512, max_num_seqs=4)
    # Requests are small here, and so is what tenants may differ by.
    with installed(enable, {"wfq": {"grain_tokens": 64}} if "wfq" in enable else None) as installation:
        engine = VirtualEngine(model_dir("llama-3.1-8b"), flags, ConstantStep(), 500)
        try:
            run = engine.run(workload(TRAFFIC))
        finally:
            engine.shutdown()
        hits = {name: installation.tallies[name].hits for name in installation.plan.names}
    assert set(run.tables["requests"].column("status").to_pylist()) == {"ok"}
    return run.schedule_digest, hits


ALL = ("qos", "mlfq", "wfq", "tenant")


@pytest.mark.parametrize("left_out", ALL)
def test_leaving_any_out_changes_the_schedule(left_out: str) -> None:
    """Each of the four beside the other three."""
    whole, hits = run_of(",".join(ALL))
    rest, _ = run_of(",".join(name for name in ALL if name != left_out))
    assert min(hits.values()) > 0
    assert whole != rest


@pytest.mark.parametrize("other", ["qos", "mlfq", "tenant"])
def test_each_pair_differs_from_either_alone(other: str) -> None:
    both, hits = run_of(f"{other},wfq")
    assert min(hits.values()) > 0
    assert len({both, run_of("wfq")[0], run_of(other)[0]}) == 3
