"""One arm of a run: its records, its figures in every scope, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from harness.failures import Failure
from harness.metrics.evaluate import Estimates, evaluate
from harness.metrics.pool import pool_of, windows_of
from harness.metrics.scope import Scope, scopes_of
from harness.metrics.validity import Reason, check_record, hits, never_fired
from harness.papers import Json
from harness.records import ArmRecord
from harness.stats.blocks import BlockGrid
from harness.stats.bootstrap import REPLICATES, Weights


@dataclass(frozen=True, slots=True)
class EvaluatedArm:
    """One arm: its records, its figures, and what is wrong with it."""

    name: str
    plan: Json
    records: tuple[ArmRecord, ...]
    estimates: Estimates
    reasons: tuple[Reason, ...]

    @property
    def valid(self) -> bool:
        """False if its figures may not be believed."""
        return not any(reason.fatal for reason in self.reasons)

    @property
    def idle(self) -> bool:
        """True if it has patches and none of them fired."""
        patches = self.plan["patches"]
        return bool(patches) and bool(self.records) and not any(hits(self.records, p) for p in patches)

    def worst_shares(self, field: str) -> dict[str, float]:
        """The largest share over the seeds, by name, of a manifest's table of shares; zeros are left out."""
        worst: dict[str, float] = {}
        for record in self.records:
            for name, share in record.manifest.get(field, {}).items():
                worst[name] = max(worst.get(name, 0.0), float(share))
        return {name: share for name, share in sorted(worst.items()) if share > 0}


def evaluated(
    name: str,
    plan: Json,
    records: tuple[ArmRecord, ...],
    missing: Mapping[int, Failure | None] = MappingProxyType({}),
    scopes: Sequence[Scope] | None = None,
    replicates: int = REPLICATES,
) -> EvaluatedArm:
    """Evaluate an arm.

    Args:
        plan: its entry in plan.json.
        records: its seeds, as far as they have been run.
        missing: seeds that have not.
        scopes: where its figures are wanted; everywhere if None.
        replicates: bootstrap replicates behind each interval; with 0, values alone are wanted.
    """
    reasons = [
        Reason("missing", f"seed {seed} has not been run to its end: run the same command again", True)
        if failure is None
        else Reason(failure.code, f"seed {seed} failed: {failure.text}", True)
        for seed, failure in missing.items()
    ]
    if not records:
        return EvaluatedArm(name, plan, records, {}, tuple(reasons))
    reasons += [reason for record in records for reason in check_record(record)]
    reasons += never_fired(records)
    windows = windows_of(records[0])
    pool = pool_of(records)
    if scopes is None:
        numbers = [window.number for window in windows]
        scopes = scopes_of(numbers, list(dict.fromkeys(pool.tiers)), pool.tenants)
    grid = BlockGrid(windows, len(records))
    estimates = evaluate(pool, Weights.of(grid, replicates) if replicates else _as_they_are(grid), scopes)
    few = [
        metric
        for metric, value in estimates.get(Scope(), {}).items()
        # Ten seconds never hold enough; their p90 stands beside it everywhere.
        if value.few_samples and not metric.startswith("cold_")
    ]
    # what makes it invalid is said first
    reasons.sort(key=lambda reason: not reason.fatal)
    if few:
        text = f"p99 from fewer than 459 samples (p90 is shown beside): {', '.join(few)}"
        reasons.append(Reason("too_few_samples", text, False))
    return EvaluatedArm(name, plan, records, estimates, tuple(reasons))


def _as_they_are(grid: BlockGrid) -> Weights:
    """Replicates that draw every block once: each is the value itself."""
    return Weights(grid, np.ones((2, grid.size), dtype=np.float32))
