"""Figures of the waiting queue: requests by level, and requests that gates hold by reason, over time.

Both come from the gauges that patches keep (`gauges.parquet`), so only arms with such patches have them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.schema import HELD
from reports.figures import (
    ARM_COLOURS,
    STEP_BINS,
    Figure,
    bin_edges,
    first_seed,
    phase_marks,
    rounded,
    time_axis,
)
from reports.view import RunView

Floats = npt.NDArray[np.float64]

REASONS_SHOWN = 6
OTHERS = "other reasons"
REASON_COLOURS = (*ARM_COLOURS[:REASONS_SHOWN], "#8a919b")
# From the level that is served first to the last.
LEVEL_COLOURS = ("#0f9d7a", "#3b8fd0", "#7c62d6", "#c4572c", "#8a919b")
_LEVEL = re.compile(r"_waiting_level_(\d+)")


def queue_figures(view: RunView) -> dict[str, Figure]:
    """`fig-level-<n>` and `fig-held-<n>` for the nth arm, first seed; those without data are left out."""
    by_arm = {}
    for i, arm in enumerate(view.arms):
        gauges = first_seed(view, arm.name, "gauges", ("t_ns", "patch", "gauge", "value"))
        if gauges is not None:
            by_arm[i] = gauges
    edges = bin_edges(view, STEP_BINS)
    levels = {i: _levels(gauges, edges) for i, gauges in by_arm.items()}
    held = {i: _held(gauges, edges) for i, gauges in by_arm.items()}
    return {
        **_figures(view, "fig-level", "waiting, by level", levels, LEVEL_COLOURS),
        **_figures(view, "fig-held", "held, by reason", held, REASON_COLOURS),
    }


def mean_in_bins(t_s: Floats, values: Floats, edges: Floats) -> Floats:
    """The mean over time in each bin of what is 0 at first and `values[i]` from `t_s[i]` on; times ascend."""
    until = np.append(t_s, max(float(t_s[-1]), float(edges[-1])))
    area = np.concatenate([[0.0], np.cumsum(values * np.diff(until))])
    mean: Floats = np.diff(np.interp(edges, until, area)) / np.diff(edges)
    return mean


def _levels(gauges: pd.DataFrame, edges: Floats) -> dict[str, Floats]:
    found: dict[tuple[str, int], Floats] = {}
    for (patch, gauge), rows in gauges.groupby(["patch", "gauge"], sort=True):
        level = _LEVEL.fullmatch(str(gauge).removeprefix(str(patch)))
        if level:
            found[str(patch), int(level[1])] = _over_time(rows, edges)
    several = len({patch for patch, _ in found}) > 1
    return {f"{patch} level {n}" if several else f"level {n}": found[patch, n] for patch, n in sorted(found)}


def _held(gauges: pd.DataFrame, edges: Floats) -> dict[str, Floats]:
    found = {}
    for (patch, gauge), rows in gauges[gauges["gauge"].str.startswith(HELD)].groupby(
        ["patch", "gauge"], sort=True
    ):
        found[f"{patch}: {str(gauge).removeprefix(HELD)}"] = _over_time(rows, edges)
    order = sorted(found, key=lambda name: (-float(found[name].sum()), name))
    shown = {name: found[name] for name in order[:REASONS_SHOWN]}
    rest = [found[name] for name in order[REASONS_SHOWN:]]
    return {**shown, OTHERS: np.sum(rest, axis=0)} if rest else shown


def _over_time(rows: pd.DataFrame, edges: Floats) -> Floats:
    values = rows["value"].fillna(0.0).to_numpy(np.float64)
    return mean_in_bins(rows["t_ns"].to_numpy(np.float64) / 1e9, values, edges)


def _figures(
    view: RunView,
    prefix: str,
    what: str,
    by_arm: Mapping[int, Mapping[str, Floats]],
    colours: tuple[str, ...],
) -> dict[str, Figure]:
    """One figure an arm, stacked, on one vertical scale."""
    filled = {i: series for i, series in by_arm.items() if any(y.any() for y in series.values())}
    top = max((float(np.sum(list(series.values()), axis=0).max()) for series in filled.values()), default=0.0)
    edges = bin_edges(view, STEP_BINS)
    middle = [rounded(float(x), 6) for x in (edges[:-1] + edges[1:]) / 2]
    shapes, notes = phase_marks(view)
    layout = {
        "height": 320,
        "hovermode": "x unified",
        "xaxis": time_axis(view),
        "yaxis": {"title": {"text": f"requests {what}"}, "range": [0, rounded(top * 1.04)]},
        "shapes": shapes,
        "annotations": notes,
    }
    return {
        f"{prefix}-{i}": {"data": _stacked(series, middle, colours), "layout": layout}
        for i, series in filled.items()
    }


def _stacked(
    series: Mapping[str, Floats], middle: list[float | None], colours: tuple[str, ...]
) -> list[dict[str, Any]]:
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "all",
            "name": escape(name, quote=False),
            "line": {"color": colour, "width": 1},
            "x": middle,
            "y": [rounded(float(y)) for y in values],
            "hovertemplate": "%{y:,.1f}",
        }
        for (name, values), colour in zip(series.items(), cycle(colours), strict=False)
    ]
