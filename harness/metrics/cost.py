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


METRICS: tuple[Metric, ...] = (
    Metric(
        "gpu_s_per_1k_tokens",
        "s",
        "GPU-busy seconds within the measured phases per 1,000 output tokens received in them.",
        "lower",
        _gpu_s,
        time_only=True,
    ),
)
