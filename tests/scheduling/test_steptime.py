"""Guards what the capacity patches learn: step times, claims of waiting prompts, the forecast of KV blocks.

Plain objects. Not here: what the patches make of it (test_ratelimit, test_watermark, fixes/test_prefillbudget).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patches.scheduling.claims import Claims
from patches.scheduling.kvforecast import Demand, OutputLengths, peak_blocks
from patches.scheduling.steptime import StepBudget, StepKnobs, StepTime, prefill_tokens

FAST = settings(max_examples=100, deadline=None, derandomize=True)


# step times


@FAST
@given(
    rest_ms=st.floats(5, 60),
    token_us=st.floats(5, 200),
    drift=st.floats(-0.2, 0.2),
    sizes=st.lists(st.integers(0, 2048), min_size=30, max_size=60).filter(lambda s: max(s) - min(s) > 200),
)
def test_rest_and_price_are_found_while_the_load_drifts(
    rest_ms: float, token_us: float, drift: float, sizes: list[int]
) -> None:
    """A fit of time over tokens alone would take the drift for a price."""
    steps = StepTime()
    rest_s = rest_ms / 1e3
    for tokens in sizes * 4:
        rest_s *= 1 + drift / len(sizes)
        steps.note(tokens, rest_s + token_us / 1e6 * tokens)
    assert steps.token_s == pytest.approx(token_us / 1e6, rel=0.15)
    assert steps.rest_s == pytest.approx(rest_s, rel=0.25, abs=0.15 * token_us / 1e6 * max(sizes))


def test_a_constant_size_tells_no_price_and_one_bad_step_no_lie() -> None:
    steps = StepTime()
    for _ in range(10):
        steps.note(300, 0.03)
    assert steps.token_s == 0.0
    assert steps.tokens_within(0.05, 256) == 256
    for tokens in (0, 300) * 20:
        steps.note(tokens, 0.02 + 1e-4 * tokens)
    before = steps.token_s
    steps.note(0, 30.0)
    steps.note(300, 0.05)
    assert steps.token_s == pytest.approx(before, rel=0.5)
    assert steps.rest_s < 0.1


def _output(**tokens: int) -> Any:
    return SimpleNamespace(num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()))


def test_a_step_runs_from_the_end_of_the_one_before_it() -> None:
    """Scheduled ahead, as async scheduling does; a pass without tokens is no step; a lost output does no harm."""
    steps = StepTime()
    noted: list[tuple[int, float]] = []
    steps.note = lambda tokens, took_s: noted.append((tokens, round(took_s, 6)))  # type: ignore[method-assign]
    first, second, lost, third = _output(a=1, b=100), _output(a=1), _output(a=7), _output(a=1, c=50)
    steps.on_schedule(first, 0.0)
    steps.on_schedule(second, 0.001)
    steps.on_schedule(_output(), 0.002)
    steps.on_update(first, 0.030)
    steps.on_schedule(lost, 0.031)
    steps.on_update(second, 0.040)
    steps.on_schedule(third, 0.100)
    steps.on_update(third, 0.125)
    assert noted == [(100, 0.03), (0, 0.01), (50, 0.025)]
    assert prefill_tokens({"a": 3, "b": 4}, 3) == 4


def test_the_target_is_a_part_of_the_tightest_deadline_of_late() -> None:
    budget = StepBudget(
        StepKnobs.model_validate(
            {"steps_per_slo_ratio": 5, "target_step_ms": 80, "step_stretch_factor": 3, "first_tokens": 256}
        )
    )
    assert budget.target_s(0.0) == 0.08
    assert budget.tokens(0.0) == 256
    budget.protect(0.5, 0.0)
    budget.protect(0.2, 1.0)
    assert budget.target_s(2.0) == pytest.approx(0.04)
    assert budget.target_s(31.5) == 0.08
    for tokens in (0, 100) * 40:
        budget.steps.note(tokens, 0.010 + 1e-4 * tokens)
    # Three times what decodes alone take.
    assert budget.target_s(31.5) == pytest.approx(0.03, rel=0.05)
    assert budget.tokens(31.5) == pytest.approx(200, rel=0.1)


# claims


EVENTS = st.lists(
    st.tuples(st.sampled_from(["join", "admit", "leave", "end"]), st.integers(0, 7), st.integers(0, 2)),
    max_size=60,
)


@FAST
@given(events=EVENTS)
def test_claims_follow_who_waits(events: list[tuple[str, int, int]]) -> None:
    """Against a model: sums by class, and nothing at all once a pass moved nobody."""
    claims, model, moved, moving = Claims(), {}, 0, True
    for what, number, rank in events:
        name = f"r{number}"
        if what == "join" and name not in model:
            claims.join(SimpleNamespace(request_id=name, num_tokens=100 + number), (rank,))
            model[name] = (rank, 100 + number)
            moving = True
        elif what == "admit":
            moved += name in model
            claims.admit(name, 0)
            model.pop(name, None)
        elif what == "leave":
            assert claims.leave(name) == (model.pop(name, None) is not None)
        elif what == "end":
            claims.end_pass()
            moving, moved = moved > 0 or not model, 0
        assert len(claims) == len(model)
        for bound in range(4):
            better = [tokens for r, tokens in model.values() if r < bound]
            assert claims.wanted((bound,)) == (sum(better) if moving else 0)
            assert claims.waits((bound,)) == (moving and bool(better))


def test_what_the_cache_held_is_learned() -> None:
    claims = Claims()
    for number in range(300):
        claims.join(SimpleNamespace(request_id=str(number), num_tokens=400))
        claims.admit(str(number), 300)
    claims.join(SimpleNamespace(request_id="next", num_tokens=1000))
    assert claims.wanted() == pytest.approx(250, abs=5)


# the forecast


@FAST
@given(
    demands=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 10), st.integers(0, 60)), min_size=1, max_size=12
    )
)
def test_the_peak_is_that_of_a_simulation(demands: list[tuple[int, int, int]]) -> None:
    """Block by block: each grows by a token a step and gives all back when it ends. Blocks of one token."""
    peak = peak_blocks([Demand(held, prompt, left) for held, prompt, left in demands], 1)
    seen = max(
        sum(held + prompt + step for held, prompt, left in demands if left >= step)
        for step in range(61)
        if any(left >= step for *_, left in demands)
    )
    assert peak == seen


def test_what_is_left_of_an_answer() -> None:
    lengths = OutputLengths(first_tokens=100)
    assert lengths.left("a", 30) == 70
    for tokens in (200, 400):
        lengths.finished("a", tokens)
    assert lengths.left("a", 100) == pytest.approx(200)
    assert lengths.left("a", 5000) == pytest.approx(75)
    assert lengths.left("b", 0) == 100
    for _ in range(300):
        lengths.finished("a", 50)
    assert lengths.left("a", 0) == pytest.approx(50, rel=0.02)


def test_beside_overload_control_steps_may_be_longer() -> None:
    knobs = StepKnobs.model_validate({"steps_per_slo_ratio": 6, "steps_per_slo_beside_overload_ratio": 3})
    targets = []
    for beside in (False, True):
        budget = StepBudget(knobs, beside)
        budget.protect(0.24, 0.0)
        targets.append(budget.target_s(0.0))
    assert targets == pytest.approx([0.04, 0.08])
