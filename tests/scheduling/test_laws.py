"""Guards what holds whichever scheduling patches are on: two of them, all of them, and (slowly) any of them.

Random traffic of three tenants with deadlines, on real Schedulers, synchronous and asynchronous, with cancellations, a
pool that is too small, and few seats. Not here: each patch's own rules, and what the combination is worth.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patches.catalogue import CATALOGUE
from patches.seam import endings
from tests.drive import make_config, make_request, make_scheduler
from tests.scheduling.clocked import patched, prompt, serve

SCHEDULING = tuple(
    entry.name
    for entry in CATALOGUE
    if entry.built and (entry.area == "scheduling" or entry.name in ("prefillbudget", "tenant", "overload"))
)
PAIRS = tuple(",".join(pair) for pair in itertools.combinations(SCHEDULING, 2))
SEATS, STEP_TOKENS, BLOCKS = 5, 128, 45
# (tenant, tier, priority, weight, milliseconds to the first token): a step takes 20 ms here.
TENANTS = (
    ("gold-a", "gold", 0, 4, 400.0),
    ("silver-0", "silver", 1, 2, 1_000.0),
    ("bronze-0", "bronze", 2, 1, 6_000.0),
)
# Small, so that the small traffic here meets them.
KNOBS: dict[str, dict[str, Any]] = {
    "qos": {"short_prompt_tokens": 200, "victim_prompt_tokens": 0, "preempt_cooldown_s": 0.1},
    "mlfq": {"level0_tokens": 64, "level1_tokens": 128, "level2_tokens": 256, "last_level_step_tokens": 64},
}


@dataclass(frozen=True)
class Asked:
    """One request as it is drawn; steps count from the run's start."""

    arrives: int
    prompt_tokens: int
    shared_tokens: int
    output_tokens: int
    tenant: int
    cancelled_after: int | None


ASKED = st.builds(
    Asked,
    arrives=st.integers(0, 60),
    prompt_tokens=st.integers(1, 420),
    shared_tokens=st.sampled_from([0, 0, 64, 160]),
    output_tokens=st.integers(1, 60),
    tenant=st.integers(0, len(TENANTS) - 1),
    cancelled_after=st.one_of(st.none(), st.none(), st.integers(0, 80)),
)
TRAFFIC = st.lists(ASKED, min_size=10, max_size=30)


@cache
def config_of(async_scheduling: bool) -> Any:
    """A small engine: its pool cannot hold much more than one of the largest requests."""
    return make_config(
        max_num_seqs=SEATS, max_num_batched_tokens=STEP_TOKENS, async_scheduling=async_scheduling
    )


def requests_of(config: Any, drawn: list[Asked]) -> dict[str, tuple[Asked, Any]]:
    """Real requests by id; made while the plan is in force, since they carry the adapter's ticket."""
    common = prompt(99, 160)
    made = {}
    for number, asked in enumerate(drawn):
        name, tier, priority, weight, slo_ms = TENANTS[asked.tenant]
        request = make_request(
            config,
            f"r{number}",
            common[: asked.shared_tokens] + prompt(number, asked.prompt_tokens),
            max_tokens=asked.output_tokens,
            arrival_time=1.0 + asked.arrives,
            priority=priority,
            tenant=name,
            tier=tier,
        )
        request.sampling_params.extra_args |= {"weight": weight, "slo_ttft_ms": slo_ms}
        made[f"r{number}"] = (asked, request)
    return made


def check(enable: str, async_scheduling: bool, drawn: list[Asked]) -> None:
    """Serve it, and hold it against the laws; `serve` itself checks that every block came back."""
    config = config_of(async_scheduling)
    knobs = {name: values for name, values in KNOBS.items() if name in enable.split(",")}
    with patched(enable, knobs) as (_, clock):
        asked = requests_of(config, drawn)
        served = serve(
            make_scheduler(config, BLOCKS),
            clock,
            [(one.arrives, request) for one, request in asked.values()],
            [
                (one.arrives + one.cancelled_after, name)
                for name, (one, _) in asked.items()
                if one.cancelled_after is not None
            ],
        )
    trace = served.trace
    for name, (one, _) in asked.items():
        if name in served.cancelled:
            assert name not in trace.finished
        elif trace.finished[name] == "length":
            assert len(trace.outputs[name]) == one.output_tokens
        else:
            # Only a patch ends a request otherwise, and it says why in words that the API knows.
            assert endings.parse(trace.stop_reasons[name]) is not None, trace.stop_reasons[name]
            assert {"admission", "edf", "overload"} & set(enable.split(","))
    for step in trace.steps:
        assert sum(step.values()) <= STEP_TOKENS and len(step) <= SEATS
    # Nothing idles while somebody waits: a step may be empty when all that was there has just ended, or when, with
    # asynchronous scheduling, the output of the one before has still to come; not twice in a row beyond that.
    idle = max(
        (len([*run]) for empty, run in itertools.groupby(trace.steps, lambda s: not s) if empty), default=0
    )
    assert idle <= 2 + async_scheduling


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("pair", PAIRS)
@settings(max_examples=3, deadline=None, derandomize=True, database=None)
@given(drawn=TRAFFIC)
def test_any_two(pair: str, async_scheduling: bool, drawn: list[Asked]) -> None:
    check(pair, async_scheduling, drawn)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(drawn=TRAFFIC)
def test_all(async_scheduling: bool, drawn: list[Asked]) -> None:
    check(",".join(SCHEDULING), async_scheduling, drawn)


@pytest.mark.slow
@pytest.mark.nightly
@settings(max_examples=400, deadline=None, derandomize=False, database=None)
@given(chosen=st.sets(st.sampled_from(SCHEDULING), min_size=1), async_scheduling=st.booleans(), drawn=TRAFFIC)
def test_any_subset(chosen: set[str], async_scheduling: bool, drawn: list[Asked]) -> None:
    check(",".join(sorted(chosen)), async_scheduling, drawn)


def test_undo_leaves_vllm_as_it_was() -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM

    owners = (Scheduler, BlockPool, AsyncLLM)
    before = [dict(vars(owner)) for owner in owners]
    with patched(",".join(SCHEDULING)):
        assert any(dict(vars(owner)) != was for owner, was in zip(owners, before, strict=True))
    assert [dict(vars(owner)) for owner in owners] == before
