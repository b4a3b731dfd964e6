"""The noise of a live run: one arm measured twice, how small an effect could be seen, and verdicts below that."""

from __future__ import annotations

from collections.abc import Sequence

from harness.metrics.scope import Scope, parse_scope
from harness.papers import Json
from harness.stats.compare import ALPHA
from reports.comparisons import Arm, compare_one

# What a reader wants to know first, where the run has it.
_METRICS = (
    "short_ttft_ms_p90",
    "short_ttft_ms_p99",
    "ttft_ms_p50",
    "ttft_ms_p90",
    "tpot_ms_p50",
    "e2e_ms_p99",
    "slo_attainment",
    "output_tok_per_s",
    "prefix_hit_rate",
    "joules_per_output_token",
)
_SCOPES = (Scope(), Scope(phases=(3, 4, 5)))


def noise(arms: Sequence[Arm], again: str, of: str) -> Json:
    """Differences between an arm and its repetition, which are nothing but noise.

    Args:
        again, of: names of the repetition and of the arm that it repeats.

    Returns:
        `rows`: delta_pct, its plain 95% interval (not corrected: nothing is claimed by it), and `visible_pct`, how far
        from no change that interval reaches: a smaller effect could not be told from noise.
    """
    by_name = {arm.name: arm for arm in arms}
    rows: list[Json] = []
    if again in by_name and of in by_name:
        ours, theirs = by_name[again], by_name[of]
        for scope in _SCOPES:
            if scope not in ours.estimates or scope not in theirs.estimates:
                continue
            rows += [
                row
                for metric in _METRICS
                if metric in ours.estimates[scope] and (row := _row(ours, theirs, scope, metric)) is not None
            ]
    return {"again": again, "of": of, "rows": rows}


def _row(ours: Arm, theirs: Arm, scope: Scope, metric: str) -> Json | None:
    if metric not in theirs.estimates[scope]:
        return None
    found = compare_one(ours, theirs, scope, metric)
    if found.change is None or not found.testable:
        return None
    low, high = (found.percent(end) for end in found.at(ALPHA))
    if low is None or high is None:
        return None
    return {
        "metric": metric,
        "scope": str(scope),
        "delta_pct": found.percent(found.change),
        "ci95": [low, high],
        "visible_pct": max(abs(low), abs(high)),
    }


def cap(rows: Sequence[Json], arms: Sequence[Arm], again: str, of: str) -> list[Json]:
    """The comparisons, with every better or worse made undetermined that two servers alike differed by as well.

    Intervals hold what varies within a run; what differs between one server and the next they cannot know, and with
    one seed nothing but the pair shows it.
    """
    by_name = {arm.name: arm for arm in arms}
    if again not in by_name or of not in by_name:
        return list(rows)
    return [_capped(row, by_name[again], by_name[of]) for row in rows]


def _capped(row: Json, ours: Arm, theirs: Arm) -> Json:
    if row["verdict"] not in ("better", "worse") or row["delta_pct"] is None:
        return row
    scope = parse_scope(row["scope"])
    if any(row["metric"] not in one.estimates.get(scope, {}) for one in (ours, theirs)):
        return row
    found = compare_one(ours, theirs, scope, row["metric"])
    differs = None if found.change is None else found.percent(found.change)
    if differs is None or abs(differs) < abs(row["delta_pct"]):
        return row
    reason = f"two servers with the same flags ({theirs.name}, {ours.name}) differed by {abs(differs):.1f}% as well"
    return {**row, "verdict": "undetermined", "data_verdict": row["verdict"], "reason": reason}
