"""The plotly figures, as plain JSON: timelines of queue, KV use and TTFT, and CDFs of TTFT.

Nothing here knows of colours for light or dark pages: the page sets those. Every series is
binned or reduced to quantiles, so a figure's size does not grow with the run. plotly reads names as
markup, so every text that comes from the records is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd

from reports.view import RunView

Figure = dict[str, Any]

STEP_BINS = 400
TTFT_BINS = 60
CDF_POINTS = 160
ARMS_SHOWN = 5
BASELINE_LINES = {"stock": ("#8a919b", "dot"), "tuned": ("#c9871f", "dash")}
ARM_COLOURS = ("#0f9d7a", "#7c62d6", "#3b8fd0", "#d2578f", "#8f9d1c", "#c4572c")
TIER_COLOURS = {
    "gold": ("#d99a00", "#a86f00"),
    "silver": ("#4aa3df", "#1f77b4", "#7f9fc0"),
    "bronze": ("#b5476b", "#7d3c98"),
}
DASHES = ("solid", "dash", "dot")


def arm_lines(view: RunView) -> dict[str, dict[str, Any]]:
    """A line style for each arm: colour, dash and width differ, so colour is never the only cue."""
    colours = cycle(ARM_COLOURS)
    lines = {}
    for arm in view.arms:
        colour, dash = BASELINE_LINES.get(arm.name) or (next(colours), "solid")
        lines[arm.name] = {"color": colour, "dash": dash, "width": 1.6 if arm.name in BASELINE_LINES else 2.2}
    return lines


def tenant_lines(view: RunView) -> dict[str, dict[str, Any]]:
    """A line style for each tenant: hue by tier, shade and dash within it."""
    seen: dict[str, int] = {}
    lines = {}
    for tenant in view.tenants:
        tier = str(tenant.get("tier", ""))
        nth = seen.get(tier, 0)
        seen[tier] = nth + 1
        colours = TIER_COLOURS.get(tier, ARM_COLOURS)
        lines[str(tenant["name"])] = {
            "color": colours[nth % len(colours)],
            "dash": DASHES[nth % len(DASHES)],
            "width": 1.8,
        }
    return lines


def phase_marks(view: RunView) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Shaded bands for every other phase, and the names above the plot."""
    shapes, notes = [], []
    for i, phase in enumerate(view.phases):
        if "start_ns" not in phase:
            continue
        start, end = phase["start_ns"] / 1e9, phase["end_ns"] / 1e9
        band = {"type": "rect", "xref": "x", "yref": "paper", "x0": start, "x1": end, "y0": 0, "y1": 1}
        shapes.append(
            {
                **band,
                "line": {"width": 0},
                "layer": "below",
                "fillcolor": f"rgba(127,140,160,{0.13 if i % 2 else 0.04})",
            }
        )
        notes.append(
            {
                "x": (start + end) / 2,
                "y": 1,
                "xref": "x",
                "yref": "paper",
                "yanchor": "bottom",
                "showarrow": False,
                "text": f"phase {phase['number']}",
                "font": {"size": 11},
            }
        )
    return shapes, notes


def time_axis(view: RunView) -> dict[str, Any]:
    """The horizontal axis of everything over time: the measured phases, s."""
    ends = [p["end_ns"] / 1e9 for p in view.phases if "end_ns" in p]
    starts = [p["start_ns"] / 1e9 for p in view.phases if "start_ns" in p]
    axis: dict[str, Any] = {"title": {"text": "time since the run began, s"}}
    return {**axis, "range": [min(starts), max(ends)]} if ends else axis


def _binned(t_s: np.ndarray, values: np.ndarray, edges: np.ndarray, how: str) -> list[float | None]:
    """One value a bin; a bin without a step keeps the value before it, since nothing changes between steps."""
    where = np.digitize(t_s, edges) - 1
    grouped = pd.Series(values).groupby(where).agg(how).reindex(range(len(edges) - 1)).ffill()
    last = int(where.max(initial=-1))
    return [rounded(value) if i <= last else None for i, value in enumerate(grouped)]


def ttft_of(requests: pd.DataFrame) -> np.ndarray:
    """TTFT of each request; NaN where it is no sample, as for the metrics."""
    ttft = (requests["first_token_ns"].to_numpy(dtype=float) - requests["intended_ns"].to_numpy()) / 1e6
    return np.where(requests["status"].isin(["ok", "cancelled"]), ttft, np.nan)


def _p90(values: pd.Series) -> float:
    return float(values.quantile(0.9, interpolation="higher"))


def rounded(value: float | None, digits: int = 4) -> float | None:
    """A number as short as it may stand in a figure; None for what is not finite."""
    if value is None or not np.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def bin_edges(view: RunView, bins: int) -> np.ndarray:
    """The borders of equal slices of the measured phases, s."""
    low, high = time_axis(view).get("range", (0.0, 1.0))
    return np.linspace(low, high, bins + 1)


