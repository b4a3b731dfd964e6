"""Which rows a report shows: headlines, counts of verdicts, matrices by phase and tenant, wins and losses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from reports.view import BASELINES, Arm, Comparison, RunView
from reports.wording import MISSING, VERDICTS, Value, change, metric_label, scope_label

_SPAN = re.compile(r"/?phase:\d+-\d+")

# What a reader wants to know first; each pair is shown where the summary has it.
HEADLINES: tuple[tuple[str, str], ...] = (
    ("short_ttft_ms_p99", "phase:3-5"),
    ("short_tpot_jitter_ms", "phase:3-5"),
    ("ttft_ms_p99", "phase:3-5"),
    ("e2e_ms_p99", "phase:3-5"),
    ("slo_attainment", "phase:3-5"),
    ("goodput_rps", "phase:3-5"),
    ("output_tok_per_s", "phase:3-5"),
    ("slo_attainment", "tier:gold/phase:3-5"),
    ("slo_attainment", "tier:silver/phase:3-5"),
    ("slo_attainment", "tier:bronze/phase:3-5"),
    ("jain_index", "all"),
    ("prefix_hit_rate", "all"),
    ("preemptions", "all"),
    ("rejected", "all"),
    ("gpu_s_per_1k_tokens", "all"),
    ("joules_per_output_token", "all"),
)
# "Phase 1 must not get worse": always shown, whatever the verdict.
GUARD: tuple[tuple[str, str], ...] = (
    ("short_ttft_ms_p99", "phase:1"),
    ("ttft_ms_p99", "phase:1"),
    ("ttft_ms_p90", "tier:bronze/phase:1"),
    ("tpot_ms_p99", "phase:1"),
    ("slo_attainment", "phase:1"),
    ("output_tok_per_s", "phase:1"),
)
# One row an arm has room for these.
OVERVIEW: tuple[tuple[str, str], ...] = (
    ("short_ttft_ms_p99", "phase:3-5"),
    ("slo_attainment", "phase:3-5"),
    ("output_tok_per_s", "phase:3-5"),
    ("short_ttft_ms_p99", "phase:1"),
)
# The columns of the matrices by phase and by tenant.
MATRIX_METRICS: tuple[str, ...] = (
    "short_ttft_ms_p99",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "tpot_ms_p99",
    "itl_ms_p99",
    "e2e_ms_p99",
    "queue_wait_ms_p99",
    "slo_attainment",
    "goodput_rps",
    "output_tok_per_s",
    "prefix_hit_rate",
    "preemptions",
)


@dataclass(frozen=True, slots=True)
class Row:
    """A comparison beside the two values that it compares."""

    label: str
    scope: str
    metric: str
    value: Value
    base: Value
    comparison: Comparison | None
    struck: bool
    p90: str = ""

    @property
    def verdict(self) -> str:
        """The verdict; `undetermined` where the summary makes none."""
        return self.comparison.verdict if self.comparison else "undetermined"

    @property
    def change(self) -> str:
        """The change in percent; "from 0" where the baseline allows no percentage."""
        c = self.comparison
        if c is None:
            return MISSING
        if c.delta_pct is None and self.base.value == 0 and self.value.value is not None:
            return "from 0"
        return change(c.delta_pct)


@dataclass(frozen=True, slots=True)
class Matrix:
    """Metrics (rows) by phases or tenants (columns) of one arm against one baseline."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Row | None, ...]], ...]


@dataclass(frozen=True, slots=True)
class Overview:
    """All arms in one table: a few headlines of each against the baseline that claims are made over."""

    baseline: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[Row, ...]]


def overview(view: RunView) -> Overview:
    """The overview against tuned, or against stock where tuned was not run."""
    baseline = next((b for b in BASELINES if view.arm(b)), BASELINES[0])
    found = {arm.name: tuple(rows(view, arm, baseline, OVERVIEW)) for arm in view.candidates}
    widest = max(found.values(), key=len, default=())
    labels = tuple(f"{r.label}, {r.scope}" for r in widest)
    return Overview(baseline, labels, found)


def struck(view: RunView, *arms: Arm | None) -> bool:
    """Whether numbers that rest on these arms are struck through."""
    return any(arm is not None and not arm.valid for arm in arms)


def row(view: RunView, arm: Arm, baseline: str, scope: str, metric: str) -> Row:
    """One row, with the p90 beside a p99 that rests on few samples."""
    base = view.arm(baseline)
    value = arm.value(metric, scope)
    base_value = base.value(metric, scope) if base else Value(metric, None)
    p90 = ""
    if (value.few or base_value.few) and metric.endswith("_p99"):
        beside = arm.value(metric.removesuffix("99") + "90", scope)
        p90 = beside.text if beside.value is not None else ""
    return Row(
        metric_label(metric),
        scope_label(scope),
        metric,
        value,
        base_value,
        view.comparison(arm.name, baseline, scope, metric),
        struck(view, arm, base),
        p90,
    )


