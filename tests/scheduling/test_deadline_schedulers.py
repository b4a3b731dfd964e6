"""Guards `edf`, `admission` and `overload` on real schedulers and engines: endings, accounts, and who goes first.

Schedulers are sync and async with a clock of the test's own and small pools; records are seen in a real
EngineCore. Not here: arithmetic (test_edf, test_admission, test_overload), default values of the knobs,
and what the patches are worth (the experiment).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engines.flags import EngineFlags
from harness.engines.virtual.engine import VirtualEngine
from harness.profiles import model_dir
from patches.scheduling.prefills import Prefills
from patches.seam.endings import parse
from patches.seam.runtime import RUNTIME_ATTR
from tests.drive import make_config, make_request, make_scheduler
from tests.engines.traffic import LONG, SHORT, ConstantStep, request, workload
from tests.scheduling.clocked import STEP_NS, installed, patched, prompt, serve
from tests.seam.toys import everything

BOTH = pytest.mark.parametrize("async_scheduling", [False, True])
STEP_S = STEP_NS / 1e9

KNOBS: dict[str, dict[str, Any]] = {
    "edf": {"rate_horizon_s": 1.0},
    "admission": {"rate_horizon_s": 1.0, "tier_hold_s": 0.1, "high_priority_rank": 0, "kv_red_share": 0.9},
    "overload": {
        "rate_horizon_s": 1.0,
        "tier_hold_s": 0.1,
        "calm_s": 0.5,
        "miss_horizon_s": 1.0,
        "long_prompt_tokens": 200,
        "long_step_least_tokens": 16,
        "long_patience_s": 1.0,
    },
}
ALL = "edf,admission,overload"


def knobs(enable: str) -> dict[str, dict[str, Any]]:
    """The knobs of the patches in this plan."""
    return {name: KNOBS[name] for name in enable.split(",") if name in KNOBS}


def promised(made: Any, slo_s: float, tenant: str = "", weight: float = 1.0) -> Any:
    """The same request with a target for its first token."""
    made.sampling_params.extra_args = {"tenant": tenant, "weight": weight, "slo_ttft_ms": slo_s * 1e3}
    return made


# a random schedule


@dataclass(frozen=True)
class Planned:
    """One request as hypothesis draws it; steps count from the run's start."""

    arrives: int
    prompt_tokens: int
    shared_tokens: int
    output_tokens: int
    priority: int
    slo_steps: int
    cancelled_after: int | None


PLANNED = st.builds(
    Planned,
    arrives=st.integers(0, 60),
    prompt_tokens=st.integers(1, 420),
    shared_tokens=st.sampled_from([0, 0, 64, 160]),
    output_tokens=st.integers(1, 60),
    priority=st.integers(0, 2),
    slo_steps=st.sampled_from([1, 5, 20, 100]),
    cancelled_after=st.one_of(st.none(), st.none(), st.integers(0, 80)),
)

_CONFIGS: dict[bool, Any] = {}


def config_of(async_scheduling: bool) -> Any:
    """A small engine: 45 blocks hold little more than one of the largest requests."""
    if async_scheduling not in _CONFIGS:
        _CONFIGS[async_scheduling] = make_config(
            max_num_seqs=5, max_num_batched_tokens=128, async_scheduling=async_scheduling
        )
    return _CONFIGS[async_scheduling]


def prefills_of(scheduler: Any) -> list[Prefills]:
    """The accounts of the patches in force."""
    runtime = scheduler.__dict__[RUNTIME_ATTR]
    return [hook.__self__._prefills for hook in runtime.on_add if hasattr(hook.__self__, "_prefills")]


@BOTH
@pytest.mark.parametrize("enable", ["edf", "admission", "overload", ALL, f"qos,mlfq,{ALL}"])
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(drawn=st.lists(PLANNED, min_size=10, max_size=30))
def test_every_request_ends_once_and_the_accounts_are_true(
    async_scheduling: bool, enable: str, drawn: list[Planned]
) -> None:
    ended = check_random_schedule(async_scheduling, enable, drawn)
    assert sum(ended.values()) == len(drawn)


