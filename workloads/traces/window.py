"""A stretch of a trace, cut while its file is read."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from harness.errors import UserError
from workloads.traces.row import TraceRow
from workloads.traces.source import TraceSource
from workloads.traces.values import NS_PER_S


@dataclass(frozen=True, slots=True)
class Window:
    """From so many seconds after the trace's earliest request, for so many; None: to its end.

    `limit` reads only that many rows of the file, before anything else.
    """

    from_s: float = 0.0
    seconds: float | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.from_s) and self.from_s >= 0):
            raise UserError(
                f"the window begins at {self.from_s:g} s; use 0 or a number of seconds after the trace's start"
            )
        if self.seconds is not None and not (math.isfinite(self.seconds) and self.seconds > 0):
            raise UserError(f"a window of {self.seconds:g} s has no length; use a number of seconds above 0")

    @property
    def start_ns(self) -> int:
        """Its begin, ns after the trace's."""
        return round(self.from_s * NS_PER_S)

    @property
    def end_ns(self) -> int | None:
        """Its end, ns after the trace's begin; None: the trace's own."""
        return None if self.seconds is None else self.start_ns + round(self.seconds * NS_PER_S)


@dataclass(slots=True)
class Scan:
    """What one reading of the file showed.

    Attributes:
        rows: rows that were read.
        first_ns, last_ns: earliest and latest arrival of all rows, as the format counts.
        out_of_order: rows that are earlier than the one before them.
        tally: what the reader changed or left out.
    """

    rows: int = 0
    first_ns: int = 0
    last_ns: int = 0
    out_of_order: int = 0
    tally: Counter[str] = field(default_factory=Counter)

    @property
    def span_s(self) -> float:
        """From the earliest request to the latest, s."""
        return (self.last_ns - self.first_ns) / NS_PER_S


class Taker(Protocol):
    """What is done with each row of the window."""

    def add(self, row: TraceRow) -> None:
        """One row, in the file's order."""


T = TypeVar("T", bound=Taker)


def read_window(source: TraceSource, window: Window, begin: Callable[[], T]) -> tuple[T, Scan]:
    """Read the file and hand each row of the window to what `begin` makes.

    The whole file is read, since a later row may be the earliest; where one is, the file is read again.

    Raises:
        UserError: for a row that is none, a file without any, or a window without any.
    """
    start_ns: int | None = None
    begin_ns, end_ns = window.start_ns, sys.maxsize if window.end_ns is None else window.end_ns
    while True:
        taker, scan = begin(), Scan()
        held = False
        before = 0
        for row in source.rows(scan.tally, window.limit):
            at_ns = row.arrival_ns
            if scan.rows == 0:
                scan.first_ns = scan.last_ns = before = at_ns
                if start_ns is None:
                    start_ns = at_ns
            scan.rows += 1
            if at_ns < before:
                scan.out_of_order += 1
                scan.first_ns = min(scan.first_ns, at_ns)
            elif at_ns > scan.last_ns:
                scan.last_ns = at_ns
            before = at_ns
            if begin_ns <= at_ns - (start_ns or 0) < end_ns:
                held = True
                taker.add(row)
        if scan.rows == 0:
            raise UserError(f"{source.path}: no request in it that could be sent; is the file complete?")
        if start_ns != scan.first_ns:
            start_ns = scan.first_ns
            continue
        if not held:
            end = "the end" if window.seconds is None else f"{window.from_s + window.seconds:g} s"
            raise UserError(
                f"{source.path}: no request between {window.from_s:g} s and {end} of the trace, which spans "
                f"{scan.span_s:,.1f} s; choose another window"
            )
        return taker, scan