def load_timeline(view: RunView) -> Figure | None:
    """Waiting requests (largest in a bin) and KV use (mean in a bin) over time, a line an arm; first seed."""
    traces: list[dict[str, Any]] = []
    edges = bin_edges(view, STEP_BINS)
    middle = [rounded(float(x), 6) for x in (edges[:-1] + edges[1:]) / 2]
    for nth, (arm, line) in enumerate(arm_lines(view).items()):
        steps = first_seed(view, arm, "steps", ("t_ns", "waiting", "held", "kv_usage"))
        if steps is None or steps.empty:
            continue
        t_s = steps["t_ns"].to_numpy() / 1e9
        queued = (steps["waiting"] + steps["held"]).to_numpy()
        common = {
            "type": "scatter",
            "mode": "lines",
            "x": middle,
            "name": escape(arm, quote=False),
            "legendgroup": arm,
            "line": line,
        }
        if nth >= ARMS_SHOWN:
            common["visible"] = "legendonly"
        traces.append(
            {**common, "y": _binned(t_s, queued, edges, "max"), "hovertemplate": "%{y:.0f} waiting"}
        )
        kv = _binned(t_s, steps["kv_usage"].to_numpy() * 100, edges, "mean")
        traces.append(
            {**common, "y": kv, "yaxis": "y2", "showlegend": False, "hovertemplate": "%{y:.0f}% of KV"}
        )
    if not traces:
        return None
    shapes, notes = phase_marks(view)
    layout = {
        "height": 520,
        "hovermode": "x unified",
        "xaxis": {**time_axis(view), "anchor": "y2"},
        "yaxis": {"title": {"text": "waiting requests"}, "domain": [0.55, 1], "rangemode": "tozero"},
        "yaxis2": {"title": {"text": "KV blocks in use, %"}, "domain": [0, 0.45], "range": [0, 102]},
        "shapes": shapes,
        "annotations": notes,
    }
    return {"data": traces, "layout": layout}


def ttft_timeline(view: RunView, arm: str, scale: Sequence[float]) -> Figure | None:
    """TTFT by tenant over the intended send time: the p90 of each bin, first seed of one arm."""
    requests = first_seed(
        view, arm, "requests", ("tenant", "measured", "intended_ns", "first_token_ns", "status")
    )
    if requests is None or requests.empty:
        return None
    sent = requests[requests["measured"]]
    ttft_ms = ttft_of(sent)
    edges = bin_edges(view, TTFT_BINS)
    bins = np.digitize(sent["intended_ns"].to_numpy() / 1e9, edges) - 1
    # NaN where all of a slice went unserved, so that the line breaks; no row where nothing was sent.
    p90 = pd.Series(ttft_ms).groupby([sent["tenant"].to_numpy(), bins]).agg(_p90)
    middle = (edges[:-1] + edges[1:]) / 2
    traces = []
    for tenant, line in tenant_lines(view).items():
        of_tenant = p90[tenant] if tenant in p90.index.get_level_values(0) else pd.Series(dtype=float)
        inside = [i for i in of_tenant.index if 0 <= i < TTFT_BINS]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": escape(tenant, quote=False),
                "line": line,
                "x": [rounded(float(middle[i]), 6) for i in inside],
                "y": [rounded(of_tenant[i]) for i in inside],
                "hovertemplate": "%{y:,.0f} ms",
            }
        )
    shapes, notes = phase_marks(view)
    layout = {
        "height": 330,
        "hovermode": "x unified",
        "xaxis": time_axis(view),
        "yaxis": {"title": {"text": "TTFT p90, ms"}, "type": "log", "range": list(scale), "dtick": 1},
        "shapes": shapes,
        "annotations": notes,
    }
    return {"data": traces, "layout": layout}


def ttft_cdfs(view: RunView) -> Figure | None:
    """One panel a tier: the share of offered requests with a first token within x, a line an arm; all seeds.

    A request that was never served counts in the denominator, so such a line ends below 1. One that
    its client cancelled before the first token is censored and counts nowhere.
    """
    tiers = list(dict.fromkeys(str(t.get("tier", "")) for t in view.tenants))
    lines = arm_lines(view)
    traces: list[dict[str, Any]] = []
    columns = ("tier", "measured", "intended_ns", "first_token_ns", "status")
    for nth, arm in enumerate(view.arms):
        tables = [view.table(arm.name, seed, "requests", columns) for seed in arm.seeds]
        found = [t for t in tables if t is not None]
        if not found:
            continue
        requests = pd.concat(found, ignore_index=True)
        censored = (requests["status"] == "cancelled") & requests["first_token_ns"].isna()
        requests = requests[requests["measured"] & ~censored]
        for panel, tier in enumerate(tiers):
            part = requests[requests["tier"] == tier]
            x, y = _cdf(part)
            if not x:
                continue
            axis = "" if panel == 0 else str(panel + 1)
            trace = {
                "type": "scatter", "mode": "lines", "name": escape(arm.name, quote=False), "legendgroup": arm.name, "line": lines[arm.name],
                "x": x, "y": y, "xaxis": f"x{axis}", "yaxis": f"y{axis}", "showlegend": panel == 0,
                "hovertemplate": "%{y:.1f}% within %{x:,.0f} ms",
            }  # fmt: skip
            traces.append({**trace, "visible": "legendonly"} if nth >= ARMS_SHOWN else trace)
    if not traces:
        return None
    return {
        "data": traces,
        "layout": _cdf_layout(view, tiers, stacked=False),
        "narrow": _cdf_layout(view, tiers, stacked=True),
    }


