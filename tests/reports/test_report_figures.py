"""The figures' numbers, against records small enough to count by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from reports import figures
from reports.view import RunView
from tests.reports.hostile import EVIL_TENANT


class _Table(RunView):
    """A view whose record tables are given."""

    frames: dict[str, pd.DataFrame]

    def table(self, arm: str, seed: int, table: str, columns: Any) -> pd.DataFrame | None:
        return self.frames[table][list(columns)]


def _view(requests: list[dict[str, Any]]) -> _Table:
    summary = {"arms": [{"name": "stock", "patches": [], "seeds": [0]}]}
    workload = {
        "tenants": [{"name": "a", "tier": "gold", "slo_ttft_ms": 200.0}],
        "phases": [{"number": 1, "name": "x", "start_ns": 0, "end_ns": 60 * 10**9, "measured": True}],
    }
    made = _Table(Path(), summary, {}, {("stock", 0): {"workload": workload}}, {})
    blank = {"tenant": "a", "tier": "gold", "measured": True, "status": "ok", "intended_ns": 0}
    object.__setattr__(made, "frames", {"requests": pd.DataFrame([{**blank, **r} for r in requests])})
    return made


def test_a_cdf_ends_at_the_share_that_was_served() -> None:
    ms = 1_000_000
    figure = figures.ttft_cdfs(
        _view(
            [
                {"first_token_ns": 10.0 * ms},
                {"first_token_ns": 20.0 * ms},
                {"first_token_ns": None, "status": "rejected"},
                {"first_token_ns": 5.0 * ms, "status": "failed"},  # no latency sample, but offered
                {"first_token_ns": None, "status": "cancelled"},  # censored: counts nowhere
                {"first_token_ns": 1.0 * ms, "measured": False},
            ]
        )
    )
    assert figure is not None
    (trace,) = figure["data"]
    assert (trace["x"], trace["y"]) == ([10.0, 20.0], [25.0, 50.0])
    assert figure["layout"]["shapes"][0]["x0"] == 200.0


def test_ttft_line_breaks_where_nobody_was_served_but_not_where_nobody_came() -> None:
    second = 1_000_000_000
    figure = figures.ttft_timeline(
        _view(
            [
                {"intended_ns": 0, "first_token_ns": 0.1 * second},
                {"intended_ns": 2 * second, "first_token_ns": None, "status": "rejected"},
                {"intended_ns": 5 * second, "first_token_ns": 5.3 * second},
            ]
        ),
        "stock",
        [0, 4],
    )
    assert figure is not None
    (trace,) = figure["data"]
    assert trace["x"] == [0.5, 2.5, 5.5]
    assert trace["y"] == [100.0, None, 300.0]


def test_a_slice_without_a_step_keeps_the_value_before_it() -> None:
    edges = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    binned = figures._binned(np.array([0.2, 0.4, 2.5]), np.array([3, 7, 1]), edges, "max")
    assert binned == [7.0, 7.0, 1.0, None]  # nothing is known after the last step


def test_timelines_are_binned_and_strict_json(view: RunView) -> None:
    load = figures.load_timeline(view)
    assert load is not None
    assert len(load["data"]) == 2 * len(view.arms)
    assert {len(t["x"]) for t in load["data"]} == {figures.STEP_BINS}
    json.dumps(load, allow_nan=False)


def test_series_differ_by_more_than_colour(view: RunView) -> None:
    arms = [(line["color"], line["dash"]) for line in figures.arm_lines(view).values()]
    assert len({dash for _, dash in arms}) == len(arms) == 3
    tenants = [(line["color"], line["dash"]) for line in figures.tenant_lines(view).values()]
    assert len(set(tenants)) == len(tenants) == 7


def test_names_are_escaped_for_plotly(view: RunView) -> None:
    figure = figures.ttft_timeline(view, "stock", [0, 5])
    assert figure is not None
    names = [trace["name"] for trace in figure["data"]]
    assert EVIL_TENANT not in names
    assert any(name.startswith("&lt;img") for name in names)


@pytest.mark.parametrize("arms", [1, 12])
def test_colours_suffice_for_any_number_of_arms(arms: int) -> None:
    summary = {"arms": [{"name": f"arm{i}", "patches": ["x"], "seeds": [0]} for i in range(arms)]}
    assert len(figures.arm_lines(RunView(Path(), summary, {}, {}, {}))) == arms
