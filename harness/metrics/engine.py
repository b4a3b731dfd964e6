"""The engine's steps: how long, how full, how deep the queue."""

from __future__ import annotations

from collections.abc import Callable

from harness.metrics.base import Metric
from harness.metrics.pool import View
from harness.stats.measures import Measure, Nothing, Percentile, Ratio


def _steps(name: str, percent: int) -> Callable[[View], Measure]:
    def measure(view: View) -> Measure:
        return Percentile(view.steps(name), percent)

    return measure


def _busy(view: View) -> Measure:
    if view.size == 0:
        return Nothing("no measured phase in this scope")
    return Ratio(view.pool.busy_ns[view.span] / 1e9, view.seconds, len(view.steps("step_ms").values))


METRICS: tuple[Metric, ...] = (
    Metric(
        "step_ms_p50",
        "ms",
        "p50 of the GPU time of a step; longer steps may carry more tokens.",
        "neither",
        _steps("step_ms", 50),
        time_only=True,
    ),
    Metric(
        "step_ms_p99",
        "ms",
        "p99 of the GPU time of a step.",
        "neither",
        _steps("step_ms", 99),
        time_only=True,
    ),
    Metric(
        "running_p50",
        "requests",
        "p50 over steps of running requests.",
        "neither",
        _steps("running", 50),
        True,
    ),
    Metric(
        "waiting_p50",
        "requests",
        "p50 over steps of waiting requests, held ones included.",
        "neither",
        _steps("waiting", 50),
        True,
    ),
    Metric(
        "waiting_p99",
        "requests",
        "p99 over steps of waiting requests, held ones included.",
        "neither",
        _steps("waiting", 99),
        True,
    ),
    Metric(
        "gpu_busy_share",
        "ratio",
        "Share of the measured phases in which the GPU computed a step.",
        "neither",
        _busy,
        time_only=True,
    ),
)
