"""What the output cost."""

from __future__ import annotations

from harness.metrics.base import Metric
from harness.metrics.pool import View
from harness.stats.measures import Measure, Nothing, Ratio


def _gpu_s(view: View) -> Measure:
    tokens = view.tokens
    if tokens.sum() == 0:
        return Nothing("no output token was received in this scope")
    return Ratio(view.pool.busy_ns[view.span] / 1e9, tokens / 1000, int(tokens.sum()))


def _joules(view: View) -> Measure:
    tokens = view.tokens
    if view.pool.joules is None:
        return Nothing("no GPU was sampled")
    if view.pool.no_joules:
        return Nothing(f"the energy is not valid: {view.pool.no_joules}")
    if tokens.sum() == 0:
        return Nothing("no output token was received in this scope")
    return Ratio(view.pool.joules[view.span], tokens, int(tokens.sum()))


METRICS: tuple[Metric, ...] = (
    Metric(
        "gpu_s_per_1k_tokens",
        "s",
        "GPU-busy seconds within the measured phases per 1,000 output tokens received in them.",
        "lower",
        _gpu_s,
        time_only=True,
    ),
    Metric(
        "joules_per_output_token",
        "J",
        "Energy of the run's GPUs within the measured phases, by the driver's counter, per output token received in "
        "them (live runs on a GPU).",
        "lower",
        _joules,
        time_only=True,
        known=lambda pool: pool.joules is not None,
    ),
)
