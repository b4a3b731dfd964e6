"""Figures of the prefix cache: hit rate over time beside its bounds, what became of look-ups, reuse distances."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.cache_view import OUTCOMES
from reports.cache import Watched, watched
from reports.figures import (
    Figure,
    arm_lines,
    bin_edges,
    first_seed,
    phase_marks,
    rounded,
    tenant_lines,
    time_axis,
)
from reports.view import Arm, RunView

Floats = npt.NDArray[np.float64]

HIT_BINS = 30
_COLOURS = {
    "device": "#0f9d7a",
    "below": "#57c3a6",
    "evicted": "#c4572c",
    "cut": "#e39a6d",
    "unlanded": "#c9871f",
    "other_salt": "#7c62d6",
    "never": "#8a919b",
}
_BOUND_LINES = (
    ("clairvoyant", "clairvoyant, as served", {"color": "#3b8fd0", "dash": "dash", "width": 2}),
    ("infinite", "infinite cache", {"color": "#8a919b", "dash": "dot", "width": 2}),
)


def cache_figures(view: RunView) -> dict[str, Figure]:
    """`fig-hits-<n>` of the nth arm, `fig-lookups-<n>` where `cachedash` was on, `fig-reuse`; only those with data."""
    made: dict[str, Figure | None] = {}
    for i, arm in enumerate(view.arms):
        made[f"fig-hits-{i}"] = _hits(view, arm)
        made[f"fig-lookups-{i}"] = _lookups(view, arm)
    made["fig-reuse"] = _reuse(view, watched(view))
    return {name: figure for name, figure in made.items() if figure is not None}


def _hits(view: RunView, arm: Arm) -> Figure | None:
    """Hit rate by tenant over the time of first admission, first seed, with the arm's bounds by phase."""
    columns = ("tenant", "measured", "scheduled_ns", "prompt_tokens", "cached_tokens")
    requests = first_seed(view, arm.name, "requests", columns)
    if requests is None:
        return None
    seen = requests[requests["measured"] & requests["cached_tokens"].notna()]
    if seen.empty:
        return None
    edges = bin_edges(view, HIT_BINS)
    middle = [rounded(float(x), 6) for x in (edges[:-1] + edges[1:]) / 2]
    where = np.digitize(seen["scheduled_ns"].to_numpy(float) / 1e9, edges) - 1
    traces = []
    for tenant, line in tenant_lines(view).items():
        rate = _rate_in_bins(seen, where, (seen["tenant"] == tenant).to_numpy())
        traces.append(_line(tenant, middle, rate, line))
    everybody = _rate_in_bins(seen, where, np.ones(len(seen), bool))
    traces.append(_line("all", middle, everybody, {"color": "#56606d", "width": 3}))
    told = arm.raw.get("cache_bounds") or {}
    for bound, name, line in _BOUND_LINES:
        x, y = _by_phase(view, told.get("by_phase", {}), bound)
        if x:
            traces.append({**_line(name, [], [], line), "x": x, "y": y})
    return {"data": traces, "layout": _layout(view, "prompt tokens found, %")}


def _rate_in_bins(seen: pd.DataFrame, where: Any, mine: npt.NDArray[np.bool_]) -> list[float | None]:
    inside = mine & (where >= 0) & (where < HIT_BINS)
    asked, found = (
        np.bincount(where[inside], seen[name].to_numpy(float)[inside], minlength=HIT_BINS)
        for name in ("prompt_tokens", "cached_tokens")
    )
    return [rounded(100 * f / a) if a else None for f, a in zip(found, asked, strict=True)]


def _by_phase(view: RunView, told: Any, rate: str) -> tuple[list[float | None], list[float | None]]:
    """A step line over the phases; it breaks between them."""
    x: list[float | None] = []
    y: list[float | None] = []
    for phase in view.phases:
        of_phase = told.get(str(phase["number"]))
        if of_phase is not None and "start_ns" in phase:
            x += [phase["start_ns"] / 1e9, phase["end_ns"] / 1e9, None]
            y += [rounded(100 * float(of_phase[rate]))] * 2 + [None]
    return x, y


