"""Sampling on a fixed grid of time, and how well it was kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


class Source(Protocol):
    """What is sampled: `nvml.Device`."""

    def read(self, clock: Callable[[], int], epoch_ns: int, due_ns: int) -> dict[str, Any]:
        """One row."""


class Sink(Protocol):
    """Where rows go: `writer.Writer`."""

    def add(self, rows: list[dict[str, Any]], now_ns: int) -> None:
        """Take rows."""


@dataclass(slots=True)
class Conduct:
    """How the sampler kept to its grid. `late_ns` has one value a tick; `missed` ticks had no sample at all."""

    ticks: int = 0
    missed: int = 0
    late_ns: list[int] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        """Ticks, missed ticks, and the median, 99th percentile and maximum of the lateness, ms."""
        late = np.asarray(self.late_ns or [0]) / 1e6
        return {
            "ticks": self.ticks,
            "missed": self.missed,
            "late_p50_ms": float(np.percentile(late, 50)),
            "late_p99_ms": float(np.percentile(late, 99)),
            "late_max_ms": float(late.max()),
        }


def sample(
    sources: Sequence[Source],
    sink: Sink,
    *,
    clock: Callable[[], int],
    wait: Callable[[int], bool],
    period_ns: int,
    epoch_ns: int,
    ready: Callable[[], None] = lambda: None,
) -> Conduct:
    """Sample until told to stop, once at the start and once more at the stop.

    Args:
        clock: the host's monotonic clock, ns.
        wait: sleeps until a time of that clock; true where sampling is to end instead.
        period_ns: between two ticks. A tick that comes too late to be worth it is missed, not made up for.
        epoch_ns: where the run's clock starts.
        ready: called when the first samples are taken, so that a window that opens later is covered.
    """
    conduct = Conduct()
    due = clock()
    ended = False
    while True:
        now = clock()
        conduct.late_ns.append(now - due)
        sink.add([source.read(clock, epoch_ns, due - epoch_ns) for source in sources], now)
        conduct.ticks += 1
        if conduct.ticks == 1:
            ready()
        if ended:
            return conduct
        due += period_ns
        if (behind := clock() - due) >= period_ns:
            conduct.missed += behind // period_ns
            due += behind // period_ns * period_ns
        if wait(due):
            # the last sample closes the window, whenever that was
            ended, due = True, clock()
