"""Guards `scripts/scheduling_bounds.py`: its arithmetic on cases worked by hand or tried out one by one.

Not here: whether the bounds are tight (no scheduler is known that reaches them).
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UserError
from harness.plan import WorkloadChoice
from scripts.bounds.figures import most_served, ttft_p99_s
from scripts.bounds.line import beyond, burst_limit_s, busy_periods, fewest_late, least_limit, percentile
from scripts.bounds.records import Seed, check_whole
from scripts.bounds.seats import seat_waits_s
from scripts.bounds.shares import max_min, water_fill, whole_jain
from scripts.bounds.waits import done_over_time, wait_ms

FAST = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def test_a_request_waits_for_the_rest_of_a_step_for_the_next_and_for_its_own() -> None:
    """Steps of 40 ms; 10 ms of decodes and 0.1 ms a token of 100: 0.99 * 40 + 40 + 20."""
    found = ttft_p99_s(0.040, 0.010, 1e-4, np.full(50, 100.0), 1)
    assert found == pytest.approx(0.0396 + 0.040 + 0.020, abs=3e-4)
    assert ttft_p99_s(0.040, 0.010, 1e-4, np.full(50, 100.0), 0) == pytest.approx(found - 0.040)


# shares


def test_water_finds_its_level() -> None:
    """Weights 1, 1, 2 at levels 5, 0, 1: three units raise the last two to 5 / 3, whatever the order."""
    got = water_fill(np.array([5.0, 0.0, 1.0]), np.array([1.0, 1.0, 2.0]), 3.0)
    assert got == pytest.approx([5.0, 5 / 3, 5 / 3])
    assert water_fill(np.array([5.0, 0.0, 1.0]), np.array([1.0, 1.0, 2.0]), 20.0) == pytest.approx([6.75] * 3)
    assert water_fill(np.array([1.0, 2.0]), np.ones(2), 0.0) == pytest.approx([1.0, 2.0])


def test_a_whole_prompt_is_one_tenants() -> None:
    """3 and 1 for two: as equal as 3 to 1 if whole, 2 to 2 if the one can be parted; three alike leave 2 to 1."""
    even = np.zeros(2), np.ones(2)
    assert whole_jain(*even, np.array([3.0, 1.0]), 0.0) == pytest.approx(16 / (2 * 10))
    assert whole_jain(*even, np.array([3.0]), 1.0) == pytest.approx(16 / (2 * 10))
    assert whole_jain(*even, np.ones(3), 0.0) == pytest.approx(9 / (2 * 5))
    assert whole_jain(*even, np.array([2.0]), 2.0) == pytest.approx(1.0)
    # With weights 2 and 1 the larger goes to the heavier.
    assert whole_jain(np.zeros(2), np.array([2.0, 1.0]), np.array([2.0, 4.0]), 0.0) == pytest.approx(1.0)
    # Beyond what can be tried the smallest count as divisible.
    assert whole_jain(*even, np.ones(13), 0.0) == pytest.approx(1.0)


def test_shares_go_to_those_who_want_them() -> None:
    """100 for weights 4, 2, 1, 1: two want less than that; of the other 85 each part of five is 17."""
    got = max_min(np.array([200.0, 10.0, 5.0, 80.0]), np.array([4.0, 2.0, 1.0, 1.0]), 100.0)
    assert got == pytest.approx([68.0, 10.0, 5.0, 17.0])


def test_the_cheapest_are_served_first() -> None:
    assert most_served(np.array([4.0, 1.0, 2.0]), 5.0) == pytest.approx(2.5)
    assert most_served(np.array([4.0, 1.0]), 50.0) == 2


# lines

JOB = st.tuples(st.integers(1, 9), st.integers(1, 20), st.booleans())


@FAST
@given(jobs=st.lists(JOB, min_size=1, max_size=7))
def test_the_fewest_late_are_the_fewest_of_all_choices(jobs: list[tuple[int, int, bool]]) -> None:
    """One unit of work a second; those that must be in time have room (as they had in the run)."""
    work, due, free = (np.array(column) for column in zip(*jobs, strict=True))
    due = due.astype(float)
    # By themselves those that may not be late fit.
    fixed = np.flatnonzero(~free)
    fixed = fixed[np.argsort(due[fixed], kind="stable")]
    due[fixed] = np.maximum(due[fixed], work[fixed].cumsum())

    def fits(late: tuple[int, ...]) -> bool:
        kept = np.array([i for i in range(len(jobs)) if i not in late], dtype=int)
        order = kept[np.argsort(due[kept], kind="stable")]
        return bool((work[order].cumsum() <= due[order] + 1e-9).all())

    fewest = min(
        n
        for n in range(int(free.sum()) + 1)
        if any(fits(late) for late in itertools.combinations(np.flatnonzero(free), n))
    )
    assert fewest_late(due, work.astype(float), due, free.astype(bool)) == fewest


def test_how_many_lie_beyond_a_percentile_and_the_least_limit() -> None:
    values = np.arange(1, 251).astype(np.float64)
    assert (values > percentile(values, 99)).sum() == beyond(250) == 2
    assert beyond(1) == beyond(0) == 0
    assert least_limit(lambda limit: 10 - limit, 3.0, 20.0) == pytest.approx(7.0, abs=0.05)


def test_a_burst_waits_for_itself() -> None:
    """Three that need 1 s each come at once, and one by itself: all of them in 3 s, or all but one in 2."""
    arrival, work = np.array([0.0, 0.0, 0.0, 10.0]), np.ones(4)
    periods = busy_periods(arrival, work)
    assert periods == [slice(0, 3), slice(3, 4)]
    bursts = [(arrival[part], work[part]) for part in periods]
    before = np.array([0.5])
    assert burst_limit_s(bursts, before, 0) == pytest.approx(3.5, abs=0.03)
    assert burst_limit_s(bursts, before, 1) == pytest.approx(2.5, abs=0.03)
    assert busy_periods(np.array([]), np.array([])) == []


def line_of(order: list[int]) -> Seed:
    """Four documents that come at once, 1 s of prefill each, then 2 s of answer; served in this order. 2 s are promised."""
    first = np.empty(4)
    first[order] = [1.0, 2.0, 3.0, 4.0]
    requests = pd.DataFrame(
        {
            "phase": 4,
            "tier": "bronze",
            "intended_ns": 0.0,
            "scheduled_ns": (first - 1.0) * 1e9,
            "first_token_ns": first * 1e9,
            "prompt_tokens": 1000.0,
            "cached_tokens": 0.0,
            "slo_ttft_ms": [0.5, 0.5, 1000.0, 2000.0],
            "ttft_ms": first * 1e3,
            "e2e_ms": first * 1e3 + 2e3,
        }
    )
    requests["met"] = (requests["ttft_ms"] <= requests["slo_ttft_ms"]).astype(float)
    return Seed(requests, pd.DataFrame(), pd.DataFrame())


def test_no_order_makes_a_line_shorter() -> None:
    """The last of four has 4 s, and 6 with its answer, whoever it is; in time are the two that went first."""
    wait = wait_ms([line_of([2, 3, 0, 1])], 4, "e2e_ms", "bronze")
    assert wait is not None
    assert (wait.found, wait.kept_share) == (6000.0, 0.5)
    assert wait.promised == pytest.approx(6000, abs=15)
    assert wait.any_order == pytest.approx(6000, abs=15)
    assert wait_ms([line_of([0, 1, 2, 3])], 3, "e2e_ms", "bronze") is None


def test_promises_that_are_kept_make_others_wait() -> None:
    """Two come early and two that are owed 1 s and 2 s just before the others' turn: these then wait for them too."""
    seed = line_of([2, 3, 0, 1])
    seed.requests["intended_ns"] = [-2e9, -2e9, 0.0, 0.0]
    for metric in ("ttft_ms", "e2e_ms"):
        seed.requests[metric] -= seed.requests["intended_ns"] / 1e6
    wait = wait_ms([seed], 4, "ttft_ms")
    assert wait is not None
    assert wait.found == 6000
    assert wait.promised == pytest.approx(6000, abs=15)
    # In order of arrival all of them wait for 4 s.
    assert wait.any_order == pytest.approx(4000, abs=15)


def test_work_is_done_evenly_from_begin_to_end() -> None:
    at, done = done_over_time(np.array([0.0, 1.0]), np.array([2.0, 3.0]), np.array([4.0, 2.0]))
    assert np.interp([0.0, 1.0, 2.0, 3.0, 9.0], at, done) == pytest.approx([0.0, 2.0, 5.0, 6.0, 6.0])


def test_a_seat_is_waited_for_in_order() -> None:
    """Two seats, held for 5 s: of four that come a second apart the third and fourth wait for 3 s."""
    assert seat_waits_s(np.arange(4).astype(np.float64), np.full(4, 5.0), 2) == pytest.approx(
        [0.0, 0.0, 3.0, 3.0]
    )


def test_bounds_of_whole_phases_are_given_for_no_other_run() -> None:
    check_whole(Path("run"), WorkloadChoice())
    for other in (WorkloadChoice(phases="4"), WorkloadChoice(time_scale=0.5)):
        with pytest.raises(UserError, match="run it with --phase all"):
            check_whole(Path("run"), other)