def check_random_schedule(async_scheduling: bool, enable: str, drawn: list[Planned]) -> Counter[str]:
    """Run it and check the laws; how many ended how. `serve` checks the pool."""
    config = config_of(async_scheduling)
    finishes: Counter[str] = Counter()
    with patched(enable, knobs(enable)) as (_, clock):
        common = prompt(99, 160)
        requests = {}
        for number, planned in enumerate(drawn):
            made = make_request(
                config,
                f"r{number}",
                common[: planned.shared_tokens] + prompt(number, planned.prompt_tokens),
                max_tokens=planned.output_tokens,
                arrival_time=1e9 + planned.arrives,
                priority=planned.priority,
            )
            requests[f"r{number}"] = promised(made, planned.slo_steps * STEP_S, f"t{planned.priority}")
        scheduler = make_scheduler(config, 45)
        accounts = prefills_of(scheduler)
        original = scheduler._free_request

        def free_request(request: Any, *args: Any, **more: Any) -> Any:
            finishes[request.request_id] += 1
            return original(request, *args, **more)

        scheduler._free_request = free_request

        def check(sched: Any) -> None:
            for account in accounts:
                owed = account._owed
                assert account.total == sum(one.tokens for one in owed.values()) >= 0
                assert set(owed) <= set(sched.requests)
                for level, tokens in account._by_level.items():
                    assert tokens == sum(one.tokens for one in owed.values() if one.level == level)

        served = serve(
            scheduler,
            clock,
            [(planned.arrives, requests[f"r{n}"]) for n, planned in enumerate(drawn)],
            [
                (planned.arrives + planned.cancelled_after, f"r{n}")
                for n, planned in enumerate(drawn)
                if planned.cancelled_after is not None
            ],
            check=check,
        )
        for account in accounts:
            assert account.total == 0
            assert not account._owed
            assert not account._running
            assert not account._finishing
        del scheduler._free_request
    assert set(finishes) == set(requests)
    assert set(finishes.values()) == {1}
    how: Counter[str] = Counter()
    for n, planned in enumerate(drawn):
        rid = f"r{n}"
        if rid in served.cancelled:
            assert rid not in served.trace.finished
            how["cancelled"] += 1
            continue
        ending = parse(served.trace.stop_reasons[rid])
        if ending is None:
            assert served.trace.finished[rid] == "length"
            assert len(served.trace.outputs[rid]) == planned.output_tokens
            how["ok"] += 1
        else:
            # Ended by a patch, so before its first token, and the client hears of it.
            assert served.trace.finished[rid] == "abort"
            assert not served.trace.outputs.get(rid)
            how[ending.code] += 1
    return how