def _cdf(requests: pd.DataFrame) -> tuple[list[float | None], list[float | None]]:
    """(ms, % of offered) at evenly spaced ranks; plotted on a log axis, so 0 ms is drawn at 1 us."""
    ttft = ttft_of(requests)
    ttft = ttft[~np.isnan(ttft)]
    if not len(ttft):
        return [], []
    ttft = np.sort(np.maximum(ttft, 1e-3))
    ranks = np.unique(np.linspace(0, len(ttft) - 1, CDF_POINTS).round().astype(int))
    return [rounded(x) for x in ttft[ranks]], [rounded(x) for x in 100 * (ranks + 1) / len(requests)]


def _cdf_layout(view: RunView, tiers: Sequence[str], *, stacked: bool) -> dict[str, Any]:
    """Panels side by side, or one below the other for a narrow page."""
    height = 90 + 250 * len(tiers) if stacked else 380
    layout: dict[str, Any] = {"height": height, "shapes": [], "annotations": [], "hovermode": "closest"}
    slos = _tier_slos(view)
    for panel, tier in enumerate(tiers):
        axis = "" if panel == 0 else str(panel + 1)
        across, up = [0.0, 1.0], [0.0, 1.0]
        if stacked:
            up = _share(len(tiers) - 1 - panel, len(tiers), 0.10)
        else:
            across = _share(panel, len(tiers), 0.06)
        x_axis = {"type": "log", "domain": across, "anchor": f"y{axis}", "dtick": 1}
        y_axis: dict[str, Any] = {"range": [0, 102], "domain": up, "anchor": f"x{axis}"}
        if not stacked or panel == len(tiers) - 1:
            x_axis["title"] = {"text": "TTFT, ms"}
        if stacked or panel == 0:
            y_axis["title"] = {"text": "offered requests, %"}
        layout[f"xaxis{axis}"], layout[f"yaxis{axis}"] = x_axis, y_axis
        note = {"x": sum(across) / 2, "y": up[1], "text": escape(tier, quote=False), "font": {"size": 13}}
        layout["annotations"].append(
            {**note, "xref": "paper", "yref": "paper", "yanchor": "bottom", "showarrow": False}
        )
        if slo := slos.get(tier):
            line = {
                "type": "line",
                "xref": f"x{axis}",
                "yref": f"y{axis}",
                "x0": slo,
                "x1": slo,
                "y0": 0,
                "y1": 102,
            }
            layout["shapes"].append({**line, "line": {"width": 1, "dash": "dashdot", "color": "#8a919b"}})
    return layout


def _share(nth: int, of: int, gap: float) -> list[float]:
    """Both ends of the nth of equal parts of [0, 1] with gaps between them."""
    size = (1 - gap * (of - 1)) / of
    start = nth * (size + gap)
    return [round(start, 4), round(min(start + size, 1.0), 4)]


def _tier_slos(view: RunView) -> Mapping[str, float]:
    """The TTFT promised to each tier in ms, where all its tenants have the same."""
    slos: dict[str, set[float]] = {}
    for tenant in view.tenants:
        if tenant.get("slo_ttft_ms"):
            slos.setdefault(str(tenant.get("tier", "")), set()).add(float(tenant["slo_ttft_ms"]))
    return {tier: min(found) for tier, found in slos.items() if len(found) == 1}


def ttft_scale(view: RunView) -> list[float]:
    """One TTFT range for all arms, in powers of ten of ms, so that panels can be compared by eye."""
    low, high = [], []
    for arm in view.arms:
        requests = first_seed(view, arm.name, "requests", ("intended_ns", "first_token_ns"))
        if requests is not None:
            ttft = (requests["first_token_ns"] - requests["intended_ns"]).dropna().astype(float) / 1e6
            if len(ttft):
                low.append(float(ttft.quantile(0.02)))
                high.append(float(ttft.max()))
    if not low:
        return [0.0, 4.0]
    return [float(np.floor(np.log10(max(min(low), 1.0)))), float(np.ceil(np.log10(max(max(high), 10.0))))]


def first_seed(view: RunView, arm: str, table: str, columns: Sequence[str]) -> pd.DataFrame | None:
    """A table of the arm's first seed; None where there is none."""
    found = view.arm(arm)
    if found is None or not found.seeds:
        return None
    return view.table(arm, found.seeds[0], table, columns)