def _lookups(view: RunView, arm: Arm) -> Figure | None:
    """Blocks asked for by what came of it, stacked to 100%, over time; first seed."""
    table = first_seed(view, arm.name, "cache", ("t_ns", "measure", "kind", "value"))
    if table is None:
        return None
    table = table[table["measure"].isin(["found_blocks", "missed_blocks"])]
    if table.empty:
        return None
    edges = bin_edges(view, HIT_BINS)
    # A window's counts belong to the time before its end.
    where = np.digitize(table["t_ns"].to_numpy(float) / 1e9, edges, right=True) - 1
    inside = (where >= 0) & (where < HIT_BINS)
    whole = np.bincount(where[inside], table["value"].to_numpy(float)[inside], minlength=HIT_BINS)
    middle = [rounded(float(x), 6) for x in (edges[:-1] + edges[1:]) / 2]
    traces = []
    for kind, means in OUTCOMES.items():
        mine = inside & (table["kind"] == kind).to_numpy()
        part = np.bincount(where[mine], table["value"].to_numpy(float)[mine], minlength=HIT_BINS)
        if part.any():
            share = np.divide(100 * part, whole, out=np.zeros(HIT_BINS), where=whole > 0)
            traces.append(
                {
                    "type": "bar",
                    "name": means,
                    "x": middle,
                    "y": [rounded(float(y)) for y in share],
                    "marker": {"color": _COLOURS[kind]},
                    "hovertemplate": "%{y:.1f}%",
                }
            )
    if not traces:
        return None
    layout = {**_layout(view, "blocks asked for, %"), "barmode": "stack", "bargap": 0}
    return {"data": traces, "layout": layout}


def _reuse(view: RunView, seen: tuple[Watched, ...]) -> Figure | None:
    """Share of reuse within N other blocks, a line an arm, all seeds."""
    lines = arm_lines(view)
    traces = []
    for one in seen:
        reuse = one.view.reuse()
        total = sum(reuse.values())
        if not total:
            continue
        upto = np.cumsum(list(reuse.values())) / total
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": escape(one.arm, quote=False),
                "line": lines[one.arm],
                "x": list(reuse),
                "y": [rounded(100 * float(y)) for y in upto],
                "hovertemplate": "%{y:.1f}% within %{x:,} blocks",
            }
        )
    if not traces:
        return None
    sizes = {int(told["blocks"]) for arm in view.arms if (told := arm.raw.get("cache_bounds"))}
    layout: dict[str, Any] = {
        "height": 330,
        "hovermode": "closest",
        "xaxis": {"title": {"text": "other blocks asked for in between"}, "type": "log", "dtick": 1},
        "yaxis": {"title": {"text": "reused blocks, %"}, "range": [0, 102]},
        "shapes": [
            {
                "type": "line",
                "xref": "x",
                "yref": "paper",
                "x0": size,
                "x1": size,
                "y0": 0,
                "y1": 1,
                "line": {"width": 1, "dash": "dashdot", "color": "#8a919b"},
            }
            for size in sorted(sizes)
        ],
    }
    return {"data": traces, "layout": layout}


def _line(name: str, x: Any, y: Any, line: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": escape(name, quote=False),
        "line": line,
        "x": x,
        "y": y,
        "hovertemplate": "%{y:.1f}%",
    }


def _layout(view: RunView, title: str) -> dict[str, Any]:
    shapes, notes = phase_marks(view)
    return {
        "height": 340,
        "hovermode": "x unified",
        "xaxis": time_axis(view),
        "yaxis": {"title": {"text": title}, "range": [0, 102]},
        "shapes": shapes,
        "annotations": notes,
    }