@BOTH
def test_such_a_schedule_does_refuse_expire_and_preempt(async_scheduling: bool) -> None:
    """The laws above are not idle."""
    drawn = [Planned(i // 2, 200 + 10 * i, 0, 30, i % 3, (5, 20, 100)[i % 3], None) for i in range(24)]
    seen: Counter[str] = Counter()
    for enable in ("edf", "admission", "overload"):
        seen += check_random_schedule(async_scheduling, enable, drawn)
    assert seen["deadline_expired"] > 0
    assert seen["predicted_late"] + seen["kv_red"] > 0
    assert seen["overload"] > 0
    assert seen["ok"] > 0


# who goes first


@BOTH
def test_edf_serves_by_deadline_and_leaves_the_late_behind(async_scheduling: bool) -> None:
    config = make_config(max_num_seqs=1, async_scheduling=async_scheduling)
    slos = {"loose": 9.0, "tight": 1.0, "middle": 3.0, "gone": 0.06}
    with patched("edf", {"edf": {"expire_slo_factor": 100.0}}) as (_, clock):
        requests = [
            promised(make_request(config, name, prompt(i, 40), max_tokens=3, arrival_time=1e9 + i), slo)
            for i, (name, slo) in enumerate(slos.items())
        ]
        first = promised(make_request(config, "first", prompt(9, 40), max_tokens=5, arrival_time=1e9), 5.0)
        served = serve(make_scheduler(config, 100), clock, [(0, first), *((1, r) for r in requests)])
    # "gone" was due before "first" was through.
    assert served.trace.order() == ["first", "tight", "middle", "loose", "gone"]


@BOTH
def test_a_prefill_that_became_late_yields_to_one_in_time(async_scheduling: bool) -> None:
    """Two prefill side by side; when the first can no longer make it, the other gets the budget before it."""
    config = make_config(max_num_batched_tokens=128, async_scheduling=async_scheduling)
    everything.CAP["late"] = 64
    try:
        with patched("edf,tests.seam.toys.everything", {"edf": {"expire_slo_factor": 100.0}}) as (_, clock):
            late = promised(
                make_request(config, "late", prompt(1, 3000), max_tokens=1, arrival_time=1e9), 0.4
            )
            new = promised(make_request(config, "new", prompt(2, 2000), max_tokens=1, arrival_time=1e9), 9.0)
            served = serve(make_scheduler(config, 400), clock, [(0, late), (0, new)])
    finally:
        everything.clear()
    both = [list(step) for step in served.trace.steps if len(step) == 2]
    alone = [list(step) for step in served.trace.steps if step.keys() == {"new"}]
    assert both[0] == ["late", "new"]
    # Then it takes the whole budget, and "late" what is left over.
    assert len(alone) > 3
    assert list(served.trace.finished) == ["new", "late"]


@BOTH
def test_the_late_one_is_the_victim(async_scheduling: bool) -> None:
    """Two grow until the pool is full: the one whose promise is broken gives way, though it came first."""
    config = make_config(max_num_batched_tokens=512, async_scheduling=async_scheduling)
    with patched("edf", {"edf": {}}) as (_, clock):
        # It was a second under way.
        came_s = clock.seconds() - 1.0
        late = promised(
            make_request(config, "late", prompt(1, 300), max_tokens=120, arrival_time=came_s), 0.8
        )
        good = promised(make_request(config, "good", prompt(2, 300), max_tokens=120, arrival_time=1e9), 9.0)
        served = serve(make_scheduler(config, 46), clock, [(0, late), (0, good)])
    assert set(served.trace.preempted) == {"late"}
    assert served.trace.finished == {"late": "length", "good": "length"}


@BOTH
def test_a_long_prefill_leaves_others_short_steps(async_scheduling: bool) -> None:
    config = make_config(max_num_batched_tokens=512, async_scheduling=async_scheduling)
    own = {"overload": {**KNOBS["overload"], "step_slo_share": 0.1}}
    with patched("overload", own) as (installation, clock):
        requests = [
            (
                0,
                promised(make_request(config, "long", prompt(1, 3500), max_tokens=1, arrival_time=1e9), 60.0),
            ),
            (
                2,
                promised(make_request(config, "next", prompt(2, 3500), max_tokens=1, arrival_time=1e9), 60.0),
            ),
            (3, promised(make_request(config, "short", prompt(3, 50), max_tokens=40, arrival_time=1e9), 0.1)),
        ]
        served = serve(make_scheduler(config, 600), clock, requests)
        hooks = installation.receipt()["hooks"]["overload"]["by_hook"]
    steps = served.trace.steps
    beside = [step["long"] for step in steps[4:40] if "long" in step and "short" in step]
    assert beside
    # A step takes twice what it may, whatever is in it, so the budget falls from step to step.
    assert beside == sorted(beside, reverse=True)
    assert beside[-1] < 256
    assert hooks["token_cap"] > 0
    # By itself it takes whole steps.
    assert steps[0] == {"long": 512}
    assert all(stop is None for stop in served.trace.stop_reasons.values())


# in a real EngineCore


@BOTH
@pytest.mark.parametrize(
    ("enable", "status", "reason"),
    [
        ("edf", "expired", "deadline_expired"),
        ("admission", "rejected", "predicted_late"),
        ("overload", "rejected", "overload"),
    ],
)
def test_the_record_says_who_was_turned_away_and_why(
    async_scheduling: bool, enable: str, status: str, reason: str
) -> None:
    """Bronze prompts come at three times what is served; chat between them keeps its promise."""
    bronze, chat = replace(LONG, slo_ttft_ms=1000.0), replace(SHORT, slo_ttft_ms=900.0)
    traffic = [request(i, 0.1 * i, prompt=3000, output=2, tenant=bronze) for i in range(30)]
    traffic += [request(40 + i, 0.05 + 0.3 * i, prompt=40, output=4, tenant=chat) for i in range(10)]
    flags = EngineFlags(max_model_len=4096, max_num_batched_tokens=1024, async_scheduling=async_scheduling)
    with installed(enable):
        engine = VirtualEngine(model_dir("llama-3.1-8b"), flags, ConstantStep(), 4000)
        try:
            found = engine.run(replace(workload(traffic), tenants=(chat, bronze)))
        finally:
            engine.shutdown()
    rows = found.tables["requests"].to_pylist()
    turned = [row for row in rows if row["status"] != "ok"]
    assert {(row["status"], row["reason"]) for row in turned} == {(status, reason)}
    assert 10 < len(turned) < 30
    for row in turned:
        assert row["output_tokens"] == 0
        assert row["scheduled_ns"] is None
    events = Counter(event["kind"] for event in found.tables["events"].to_pylist())
    assert events["expire" if status == "expired" else "reject"] == len(turned)
