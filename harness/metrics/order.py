"""Who was served before whom: overtaking, the longest waits, and the first seconds of a run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from harness.metrics.base import Metric, percentile
from harness.metrics.pool import View
from harness.stats.measures import Measure, Nothing, Plain


def _longest(column: str) -> Callable[[View], Measure]:
    def measure(view: View) -> Measure:
        values = view.column(column)
        values = values[~np.isnan(values)]
        if not len(values):
            return Nothing("no request of this scope was admitted")
        return Plain(float(values.max()), len(values))

    return measure


METRICS: tuple[Metric, ...] = (
    Metric(
        "overtakes_max",
        "count",
        "The most requests of equal priority that were sent later than one request and admitted before it.",
        "lower",
        _longest("overtakes"),
    ),
    Metric(
        "queue_wait_ms_max",
        "ms",
        "The longest time from the intended send time to first scheduling, of requests that were scheduled.",
        "lower",
        _longest("queue_wait_ms"),
        latency=True,
    ),
    *(
        Metric(
            f"cold_ttft_ms_p{percent}",
            "ms",
            f"p{percent} of the TTFT of requests that were to be sent in the first 10 s of the measured phases, as for "
            "ttft_ms.",
            "lower",
            percentile("cold_ttft_ms", percent),
            latency=True,
        )
        for percent in (90, 99)
    ),
    Metric(
        "finished_ttft_ms_p50",
        "ms",
        "p50 of the TTFT of requests that ended well: of a completion session, the keystroke that nothing cancelled.",
        "lower",
        percentile("finished_ttft_ms", 50),
        latency=True,
    ),
)
