"""Everything that the engines of a run wrote, as tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from harness.engines.live.telemetry import layout
from harness.engines.live.telemetry.reader import read_tape
from harness.engines.live.telemetry.tables import event_table, events_from, request_table, step_tables
from harness.errors import RunFailed


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What the engines of a run wrote; times are ns from the run's start.

    Attributes:
        steps: the table `steps` of `harness.schema`, in the order of scheduling.
        batches: more about each row of `steps` (`tables.BATCHES`).
        requests: what the scheduler knows of each request (`tables.ENGINE_REQUESTS`).
        events: the table `events` of `harness.schema`: preempt, resume, cache_reset; `request` is a row of `requests`.
        engines: header of each tape, oldest first: more than one is a restart, or data parallelism.
        faults: why an observer stopped or was never there; with one of them the telemetry is not complete.
    """

    steps: pa.Table
    batches: pa.Table
    requests: pa.Table
    events: pa.Table
    engines: tuple[dict[str, Any], ...]
    faults: tuple[str, ...]

    @property
    def overhead(self) -> float:
        """Time that went into noting steps, over the steps' own time; NaN without a step."""
        total_us = float(np.sum(self.batches["step_us"].to_numpy()))
        return float(np.sum(self.batches["telemetry_us"].to_numpy())) / total_us if total_us else float("nan")

    def window(self, begin_ns: int, end_ns: int) -> Telemetry:
        """What belongs to [begin_ns, end_ns): steps scheduled, requests queued and events in it.

        An event of a request that was queued before goes with its request.
        """
        steps = _within(self.steps["t_ns"], begin_ns, end_ns)
        requests = _within(self.requests["queued_ns"], begin_ns, end_ns)
        number = np.cumsum(requests) - 1
        events = [
            (*event[:2], None if event[2] is None else int(number[event[2]]), *event[3:])
            for event in zip(
                *(self.events[name].to_pylist() for name in self.events.column_names), strict=True
            )
            if begin_ns <= event[0] < end_ns and (event[2] is None or requests[event[2]])
        ]
        return replace(
            self,
            steps=self.steps.filter(pa.array(steps)),
            batches=self.batches.filter(pa.array(steps)),
            requests=self.requests.filter(pa.array(requests)),
            events=events_from(events),
        )


def collect(folder: Path, epoch_ns: int | None = None) -> Telemetry:
    """Read every tape in a folder, those of killed engines too.

    Args:
        folder: what PATCHBENCH_TELEMETRY named.
        epoch_ns: CLOCK_MONOTONIC at the run's start; by default what PATCHBENCH_EPOCH_NS said to each engine.

    Raises:
        RunFailed: there is neither a tape nor a reason for that, or one cannot be read.
    """
    paths = sorted(folder.glob(f"*{layout.SUFFIX}"))
    faults = [f"{path.name}: {path.read_text('utf-8').strip()}" for path in sorted(folder.glob("*.fault"))]
    if not paths and not faults:
        raise RunFailed(
            f"the engine left no telemetry in {folder}: it never got a request, or its process did not load the "
            "plugin; type `bench doctor`"
        )
    tapes = sorted(map(read_tape, paths), key=lambda tape: int(tape.header["created_ns"]))
    zeros_ns = [int(tape.header["epoch_ns"]) if epoch_ns is None else epoch_ns for tape in tapes]
    steps, batches = step_tables(tapes, zeros_ns)
    return Telemetry(
        steps=steps,
        batches=batches,
        requests=request_table(tapes, zeros_ns),
        events=event_table(tapes, zeros_ns),
        engines=tuple(tape.header for tape in tapes),
        faults=tuple(faults),
    )


def _within(column: pa.ChunkedArray, begin_ns: int, end_ns: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    times = column.to_numpy()
    return np.asarray((times >= begin_ns) & (times < end_ns), dtype=np.bool_)
