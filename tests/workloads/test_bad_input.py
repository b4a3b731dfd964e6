"""What cannot be built is refused with a line that says what to type instead."""

from __future__ import annotations

from typing import Any

import pytest

from harness.errors import UserError
from workloads.five_phase import RatePlan, build, check_choice, parse_phases, phase_lines


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"phases": "9"}, "'9' is not a phase"),
        ({"phases": "0"}, "'0' is not a phase"),
        ({"phases": "2,"}, "'' is not a phase"),
        ({"phases": ""}, "'' is not a phase"),
        ({"phases": []}, "is not a phase"),
        ({"phases": "list"}, "bench workload --phase list"),
        ({"phases": "2-4"}, "several as in 2,4"),
        ({"mode": "pd"}, "--mode: pd is planned"),
        ({"mode": "spec"}, "--mode: spec is planned"),
        ({"mode": "fast"}, "no mode 'fast'"),
        ({"seed": -1}, "--seed: -1"),
        ({"rate_scale": 0.0}, "--rate-scale: 0"),
        ({"time_scale": float("nan")}, "--time-scale: nan"),
        ({"length_scale": -1.0}, "--length-scale: -1"),
        ({"slo_factor": float("inf")}, "--slo-factor: inf"),
        ({"length_scale": 1000.0}, "--length-scale: 1000"),
        ({"vocab_size": 12}, "at least 256"),
    ],
)
def test_refused(arguments: dict[str, Any], said: str) -> None:
    usual: dict[str, Any] = {"seed": 0, "phases": "1", "rate_scale": 0.05}
    with pytest.raises(UserError) as caught:
        build(**(usual | arguments))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("factors", [(1.0,), (1, 1, 1, 1, -1), (1, 1, 1, 1, float("nan"))])
def test_rate_plans_need_five_factors(factors: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match="5 factors"):
        RatePlan(factors)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("all", (1, 2, 3, 4, 5)), ("3", (3,)), ("4, 2", (2, 4)), ("2,2", (2,)), (5, (5,)), ([1, 3], (1, 3))],
)
def test_phases_that_are_understood(text: Any, numbers: tuple[int, ...]) -> None:
    assert parse_phases(text) == numbers
    assert check_choice(text, "single") == numbers


def test_the_list_of_phases_fits_a_terminal() -> None:
    lines = phase_lines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[1:6]] == ["1", "2", "3", "4", "5"]
    assert "32" in lines[3]
