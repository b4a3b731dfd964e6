"""The comparisons of a report: every arm against stock and against tuned, corrected together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from harness.metrics.evaluate import Estimates
from harness.metrics.pool import windows_of
from harness.metrics.registry import METRICS, compared
from harness.metrics.scope import Scope
from harness.papers import Json
from harness.records import ArmRecord
from harness.stats.compare import SERVED_MARGIN, Difference, difference, outcomes

BASELINES = ("stock", "tuned")


class Arm(Protocol):
    """What a comparison needs to know of an arm."""

    @property
    def name(self) -> str: ...
    @property
    def records(self) -> tuple[ArmRecord, ...]: ...
    @property
    def estimates(self) -> Estimates: ...
    @property
    def valid(self) -> bool: ...
    @property
    def idle(self) -> bool: ...


def compare_arms(arms: Sequence[Arm]) -> list[Json]:
    """All comparisons of a run, in the order of arms, baselines, scopes and metrics."""
    by_name = {arm.name: arm for arm in arms}
    labels: list[tuple[str, str, Scope, str]] = []
    differences: list[Difference] = []
    for arm in arms:
        for name in BASELINES:
            base = by_name.get(name)
            if base is None or arm.name == "stock" or arm is base:
                continue
            for scope in arm.estimates:
                # tuned against stock is the baselines' own story: the whole server is enough of it
                if arm.name in BASELINES and not scope.everybody:
                    continue
                for metric in compared(scope):
                    # some figures only live runs on a GPU have
                    if metric not in arm.estimates[scope] or metric not in base.estimates.get(
                        scope, {metric}
                    ):
                        continue
                    labels.append((arm.name, name, scope, metric))
                    differences.append(compare_one(arm, base, scope, metric))
    results = outcomes(differences, [METRICS[metric].better for *_, metric in labels])
    rows: list[Json] = []
    for (arm_name, base_name, scope, metric), difference_, result in zip(
        labels, differences, results, strict=True
    ):
        row: Json = {
            "arm": arm_name,
            "baseline": base_name,
            "scope": str(scope),
            "metric": metric,
            "delta_pct": result.delta_pct,
            "ci95": result.ci95,
            "verdict": result.verdict,
        }
        if result.reason:
            row["reason"] = result.reason
        if result.delta_pct is None and difference_.change is not None:
            row["delta"] = difference_.change
        rows.append(row)
    return rows


def compare_one(arm: Arm, base: Arm, scope: Scope, metric: str) -> Difference:
    """The paired difference of two arms before any correction; `reason` says where it is none."""
    for one in (arm, base):
        if not one.valid:
            return Difference(None, reason=f"the figures of {one.name} are not valid")
    if arm.idle:
        return Difference(None, reason="never fired: none of its patches was reached by the traffic")
    if [r.seed for r in arm.records] != [r.seed for r in base.records] or scope not in base.estimates:
        return Difference(None, reason="the arms were not run with the same seeds and phases")
    if _traces(arm) != _traces(base):
        return Difference(None, reason="the arms replayed different traces")
    ours, theirs = arm.estimates[scope], base.estimates[scope]
    windows = windows_of(arm.records[0])
    found = difference(
        ours[metric],
        theirs[metric],
        seeds=len(arm.records),
        blocks_a_phase=min(window.blocks for window in windows),
    )
    if METRICS[metric].latency and found.change is not None:
        served = ours["served_share"].value or 0.0, theirs["served_share"].value or 0.0
        if abs(served[0] - served[1]) > SERVED_MARGIN:
            text = f"they served different shares of what was offered ({served[0]:.0%} and {served[1]:.0%})"
            return replace(found, reason=text)
    return found


def _traces(arm: Arm) -> list[str]:
    return [str(record.manifest["workload"]["sha256"]) for record in arm.records]
