"""Guards the running rate of the scheduling patches: exact for what is constant, forgetful, and it loses nothing.

Plain arithmetic. Not here: who uses it (test_qos_ageing).
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patches.scheduling.rates import Rate

FAST = settings(max_examples=60, deadline=None, derandomize=True)


@FAST
@given(
    amount=st.integers(1, 5000),
    every_s=st.floats(0.001, 2),
    horizon_s=st.floats(0.5, 20),
    count=st.integers(1, 200),
)
def test_something_constant_is_met_exactly_from_the_first_interval(
    amount: int, every_s: float, horizon_s: float, count: int
) -> None:
    rate = Rate(horizon_s)
    assert rate.per_s == 0.0
    for number in range(count + 1):
        rate.add(amount, number * every_s)
        if number:
            assert rate.per_s == pytest.approx(amount / every_s, rel=1e-6)


def test_it_follows_a_change_within_some_horizons_and_forgets() -> None:
    rate = Rate(horizon_s=2.0)
    now = 0.0
    for _ in range(4000):
        rate.add(5, now)
        now += 0.01
    assert rate.per_s == pytest.approx(500)
    for _ in range(200):
        rate.add(0, now)
        now += 0.01
    assert rate.per_s == pytest.approx(500 / math.e, rel=0.02)
    for _ in range(2000):
        rate.add(1, now)
        now += 0.01
    assert rate.per_s == pytest.approx(100, rel=0.02)


@FAST
@given(steps=st.lists(st.tuples(st.integers(0, 500), st.sampled_from([0.0, 0.0, 0.1, 3.0])), min_size=1))
def test_nothing_is_lost_or_counted_twice(steps: list[tuple[int, float]]) -> None:
    """Over a horizon that forgets nothing it is the mean; what comes at one instant counts by the next."""
    rate = Rate(horizon_s=1e9)
    rate.add(999, 5.0)
    now = 5.0
    for amount, wait_s in steps:
        now += wait_s
        rate.add(amount, now)
    rate.add(0, now + 1.0)
    assert rate.per_s == pytest.approx(sum(amount for amount, _ in steps) / (now + 1.0 - 5.0), rel=1e-6)


def test_after_an_idle_time_it_is_that_of_the_last_seconds() -> None:
    """One horizon of 1,000/s after a long pause weighs 1 - 1/e."""
    rate = Rate(horizon_s=5.0)
    rate.add(0, 0.0)
    rate.add(0, 1000.0)
    for step in range(1, 501):
        rate.add(10, 1000.0 + step * 0.01)
    assert rate.per_s == pytest.approx(1000 * (1 - 1 / math.e), rel=0.05)
