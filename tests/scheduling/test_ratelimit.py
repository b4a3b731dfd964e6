"""Guards `ratelimit`: who is limited, buckets and what they are charged, what is given away, and the same on real schedulers.

Not here: random schedules and how it composes (test_capacity_together), step times (test_steptime), and what the patch
is worth (the experiment).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from patches.scheduling.ratelimit import PATCH, RateLimitKnobs
from tests.drive import make_config, make_request, make_scheduler
from tests.scheduling.capacity_policy import Bench, Sized
from tests.scheduling.clocked import patched, prompt, serve

FAST = settings(max_examples=100, deadline=None, derandomize=True)
# Nothing to spare: what decodes take is above the target already.
NO_SPARE = {"first_tokens": 0, "target_step_ms": 1.0}


def bench(**knobs: Any) -> Bench:
    """The patch."""
    return Bench(PATCH, RateLimitKnobs(**knobs))


@pytest.mark.parametrize(
    ("other", "limited"),
    [
        ({"priority": 0}, True),
        ({"priority": 1}, False),
        ({"priority": 2}, False),
        ({"priority": 1, "weight": 4.0}, True),
        ({"priority": 1, "weight": 0.5}, False),
    ],
)
def test_only_a_class_below_the_best_is_limited(other: dict[str, Any], limited: bool) -> None:
    """By priority, and by weight where priorities are equal or absent."""
    b = bench(burst_tokens=100, **NO_SPARE)
    one = b.run("one", 4000, prefills=True, priority=1)
    assert b.cap(one) == 2000
    better = b.run("other", 50, **other)
    assert (b.cap(one) < 2000) == limited
    b.finish(better)
    assert b.cap(one) == 2000


def test_a_bucket_starts_full_and_gains_the_rate() -> None:
    """Under full load the least, without load the most; decodes pay too."""
    b = bench(burst_tokens=100, least_rate_tokens=8, most_rate_tokens=64, **NO_SPARE)
    b.run("gold", 50)
    low = b.add("low", 4000, priority=1)
    seen = []
    b.enter(low)
    for number in range(4):
        seen.append(b.cap(low))
        b.end_pass({"gold": 1, "low": seen[-1]}, new=("low",) if not number else ())
    # No step time is known, so there is no load.
    assert seen == [100, 64, 64, 64]
    for _ in range(20):
        b.step({"gold": 1}, 0.05)
    assert b.cap(low) == 100
    b.end_pass({"gold": 1, "low": 100})
    assert b.cap(low) == 8


def test_what_the_step_can_spare_is_given_away() -> None:
    """20 ms and 0.1 ms a token: 40 ms have room for 200. What better ones want comes first; only the worst are limited."""
    b = bench(target_step_ms=40, burst_tokens=10, least_rate_tokens=1, most_rate_tokens=1)
    gold = b.run("gold", 50)
    b.learn(0.020, 1e-4, gold)
    bronze = b.run("bronze", 4000, prefills=True, priority=2)
    b.end_pass({"bronze": 20, "gold": 1})
    silver = b.run("silver", 4000, prefills=True, priority=1)
    # A middle class does not pay for the best one's bursts.
    assert b.cap(silver) == 2000
    assert b.cap(bronze) <= 10
    b.finish(silver)
    b.end_pass({"gold": 1})
    b.add("gold-2", 150)
    assert b.cap(bronze) == pytest.approx(50, abs=5)


def test_what_better_ones_claim_but_do_not_take_is_given_away_again() -> None:
    b = bench(target_step_ms=40, burst_tokens=10, least_rate_tokens=1, most_rate_tokens=1)
    b.learn(0.020, 1e-4, b.run("gold", 50))
    bronze = b.run("bronze", 4000, prefills=True, priority=2)
    b.add("no seat", 1000)
    assert b.cap(bronze) <= 10
    b.end_pass({"gold": 1, "bronze": 10})
    assert b.cap(bronze) == pytest.approx(200, abs=5)


def test_a_large_one_waits_while_another_limited_one_takes_all() -> None:
    b = bench(burst_tokens=100, **NO_SPARE)
    b.run("gold", 50)
    first = b.run("first", 4000, prefills=True, priority=1)
    large, small = b.add("large", 4000, priority=1), b.add("small", 100, priority=1)
    b.cap(first)
    assert b.gate(large) is not None
    assert b.gate(small) is None
    assert b.gate(b.add("gold-2", 4000)) is None
    b.finish(first)
    b.end_pass({"gold": 1})
    assert b.gate(large) is None


def test_rejected_drafts_are_paid_back() -> None:
    b = bench(burst_tokens=100, least_rate_tokens=1, most_rate_tokens=1, **NO_SPARE)
    b.scheduler.num_spec_tokens = 3  # type: ignore[attr-defined]
    b.run("gold", 50)
    low = b.run("low", 60, priority=1)
    output = b.end_pass({"gold": 1, "low": 4})
    output.scheduled_spec_decode_tokens = {"low": [1, 2, 3], "gone": [1]}
    # One draft of three was accepted: two tokens came out.
    returned = SimpleNamespace(outputs=[SimpleNamespace(request_id="low", new_token_ids=[5, 6])])
    before = b.context.gauges["ratelimit_paid_tokens"]()
    assert b.hooks.after_update
    b.hooks.after_update(output, {0: returned}, 1.0)
    assert b.context.gauges["ratelimit_refunded_tokens"]() == 2
    assert before == 50 + 60 + 1 + 4 - b.context.gauges["ratelimit_spare_tokens"]()
    b.finish(low)


@FAST
@given(
    running=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([1.0, 2.0]), st.integers(2, 5000), st.booleans()),
        max_size=6,
    ),
    waiting=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5000)), max_size=4),
    target_ms=st.floats(1, 80),
)
def test_laws(
    running: list[tuple[int, float, int, bool]], waiting: list[tuple[int, int]], target_ms: float
) -> None:
    """The best class is never cut or held; everybody gets at least a token; if nobody better is there nobody is held."""
    b = bench(target_step_ms=target_ms)
    for number, (priority, weight, tokens, prefills) in enumerate(running):
        b.run(f"r{number}", tokens, prefills=prefills, priority=priority, weight=weight)
    queued = [b.add(f"w{i}", tokens, priority=p) for i, (p, tokens) in enumerate(waiting)]
    everybody = [*b.scheduler.running, *queued]
    best = min(((r.priority, -r.weight) for r in everybody), default=None)  # type: ignore[attr-defined]
    for request in everybody:
        cut = b.cap(request)  # type: ignore[arg-type]
        left = request.num_tokens - request.num_computed_tokens
        assert min(left, 1) <= cut <= left
        if (request.priority, -request.weight) == best:  # type: ignore[attr-defined]
            assert cut == left
            assert b.gate(request) is None  # type: ignore[arg-type]
    if not b.scheduler.running:
        assert all(b.gate(request) is None for request in queued)


def test_knobs_refuse_nonsense_and_have_units() -> None:
    for bad in ({"least_rate_tokens": 65}, {"burst_tokens": 0}, {"rate": 5}):
        with pytest.raises(ValidationError):
            RateLimitKnobs(**bad)
    assert all(PATCH.unit(name) for name in RateLimitKnobs.model_fields)


# on real schedulers


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("gold", [False, True])
def test_a_limited_prompt_beside_a_better_one_and_alone(async_scheduling: bool, gold: bool) -> None:
    config = make_config(max_num_batched_tokens=512, async_scheduling=async_scheduling)
    knobs = {"burst_tokens": 100, "most_rate_tokens": 16, "least_rate_tokens": 16, **NO_SPARE}
    with patched("ratelimit", {"ratelimit": knobs}) as (installation, clock):
        low = make_request(config, "low", prompt(1, 900), max_tokens=2, arrival_time=2.0, priority=1)
        better = make_request(config, "gold", prompt(2, 20), max_tokens=30, arrival_time=1.0)
        arrivals = [(0, better)] if gold else []
        served = serve(make_scheduler(config, 400), clock, [*arrivals, (1, low)])
        receipt = installation.receipt()
    given = [step["low"] for step in served.trace.steps if "low" in step]
    if gold:
        assert given[:5] == [100, 16, 16, 16, 16]
        # Gold is gone: whole steps.
        assert max(given) > 300
    else:
        assert given[:2] == [512, 388]
    metrics = receipt["metrics"]["ratelimit"]
    computed = sum(sum(step.values()) for step in served.trace.steps)
    assert metrics["ratelimit_paid_tokens"] + metrics["ratelimit_spare_tokens"] == computed


def test_types() -> None:
    """A helper of the tests is what the patch sees."""
    assert isinstance(bench().add("r", 1), Sized)
