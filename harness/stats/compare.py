"""Paired differences between two arms, corrected over all comparisons of a report, and their verdicts.

The difference of an arm and its baseline is taken replicate by replicate (the same blocks of the same
seeds in both), on a log scale where all values are positive, else on the plain one. Its standard error
over the replicates, with Student's t at (blocks - 1) degrees of freedom, gives a p-value. Holm's
step-down procedure (Holm, Scandinavian Journal of Statistics 6, 1979) then gives each comparison its
level: alpha / (m - rank + 1) for the rejected ones in order of p, and the level at which the procedure
stopped for all others. The interval shown is the one at that level, so it excludes zero exactly when
Holm rejects: a verdict never contradicts its interval. On the plain scale it may reach below a change of
-100%, which no figure that is never negative can have; what is shown ends there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import special

from harness.stats.bootstrap import Estimate

Floats = npt.NDArray[np.float64]
Verdict = Literal["better", "worse", "same", "undetermined"]

ALPHA = 0.05
MARGIN_PCT = 2.0
MIN_BLOCKS = 4
# Two arms that served shares of the load further apart than this cannot be ranked by latency.
SERVED_MARGIN = 0.02


@dataclass(frozen=True, slots=True)
class Difference:
    """An arm against its baseline before correction; `reason` is set where it cannot be tested.

    Attributes:
        log: `change` and `error` are those of ln(arm / baseline); else of arm - baseline.
        nonnegative: the arm's value is never below 0, in no replicate.
        base: the baseline's value.
        error: standard error of `change`.
        freedom: degrees of freedom of Student's t.
    """

    change: float | None
    error: float = 0.0
    freedom: int = 0
    log: bool = False
    base: float = 0.0
    reason: str = ""
    nonnegative: bool = False

    @property
    def testable(self) -> bool:
        """True if it takes part in the correction."""
        return self.change is not None and not self.reason

    @property
    def p_value(self) -> float:
        """Two-sided p-value of "no difference"."""
        if self.change is None or self.change == 0:
            return 1.0
        if self.error == 0:
            return 0.0
        return float(2 * special.stdtr(self.freedom, -abs(self.change) / self.error))

    def at(self, alpha: float) -> tuple[float, float]:
        """The interval of `change` at a two-sided level."""
        if self.change is None:
            raise ValueError("no difference to give an interval of")
        reach = float(special.stdtrit(self.freedom, 1 - alpha / 2)) * self.error if self.error else 0.0
        return self.change - reach, self.change + reach

    def percent(self, change: float) -> float | None:
        """A change as a percentage of the baseline; None where the baseline is 0 and the change is not."""
        if self.log:
            return 100 * math.expm1(change)
        if self.base == 0:
            return 0.0 if change == 0 else None
        return 100 * change / abs(self.base)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A comparison after correction. Percentages are of the baseline's value."""

    delta_pct: float | None
    ci95: tuple[float, float] | None
    verdict: Verdict
    reason: str = ""


def difference(arm: Estimate, base: Estimate, *, seeds: int, blocks_a_phase: int) -> Difference:
    """The paired difference of two estimates made with the same weights."""
    if arm.value is None or base.value is None:
        who = "the arm" if arm.value is None else "the baseline"
        return Difference(None, reason=f"{who} has no value: {(arm if arm.value is None else base).reason}")
    reason = ""
    if arm.replicates is None or base.replicates is None:
        reason = "no interval can be given for this figure"
    elif arm.few_samples or base.few_samples:
        reason = "p99 from fewer than 459 samples: see p90"
    elif min(arm.blocks, base.blocks) < MIN_BLOCKS and not _equal(arm, base):
        reason = f"data in fewer than {MIN_BLOCKS} blocks of time"
    replicates_a = arm.replicates if arm.replicates is not None else np.array([arm.value])
    replicates_b = base.replicates if base.replicates is not None else np.array([base.value])
    log = min(arm.value, base.value, float(replicates_a.min()), float(replicates_b.min())) > 0
    if log:
        change = math.log(arm.value / base.value)
        spread: Floats = np.log(replicates_a) - np.log(replicates_b)
    else:
        change = arm.value - base.value
        spread = replicates_a - replicates_b
    error = float(spread.std(ddof=1)) if len(spread) > 1 else 0.0
    if seeds == 1 and blocks_a_phase > 1:
        # drawing n blocks from n understates the spread by (n - 1) / n; two stages overstate it as it is
        error *= math.sqrt(blocks_a_phase / (blocks_a_phase - 1))
    if error < 1e-12 * max(1.0, abs(change)):
        error = 0.0
    freedom = max(min(arm.blocks, base.blocks) - 1, 1)
    nonnegative = min(arm.value, float(replicates_a.min())) >= 0
    return Difference(change, error, freedom, log, base.value, reason, nonnegative)


def outcomes(differences: Sequence[Difference], better: Sequence[str]) -> list[Outcome]:
    """Correct all comparisons of a report together and give each its verdict.

    Args:
        differences: one a comparison.
        better: the metric's good direction for each: lower, higher or neither.
    """
    levels = holm_levels([d.p_value if d.testable else None for d in differences])
    return [_outcome(d, level, way) for d, level, way in zip(differences, levels, better, strict=True)]


def holm_levels(p_values: Sequence[float | None], alpha: float = ALPHA) -> list[float]:
    """The level of each comparison under Holm's step-down procedure; None values take no part."""
    order = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    levels = [alpha] * len(p_values)
    stopped: float | None = None
    for rank, (p, place) in enumerate(order):
        level = alpha / (len(order) - rank)
        if stopped is None and p >= level:
            stopped = level
        levels[place] = level if stopped is None else stopped
    return levels


def _outcome(d: Difference, level: float, better: str) -> Outcome:
    if d.change is None:
        return Outcome(None, None, "undetermined", d.reason)
    delta = d.percent(d.change)
    if d.reason:
        return Outcome(delta, None, "undetermined", d.reason)
    low, high = d.at(level)
    low_pct, high_pct = d.percent(low), d.percent(high)
    ci = None if low_pct is None or high_pct is None else (low_pct, high_pct)
    if ci is not None and ci[0] > -MARGIN_PCT and ci[1] < MARGIN_PCT:
        return Outcome(delta, ci, "same")
    if ci is not None and d.nonnegative and d.base > 0:
        ci = max(ci[0], -100.0), ci[1]
    excludes = low > 0 or high < 0
    reason = "the baseline's value is 0: no percentage" if delta is None else ""
    if not excludes:
        return Outcome(
            delta, ci, "undetermined", reason or "the interval holds both no change and one that matters"
        )
    if better == "neither":
        return Outcome(delta, ci, "undetermined", "neither direction is a win for this figure")
    won = (low > 0) == (better == "higher")
    return Outcome(delta, ci, "better" if won else "worse", reason)


def _equal(arm: Estimate, base: Estimate) -> bool:
    return arm.value == base.value and bool(np.array_equal(arm.replicates, base.replicates))  # type: ignore[arg-type]
