"""report.html: one file that works offline, with plotly.js, styles and data inline."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from harness.metrics.registry import METRICS
from reports import (
    admissions,
    cache,
    facts,
    figures,
    interference,
    live,
    queues,
    robustness,
    service,
    slack,
    tables,
)
from reports.cache_figures import cache_figures
from reports.view import BASELINES, RunView
from reports.wording import MISSING, SYMBOLS, VERDICTS, change_interval, metric_label

TEMPLATES = Path(__file__).with_name("templates")
# The small charts: log2 of the ratio to the baseline, from a quarter to four times; in percent of their width.
BAR_MIDDLE, BAR_EDGE, BAR_REACH = 50.0, 4.0, 2.0


def render(view: RunView) -> str:
    """The whole page. Equal records give equal bytes.

    Raises:
        UserError: a record table is damaged.
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters.pop("safe", None)  # nothing in the template may opt out of escaping
    drawn = all_figures(view)
    page: str = environment.get_template("report.html.j2").render(
        view=view,
        title=facts.title(view),
        intro=facts.intro(view),
        style=_own("report.css"),
        script=_own("report.js"),
        plotly_js=_plotly(),
        figures=drawn,
        figures_json=json_for_script(drawn),
        baselines=BASELINES,
        verdicts=VERDICTS,
        symbols=SYMBOLS,
        missing=MISSING,
        margin=facts.MARGIN,
        headlines=tables.HEADLINES,
        rows=tables.rows,
        row=tables.row,
        counts=tables.counts,
        overview=tables.overview(view),
        extreme=tables.extreme,
        guard_rows=tables.guard_rows,
        matrix=tables.matrix,
        phase_scopes=tables.phase_scopes,
        tenant_scopes=tables.tenant_scopes,
        attainment=tables.attainment,
        with_verdict=tables.with_verdict,
        mechanisms=lambda arm: facts.mechanisms(view, arm.patches),
        patches=facts.patch_facts(view),
        run_reasons=facts.run_reasons(view),
        facts=facts.manifest_facts(view),
        arm_facts=facts.arm_facts(view),
        arm_index={arm.name: i for i, arm in enumerate(view.arms)},
        definitions=METRICS.values(),
        better_way=facts.better_way,
        verdict_rules=(*facts.VERDICT_RULES, *robustness.rules(view)),
        remarks=lambda arm: robustness.remarks(view, arm),
        profile_lines=robustness.profile_lines(view),
        profile_title=robustness.profile_title(view),
        live=live.is_live(view),
        status=lambda arm, baseline: robustness.status(view, arm, baseline),
        assumptions=robustness.assumptions(view),
        recomputed_baseline=robustness.baseline_of(view),
        recomputed=lambda arm: robustness.table(view, arm),
        untried=robustness.untried(view),
        not_recomputed=robustness.not_recomputed(view),
        cell_text=robustness.text_of,
        cell_title=robustness.title_of,
        slo_factor=view.manifest.get("workload", {}).get("slo_factor"),
        not_modelled=facts.not_modelled(view),
        admissions=admissions.admissions(view),
        victims=admissions.victims(view),
        interference=interference.interference(view),
        **cache.context(view),
        step_bins=figures.STEP_BINS,
        ttft_bins=figures.TTFT_BINS,
        change_interval=change_interval,
        metric_label=metric_label,
        forest=forest,
    )
    return page


def all_figures(view: RunView) -> dict[str, figures.Figure]:
    """Every figure by the id of its element; those without data are left out."""
    made = {"fig-load": figures.load_timeline(view), "fig-cdf": figures.ttft_cdfs(view)}
    scale = figures.ttft_scale(view)
    for i, arm in enumerate(view.arms):
        made[f"fig-ttft-{i}"] = figures.ttft_timeline(view, arm.name, scale)
    known = {name: figure for name, figure in made.items() if figure is not None}
    of_tenants = service.service_figures(view) | queues.queue_figures(view) | slack.slack_figures(view)
    return known | of_tenants | cache_figures(view)


def json_for_script(value: object) -> Markup:
    """JSON that may stand inside a script element: it cannot close the element or open a comment."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def forest(row: tables.Row) -> dict[str, Any] | None:
    """Where a change and its interval lie in the small chart, in percent of its width; None without a change."""
    c = row.comparison
    if c is None or c.delta_pct is None:
        return None
    low = None if c.low is None or c.high is None else _bar_x(c.low)
    high = None if c.low is None or c.high is None else _bar_x(c.high)
    return {"mid": _bar_x(c.delta_pct), "low": low, "high": high}


def _bar_x(delta_pct: float) -> float:
    ratio = max(1 + delta_pct / 100, 2**-BAR_REACH)
    log = max(-BAR_REACH, min(BAR_REACH, math.log2(ratio)))
    return round(BAR_MIDDLE + log / BAR_REACH * (BAR_MIDDLE - BAR_EDGE), 1)


@lru_cache(maxsize=1)
def _plotly() -> Markup:
    # The library holds no "</script", which the check in the tests guards.
    return Markup(get_plotlyjs())


def _own(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))
