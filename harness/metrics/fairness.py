"""Fairness between tenants that all want more than they get."""

from __future__ import annotations

from harness.metrics.base import Metric
from harness.metrics.pool import View
from harness.stats.measures import Measure, Nothing


def _jain(view: View) -> Measure:
    pool = view.pool
    inside = (pool.jain_blocks >= view.span.start) & (pool.jain_blocks < view.span.stop)
    values = pool.jain[inside]
    if len(values) == 0:
        return Nothing("no 5 s window had two tenants waiting all through it")
    return view.ratio(values, pool.jain_blocks[inside] - view.span.start, None, len(values))


METRICS: tuple[Metric, ...] = (
    Metric(
        "jain_index",
        "ratio",
        "Jain's index over tenants that had a request waiting at every moment of a 5 s window, on service (uncached "
        "prompt + output tokens) over weight, averaged over windows with two such tenants or more.",
        "higher",
        _jain,
        time_only=True,
    ),
)
