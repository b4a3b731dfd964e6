"""Figures of deadline slack: how much of its promised TTFT each offered request had left, by tier."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.metrics.derive import Chunks, request_figures
from reports.figures import ARMS_SHOWN, Figure, arm_lines, rounded
from reports.view import RunView

Floats = npt.NDArray[np.float64]

# In shares of the promise, from worst to best: below 0 it was late. The last bin holds its upper end.
EDGES = (-np.inf, -4.0, -2.0, -1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
LABELS = (
    "never served", "over 400% late", "200–400% late", "100–200% late", "50–100% late", "25–50% late", "0–25% late",
    "0–25% left", "25–50% left", "50–75% left", "75–90% left", "90–100% left",
)  # fmt: skip
_FIRST_IN_TIME = 7
_COLUMNS = (
    "tier", "measured", "slo_ttft_ms", "status", "intended_ns", "sent_ns", "scheduled_ns", "first_token_ns",
    "first_output_ns", "last_token_ns", "end_ns", "cancel_ns", "output_tokens", "first_chunk_tokens",
)  # fmt: skip
_NO_CHUNKS = Chunks(*(np.zeros(0, np.int64) for _ in range(3)))
# Beside their colours, so that bars of the two baselines are told apart without.
_PATTERNS = {"dash": "/", "dot": "."}


def slack_figures(view: RunView) -> dict[str, Figure]:
    """`fig-slack-<n>` for the nth tier, all seeds; those without data are left out."""
    tiers = list(dict.fromkeys(str(tenant.get("tier", "")) for tenant in view.tenants))
    by_arm = {arm.name: found for arm in view.arms if (found := _requests(view, arm.name)) is not None}
    made = {f"fig-slack-{i}": _figure(view, tier, by_arm) for i, tier in enumerate(tiers)}
    return {name: figure for name, figure in made.items() if figure is not None}


def shares(requests: pd.DataFrame) -> Floats:
    """Percent of the offered requests in each bin of `LABELS`.

    A request that was never served is in the first bin; one that its client cancelled before the first token
    has no slack and counts nowhere.
    """
    figures = request_figures(requests, _NO_CHUNKS)
    offered = figures["censored"] == 0
    left = 1 - figures["ttft_ms"][offered] / requests["slo_ttft_ms"].to_numpy(np.float64)[offered]
    served = left[~np.isnan(left)]
    # A TTFT of exactly the promise was in time, as in the metrics: such a bin holds its lower end.
    place = np.minimum(np.searchsorted(EDGES, served, side="right"), len(EDGES) - 1)
    counts = np.bincount(place, minlength=len(LABELS)).astype(np.float64)
    counts[0] = len(left) - len(served)
    total: Floats = 100 * counts / max(len(left), 1)
    return total


def _requests(view: RunView, arm: str) -> pd.DataFrame | None:
    found = view.arm(arm)
    tables = [view.table(arm, seed, "requests", _COLUMNS) for seed in found.seeds] if found else []
    there = [table[table["measured"]] for table in tables if table is not None]
    return pd.concat(there, ignore_index=True) if there else None


def _figure(view: RunView, tier: str, by_arm: dict[str, pd.DataFrame]) -> Figure | None:
    traces: list[dict[str, Any]] = []
    for nth, (arm, line) in enumerate(arm_lines(view).items()):
        requests = by_arm.get(arm)
        part = None if requests is None else requests[requests["tier"] == tier]
        if part is None or part.empty:
            continue
        pattern = {"shape": _PATTERNS.get(line["dash"], ""), "fillmode": "replace"}
        trace = {
            "type": "bar", "name": escape(arm, quote=False), "x": list(LABELS), "y": [rounded(float(y)) for y in shares(part)],
            "marker": {"color": line["color"], "pattern": pattern}, "hovertemplate": "%{y:.1f}%",
        }  # fmt: skip
        traces.append({**trace, "visible": "legendonly"} if nth >= ARMS_SHOWN else trace)
    if not traces:
        return None
    line = {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 1, "dash": "dashdot", "color": "#8a919b"}}  # fmt: skip
    border = _FIRST_IN_TIME - 0.5
    note = {"xref": "paper", "yref": "paper", "x": 0, "y": 1, "yanchor": "bottom", "showarrow": False, "font": {"size": 13}}  # fmt: skip
    layout = {
        "height": 380,
        "barmode": "group",
        "hovermode": "x unified",
        "xaxis": {"tickangle": -55, "automargin": True},
        "yaxis": {"title": {"text": "offered requests, %"}, "rangemode": "tozero"},
        "shapes": [{**line, "x0": border, "x1": border}],
        "annotations": [{**note, "text": escape(tier, quote=False)}],
    }
    return {"data": traces, "layout": layout}
