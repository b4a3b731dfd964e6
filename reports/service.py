"""Figures of fairness over time: what each tenant got for its weight in 5 s windows, and Jain's index beside it."""

from __future__ import annotations

from html import escape

import numpy as np

from harness.metrics.derive import chunks_of
from harness.metrics.fairness_windows import WINDOW_NS, Shares, shares_by_window
from harness.stats.blocks import Window
from reports.figures import (
    ARMS_SHOWN,
    Figure,
    arm_lines,
    first_seed,
    phase_marks,
    rounded,
    tenant_lines,
    time_axis,
)
from reports.view import RunView

_REQUESTS = (
    "tenant", "weight", "intended_ns", "scheduled_ns", "first_token_ns", "end_ns", "prompt_tokens", "cached_tokens",
)  # fmt: skip
_WINDOW_S = WINDOW_NS / 1e9
_DOT = 7


def service_figures(view: RunView) -> dict[str, Figure]:
    """`fig-fair-<n>` for the nth arm and `fig-jain` for all, first seed; those without data are left out."""
    found = {i: shares for i, arm in enumerate(view.arms) if (shares := _shares(view, arm.name)) is not None}
    top = max((float(s.service.max(initial=0.0)) for s in found.values()), default=0.0) / _WINDOW_S
    out = {f"fig-fair-{i}": _service(view, shares, top) for i, shares in found.items()}
    jain = _jain(view, {view.arms[i].name: shares for i, shares in found.items()})
    return out if jain is None else {**out, "fig-jain": jain}


def _shares(view: RunView, arm: str) -> Shares | None:
    requests = first_seed(view, arm, "requests", _REQUESTS)
    tokens = first_seed(view, arm, "tokens", ("request", "t_ns"))
    phases = [p for p in view.phases if "start_ns" in p]
    windows = [Window(int(p["number"]), int(p["start_ns"]), int(p["end_ns"])) for p in phases]
    if requests is None or tokens is None or requests.empty or not windows:
        return None
    number = {str(tenant["name"]): i for i, tenant in enumerate(view.tenants)}
    who = np.asarray(requests["tenant"].map(number), dtype=np.int64)
    shares = shares_by_window(requests, chunks_of(tokens), who, len(number), windows)
    return shares if len(shares.starts_ns) else None


def _middles(shares: Shares) -> list[float | None]:
    return [rounded(float(x), 6) for x in (shares.starts_ns + WINDOW_NS / 2) / 1e9]


def _service(view: RunView, shares: Shares, top: float) -> Figure:
    """A line a tenant; a dot where it was backlogged all through the window."""
    traces = []
    for tenant, (name, line) in enumerate(tenant_lines(view).items()):
        wanted = shares.backlogged[tenant]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": escape(name, quote=False),
                "line": line,
                "x": _middles(shares),
                "y": [rounded(float(y)) for y in shares.service[tenant] / _WINDOW_S],
                "marker": {"size": [_DOT if backlogged else 0 for backlogged in wanted], "opacity": 1},
                "text": ["backlogged" if backlogged else "" for backlogged in wanted],
                "hovertemplate": "%{y:,.0f} %{text}",
            }
        )
    shapes, notes = phase_marks(view)
    layout = {
        "height": 320,
        "hovermode": "x unified",
        "xaxis": time_axis(view),
        "yaxis": {"title": {"text": "tokens/s over weight"}, "range": [0, rounded(max(top, 1.0) * 1.04)]},
        "shapes": shapes,
        "annotations": notes,
    }
    return {"data": traces, "layout": layout}


def _jain(view: RunView, by_arm: dict[str, Shares]) -> Figure | None:
    """A line an arm over the windows with two backlogged tenants or more; None where no arm has such a window."""
    traces = []
    for nth, (arm, line) in enumerate(arm_lines(view).items()):
        if (shares := by_arm.get(arm)) is None:
            continue
        several = shares.backlogged.sum(axis=0) >= 2
        if not several.any():
            continue
        index = [rounded(shares.jain(i)) if contended else None for i, contended in enumerate(several)]
        trace = {
            "type": "scatter", "mode": "lines+markers", "name": escape(arm, quote=False), "line": line, "marker": {"size": 5},
            "x": _middles(shares), "y": index, "hovertemplate": "%{y:.3f}",
        }  # fmt: skip
        traces.append({**trace, "visible": "legendonly"} if nth >= ARMS_SHOWN else trace)
    if not traces:
        return None
    shapes, notes = phase_marks(view)
    layout = {
        "height": 300,
        "hovermode": "x unified",
        "xaxis": time_axis(view),
        "yaxis": {"title": {"text": "Jain's index"}, "range": [0, 1.04]},
        "shapes": shapes,
        "annotations": notes,
    }
    return {"data": traces, "layout": layout}