def rows(view: RunView, arm: Arm, baseline: str, wanted: Iterable[tuple[str, str]]) -> list[Row]:
    """The wanted (metric, scope) rows that the summary can fill.

    A run of single phases has no span like phases 3-5: such a row falls back to all of its phases.
    """
    found: dict[tuple[str, str], Row] = {}
    for metric, scope in wanted:
        wider = _SPAN.sub("", scope) or "all"
        for candidate in dict.fromkeys((scope, wider)):
            made = row(view, arm, baseline, candidate, metric)
            if made.comparison or made.value.value is not None:
                found.setdefault((metric, candidate), made)
                break
    return list(found.values())


def guard_rows(view: RunView, arm: Arm, baseline: str) -> list[Row]:
    """The "phase 1 must not get worse" rows; at least one, even where phase 1 was not run."""
    return rows(view, arm, baseline, GUARD) or [row(view, arm, baseline, "phase:1", GUARD[0][0])]


def guard_shown(view: RunView, arm: Arm, baselines: Sequence[str]) -> list[list[Row]]:
    """The guard rows that a short table has room for, one list a baseline, line by line the same figures.

    The first one, and every one that is worse than any of the baselines: no loss in phase 1 is left out.
    """
    by_baseline = [guard_rows(view, arm, baseline) for baseline in baselines]
    lines = list(zip(*by_baseline, strict=True))
    kept = [line for i, line in enumerate(lines) if i == 0 or any(row.verdict == "worse" for row in line)]
    return [[line[place] for line in kept] for place in range(len(baselines))]


def counts(view: RunView, arm: str, baseline: str) -> dict[str, int]:
    """How many comparisons of the arm against the baseline got each verdict."""
    found = Counter(c.verdict for c in view.comparisons if (c.arm, c.baseline) == (arm, baseline))
    return {verdict: found[verdict] for verdict in VERDICTS}


def with_verdict(view: RunView, verdict: str, arm: str | None = None) -> list[Row]:
    """Every comparison with that verdict, the largest changes first within arm and baseline."""
    picked = [c for c in view.comparisons if c.verdict == verdict and arm in (None, c.arm)]
    # the baselines' own differences come last
    order = {a.name: i for i, a in enumerate((*view.candidates, *view.arms[:2]))}
    picked.sort(
        key=lambda c: (
            order.get(c.arm, 99),
            BASELINES.index(c.baseline) if c.baseline in BASELINES else 9,
            -abs(c.delta_pct or 0.0),
            c.metric,
            c.scope,
        )
    )
    made = []
    for c in picked:
        candidate = view.arm(c.arm)
        if candidate is not None:
            made.append(row(view, candidate, c.baseline, c.scope, c.metric))
    return made


def matrix(
    view: RunView, arm: Arm, baseline: str, scopes: Sequence[tuple[str, str]], extra: Sequence[str] = ()
) -> Matrix:
    """Verdicts of every matrix metric in each (label, scope); a metric that is compared in none is left out."""
    made = []
    for metric in dict.fromkeys((*MATRIX_METRICS, *extra)):
        cells = tuple(row(view, arm, baseline, scope, metric) for _, scope in scopes)
        filled = tuple(c if c.comparison or c.value.value is not None else None for c in cells)
        if any(c and c.comparison for c in filled):
            made.append((metric_label(metric), filled))
    return Matrix(tuple(label for label, _ in scopes), tuple(made))


def phase_scopes(view: RunView) -> list[tuple[str, str]]:
    """(label, scope) of every measured phase."""
    return [(f"{p['number']} {p.get('name', '')}".strip(), f"phase:{p['number']}") for p in view.phases]


def tenant_scopes(view: RunView) -> list[tuple[str, str]]:
    """(label, scope) of every tenant."""
    return [(str(t["name"]), f"tenant:{t['name']}") for t in view.tenants]


def attainment(view: RunView, arm: Arm) -> list[tuple[str, list[Value]]]:
    """SLO attainment by tenant (rows) and phase (columns)."""
    return [
        (
            str(t["name"]),
            [arm.value("slo_attainment", f"tenant:{t['name']}/phase:{p['number']}") for p in view.phases],
        )
        for t in view.tenants
    ]


def extreme(view: RunView, arm: Arm, baseline: str, verdict: str) -> Row | None:
    """The comparison with that verdict whose value changed most; None where there is none."""
    made = [
        r for r in with_verdict(view, verdict, arm.name) if r.comparison and r.comparison.baseline == baseline
    ]
    return made[0] if made else None
