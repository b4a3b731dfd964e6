"""What a metric is: declared once, with the sentence that the report shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from harness.metrics.pool import Pool, View
from harness.stats.measures import Measure, Nothing, Percentile

Better = Literal["lower", "higher", "neither"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of the report.

    Attributes:
        name: with its unit in it where it has one (`ttft_ms_p99`).
        unit: ms, ratio, count, tok/s, req/s, tokens or s.
        definition: one sentence, shown in the report.
        better: the direction that counts as a win; `neither` describes the traffic or the server's state.
        measure: from one scope's view of an arm to something that can be resampled.
        time_only: belongs to the whole server, so it exists for scopes of time alone, not for tenants.
        latency: measured on served requests only, so two arms that served different shares of the
            offered load cannot be ranked by it.
        known: whether an arm has what it takes; None where every arm does.
    """

    name: str
    unit: str
    definition: str
    better: Better
    measure: Callable[[View], Measure]
    time_only: bool = False
    latency: bool = False
    known: Callable[[Pool], bool] | None = None

    def __post_init__(self) -> None:
        if not self.definition.endswith("."):
            raise ValueError(f"metric {self.name}: the definition is a sentence")

    def of(self, view: View) -> Measure:
        """The measure in this scope."""
        if self.time_only and not view.scope.everybody:
            return Nothing("a figure of the whole server, not of a tenant")
        return self.measure(view)


def percentile(column: str, percent: int, *, short: bool = False) -> Callable[[View], Measure]:
    """A percentile over requests of one derived column; `short` leaves out requests not labelled short."""

    def measure(view: View) -> Measure:
        return Percentile(view.sample(column, short=short), percent)

    return measure


def mean(column: str, *, short: bool = False) -> Callable[[View], Measure]:
    """The mean over requests that have a value in one derived column."""

    def measure(view: View) -> Measure:
        sample = view.sample(column, short=short)
        return view.ratio(sample.values, sample.blocks, None, len(sample.values))

    return measure


def per_seed(column: str) -> Callable[[View], Measure]:
    """The sum over requests of one column, averaged over the seeds."""

    def measure(view: View) -> Measure:
        return view.per_seed(column)

    return measure


def share(column: str) -> Callable[[View], Measure]:
    """The sum of one column over the requests offered."""

    def measure(view: View) -> Measure:
        blocks = view.blocks
        return view.ratio(view.column(column), blocks, None, len(blocks))

    return measure
