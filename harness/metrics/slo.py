"""What became of the requests offered. A request is offered if it was to be sent in a measured phase."""

from __future__ import annotations

from harness.metrics.base import Metric, per_seed, share
from harness.metrics.pool import View
from harness.stats.measures import Measure, Nothing, Ratio


def _attainment(view: View) -> Measure:
    return view.ratio(1 - view.column("missed"), view.blocks, None, len(view.rows))


def _goodput(view: View) -> Measure:
    if view.size == 0 or len(view.rows) == 0:
        return Nothing("no request was offered in this scope")
    return Ratio(view.summed(view.column("met"), view.blocks), view.seconds, len(view.rows))


def _served_share(view: View) -> Measure:
    return view.ratio(1 - view.column("error"), view.blocks, None, len(view.rows))


_SEEDS = "counted per seed and averaged over the seeds"

METRICS: tuple[Metric, ...] = (
    Metric(
        "slo_attainment",
        "ratio",
        "Share of the requests offered that did not miss their TTFT promise: rejected, expired and failed ones "
        "are misses; one cancelled before its first token is a miss only if it had waited past the promise.",
        "higher",
        _attainment,
    ),
    Metric(
        "goodput_rps",
        "req/s",
        "Requests offered whose first token came within their TTFT promise, per second of the measured phases.",
        "higher",
        _goodput,
    ),
    Metric("offered", "count", f"Requests that were to be sent, {_SEEDS}.", "neither", per_seed("one")),
    Metric("rejected", "count", f"Requests refused on arrival, {_SEEDS}.", "lower", per_seed("rejected")),
    Metric(
        "expired", "count", f"Requests given up before they started, {_SEEDS}.", "lower", per_seed("expired")
    ),
    Metric("failed", "count", f"Requests that ended in an error, {_SEEDS}.", "lower", per_seed("failed")),
    Metric(
        "cancelled", "count", f"Requests that the client closed, {_SEEDS}.", "neither", per_seed("cancelled")
    ),
    Metric(
        "cancelled_unserved",
        "count",
        f"Requests that the client closed before their first token (censored: no TTFT sample), {_SEEDS}.",
        "neither",
        per_seed("censored"),
    ),
    Metric("rejection_rate", "ratio", "Rejected requests over offered ones.", "lower", share("rejected")),
    Metric(
        "error_rate",
        "ratio",
        "Rejected, expired and failed requests over offered ones.",
        "lower",
        share("error"),
    ),
    Metric(
        "served_share",
        "ratio",
        "Requests offered that were neither rejected, expired nor failed, over all offered.",
        "higher",
        _served_share,
    ),
)
