"""A finished run as the rows look at it, one row, and the two common kinds of targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from harness import plan as plans
from harness.errors import UserError
from harness.metrics.scope import Scope
from harness.records import ArmRecord, RunRecord, load_run
from harness.stats.bootstrap import Estimate
from harness.stats.compare import ALPHA, difference
from harness.worker import build_workload
from reports.evaluated import EvaluatedArm, evaluated
from workloads.request import Workload

ABSENT = "not in this run"
PHASES = ((1,), (2,), (3,), (4,), (5,))
COMPLETIONS, CHAT = "gold-b", "gold-a"
SCOPES = (
    Scope(),
    *(Scope(phase) for phase in PHASES),
    Scope(tenant=COMPLETIONS),
    Scope(tenant=CHAT),
    Scope((2,), tenant=CHAT),
)


@dataclass(frozen=True)
class Row:
    """One target: what it is of, what was asked, what is, with which interval, and whether that suffices."""

    what: str
    asked: str
    found: str
    interval: str = ""
    met: bool | None = None


class Run:
    """A finished run, its arms evaluated when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.record: RunRecord = load_run(path)
        self._done: dict[str, EvaluatedArm] = {}
        self._workloads: dict[int, Workload | None] = {}
        #: Why a bound that needs the workload cannot be told; "" if none was missed.
        self.untold = ""

    def records(self, name: str) -> tuple[ArmRecord, ...]:
        """An arm's finished seeds; none for an arm that is not there."""
        return self.record.arms.get(name, ())

    def workload(self, seed: int) -> Workload | None:
        """What a seed sent, made again from the plan; None where that gives something else than was sent."""
        if seed not in self._workloads:
            self._workloads[seed] = self._made_again(seed)
        return self._workloads[seed]

    def _made_again(self, seed: int) -> Workload | None:
        try:
            made = build_workload(plans.read(self.record.path, same_code=False), seed)
        except UserError as error:
            self.untold = str(error)
            return None
        sent = {
            record.manifest["workload"]["sha256"]
            for records in self.record.arms.values()
            for record in records
            if record.seed == seed
        }
        if sent == {made.sha256}:
            return made
        self.untold = f"seed {seed}: this code makes another trace than was sent"
        return None

    @cached_property
    def slo_factor(self) -> float:
        """By which a profile's GPU is slower than the targets' one."""
        first = next(records[0] for records in self.record.arms.values() if records)
        return float(first.manifest["workload"]["slo_factor"])

    def named(self, *patches: str, name: str = "") -> str | None:
        """The finished arm with exactly these patches (and that name, where it has none); None without one."""
        for arm in self.record.plan["arms"]:
            right = set(arm["patches"]) == set(patches) and (not name or arm["name"] == name)
            if right and (patches or name) and self.record.arms.get(arm["name"]):
                return str(arm["name"])
        return None

    def arm(self, name: str) -> EvaluatedArm:
        """One arm's figures."""
        if name not in self._done:
            plan = next(arm for arm in self.record.plan["arms"] if arm["name"] == name)
            known = {phase["number"] for phase in self.phases}
            wanted = [s for s in SCOPES if set(s.phases or ()) <= known]
            self._done[name] = evaluated(name, plan, self.record.arms[name], scopes=wanted)
        return self._done[name]

    @property
    def phases(self) -> list[dict[str, Any]]:
        """The measured phases."""
        first = next(records[0] for records in self.record.arms.values() if records)
        return [phase for phase in first.manifest["workload"]["phases"] if phase["measured"]]

    def estimate(self, name: str, metric: str, scope: Scope) -> Estimate | None:
        """A figure; None where it has no value."""
        found = self.arm(name).estimates.get(scope, {}).get(metric)
        return None if found is None or found.value is None else found

    def gauge(self, name: str, patch: str, gauge: str) -> float | None:
        """What a patch counted, averaged over the seeds; None where it did not."""
        told = [r.receipt["metrics"].get(patch, {}).get(gauge) for r in self.arm(name).records]
        values = [float(value) for value in told if value is not None]
        return sum(values) / len(values) if values else None

    def change(self, name: str, metric: str, scope: Scope, base: str) -> tuple[float | None, str]:
        """Against another arm on the same seeds, in percent, and its interval."""
        now, then = self.estimate(name, metric, scope), self.estimate(base, metric, scope)
        if now is None or then is None or not then.value:
            return None, ""
        windows = [p for p in PHASES if scope.phases in (None, p)]
        seeds = len(self.arm(name).records)
        d = difference(now, then, seeds=seeds, blocks_a_phase=max(1, now.blocks // (len(windows) * seeds)))
        assert now.value is not None and then.value is not None
        if not d.testable:
            return 100 * (now.value / then.value - 1), d.reason
        low, high = (d.percent(edge) for edge in d.at(ALPHA))
        shown = "" if low is None or high is None else f"[{low:+.1f}, {high:+.1f}]%"
        return 100 * (now.value / then.value - 1), shown


def absent(what: str, asked: str) -> Row:
    return Row(what, asked, ABSENT)


def versus(
    run: Run,
    what: str,
    asked: str,
    name: str | None,
    metric: str,
    good: Callable[[float], bool],
    *,
    scope: Scope | None = None,
    base: str | None = "tuned",
) -> Row:
    """A target on a change against another arm."""
    if name is None or base is None or base not in run.record.arms or not run.record.arms[base]:
        return absent(what, asked)
    place = scope or Scope()
    change, interval = run.change(name, metric, place, base)
    now, then = run.estimate(name, metric, place), run.estimate(base, metric, place)
    if change is None:
        zero = then is not None and then.value == 0
        return Row(what, asked, f"{base}'s is 0" if zero else "no value")
    assert now is not None and then is not None
    return Row(what, asked, f"{change:+.1f}% ({then.value:.4g} -> {now.value:.4g})", interval, good(change))


def below(
    run: Run,
    what: str,
    asked: str,
    name: str | None,
    metric: str,
    good: Callable[[float], bool],
    *,
    scope: Scope | None = None,
    unit: str = " ms",
) -> Row:
    """A target on a value."""
    if name is None:
        return absent(what, asked)
    found = run.estimate(name, metric, scope or Scope())
    if found is None or found.value is None:
        return Row(what, asked, "no value")
    interval = "" if found.ci95 is None else f"[{found.ci95[0]:.4g}, {found.ci95[1]:.4g}]"
    few = " (few samples)" if found.few_samples else ""
    return Row(what, asked, f"{found.value:.4g}{unit}{few}", interval, good(found.value))
