"""Throughput: tokens are credited to the phase in which they are received."""

from __future__ import annotations

import numpy as np

from harness.metrics.base import Metric
from harness.metrics.pool import View
from harness.stats.measures import Measure, Nothing, Plain, Ratio


def _rate(view: View) -> Measure:
    if view.size == 0:
        return Nothing("no measured phase in this scope")
    tokens = view.tokens
    return Ratio(tokens, view.seconds, int(tokens.sum()))


def _peak(view: View) -> Measure:
    peak = view.pool.peak
    inside = (peak.blocks >= view.span.start) & (peak.blocks < view.span.stop)
    if not inside.any():
        return Nothing("no measured phase in this scope")
    rates = peak.tokens[inside] / peak.length_s[inside]
    return Plain(float(rates.max()), int(np.count_nonzero(inside)))


METRICS: tuple[Metric, ...] = (
    Metric(
        "output_tok_per_s",
        "tok/s",
        "Output tokens received within the measured phases, whenever their request was sent, per second of those "
        "phases; what arrives after the last phase's end (the drain) is not counted.",
        "higher",
        _rate,
    ),
    Metric(
        "output_tok_per_s_peak",
        "tok/s",
        "Highest rate of output tokens in one second; the seconds tile each measured phase, so it is never below "
        "the mean.",
        "neither",
        _peak,
        time_only=True,
    ),
)
