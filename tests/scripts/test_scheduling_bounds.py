"""Guards `scripts/scheduling_bounds.py`: its arithmetic on cases worked by hand, and one run end to end.

Not here: whether the bounds are tight (no scheduler is known that reaches them).
"""

from __future__ import annotations

import numpy as np
import pytest

from scripts.scheduling_bounds import max_min, most_served, ttft_p99_s, water_fill


def test_a_request_waits_for_the_rest_of_a_step_for_the_next_and_for_its_own() -> None:
    """Steps of 40 ms; 10 ms of decodes and 0.1 ms a token of 100: 0.99 * 40 + 40 + 20."""
    found = ttft_p99_s(0.040, 0.010, 1e-4, np.full(50, 100.0), 1)
    assert found == pytest.approx(0.0396 + 0.040 + 0.020, abs=3e-4)
    assert ttft_p99_s(0.040, 0.010, 1e-4, np.full(50, 100.0), 0) == pytest.approx(found - 0.040)


def test_water_finds_its_level() -> None:
    """Weights 1, 1, 2 at levels 5, 0, 1: three units raise the last two to 5 / 3, whatever the order."""
    got = water_fill(np.array([5.0, 0.0, 1.0]), np.array([1.0, 1.0, 2.0]), 3.0)
    assert got == pytest.approx([5.0, 5 / 3, 5 / 3])
    assert water_fill(np.array([5.0, 0.0, 1.0]), np.array([1.0, 1.0, 2.0]), 20.0) == pytest.approx([6.75] * 3)
    assert water_fill(np.array([1.0, 2.0]), np.ones(2), 0.0) == pytest.approx([1.0, 2.0])


def test_shares_go_to_those_who_want_them() -> None:
    """100 for weights 4, 2, 1, 1: two want less than that; of the other 85 each part of five is 17."""
    got = max_min(np.array([200.0, 10.0, 5.0, 80.0]), np.array([4.0, 2.0, 1.0, 1.0]), 100.0)
    assert got == pytest.approx([68.0, 10.0, 5.0, 17.0])


def test_the_cheapest_are_served_first() -> None:
    assert most_served(np.array([4.0, 1.0, 2.0]), 5.0) == pytest.approx(2.5)
    assert most_served(np.array([4.0, 1.0]), 50.0) == 2
