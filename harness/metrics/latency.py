"""Latencies of single requests, all from the intended send time."""

from __future__ import annotations

from harness.metrics.base import Metric, mean, percentile
from harness.metrics.pool import View
from harness.stats.measures import Measure, Percentile

_TTFT = "time from the intended send time to the first generated token, reasoning included"
_SAMPLES = "of requests that ended well, and of cancelled ones that saw a first token"
_OUTPUT = "time from the intended send time to the first token of visible output"
_TPOT = "time per output token: (last - first token's time) / (tokens - tokens of the first chunk)"
_E2E = "time from the intended send time to the last token"
_WAIT = "time from the intended send time to first scheduling, of requests that were scheduled"
_OK = "of requests that ended well"


def _gaps(percent: int) -> Metric:
    def measure(view: View) -> Measure:
        return Percentile(view.points("gaps"), percent)

    text = f"p{percent} of the gaps between neighbouring chunks of one request, {_OK}."
    return Metric(f"itl_ms_p{percent}", "ms", text, "lower", measure, latency=True)


def _percentiles(name: str, column: str, text: str, percents: tuple[int, ...]) -> list[Metric]:
    return [
        Metric(f"{name}_p{p}", "ms", f"p{p} of the {text}.", "lower", percentile(column, p), latency=True)
        for p in percents
    ]


def _short(name: str, column: str, text: str, percents: tuple[int, ...]) -> list[Metric]:
    return [
        Metric(
            f"{name}_p{p}",
            "ms",
            f"p{p} of the {text}; requests that the workload labels short.",
            "lower",
            percentile(column, p, short=True),
            latency=True,
        )
        for p in percents
    ]


METRICS: tuple[Metric, ...] = (
    *_percentiles("ttft_ms", "ttft_ms", f"{_TTFT}, {_SAMPLES}", (50, 90, 99)),
    Metric("ttft_ms_mean", "ms", f"Mean {_TTFT}, {_SAMPLES}.", "lower", mean("ttft_ms"), latency=True),
    *_percentiles("ttft_output_ms", "ttft_output_ms", f"{_OUTPUT}, {_SAMPLES}", (50, 99)),
    *_percentiles("tpot_ms", "tpot_ms", f"{_TPOT}, {_OK}", (50, 90, 99)),
    Metric("tpot_ms_mean", "ms", f"Mean {_TPOT}, {_OK}.", "lower", mean("tpot_ms"), latency=True),
    _gaps(50),
    _gaps(99),
    *_percentiles("e2e_ms", "e2e_ms", f"{_E2E}, {_OK}", (50, 90, 99)),
    Metric("e2e_ms_mean", "ms", f"Mean {_E2E}, {_OK}.", "lower", mean("e2e_ms"), latency=True),
    *_short("short_ttft_ms", "ttft_ms", f"{_TTFT}, {_SAMPLES}", (50, 90, 99)),
    Metric(
        "short_tpot_jitter_ms",
        "ms",
        "Standard deviation of the chunk gaps within a request, averaged over short requests that ended well.",
        "lower",
        mean("jitter_ms", short=True),
        latency=True,
    ),
    *_percentiles("queue_wait_ms", "queue_wait_ms", _WAIT, (50, 90, 99)),
    *_short("short_queue_wait_ms", "queue_wait_ms", _WAIT, (90, 99)),
    Metric(
        "send_delay_ms_p99",
        "ms",
        "p99 of the time by which the client sent later than intended; above 10 ms the run is INVALID.",
        "neither",
        percentile("send_delay_ms", 99),
    ),
)
