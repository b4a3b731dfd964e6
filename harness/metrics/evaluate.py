"""Every metric of one arm in every scope, with its replicates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.metrics.pool import Pool, View
from harness.metrics.registry import METRICS
from harness.metrics.scope import Scope
from harness.stats.bootstrap import Estimate, Weights, estimate

Estimates = Mapping[Scope, Mapping[str, Estimate]]


def evaluate(pool: Pool, weights: Weights, scopes: Sequence[Scope]) -> Estimates:
    """Estimate all metrics in all scopes.

    Metrics of the whole server are left out of tenants' scopes, and those of which the arm has no data everywhere.
    """
    metrics = [metric for metric in METRICS.values() if metric.known is None or metric.known(pool)]
    out: dict[Scope, dict[str, Estimate]] = {}
    for scope in scopes:
        view = View(pool, scope)
        draws = weights.draws[:, view.span]
        out[scope] = {
            metric.name: estimate(metric.of(view), draws)
            for metric in metrics
            if scope.everybody or not metric.time_only
        }
    return out
