"""Measures the process that drives requests: when its event loop woke, and how long the collector held it up."""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from harness.engines.live.client.observed import Observed

SAMPLE_EVERY_S = 0.005
Samples = npt.NDArray[np.int64]


@dataclass(slots=True)
class Watch:
    """Measures one process while it drives requests: `with Watch() as watch: ...`, `watch.sample()` as a task.

    The collector is off inside: what lives is frozen, and cycles made meanwhile wait until the end.
    """

    due_ns: array[int] = field(default_factory=lambda: array("q"))
    woke_ns: array[int] = field(default_factory=lambda: array("q"))
    pauses_ns: array[int] = field(default_factory=lambda: array("q"))
    _begun_ns: int = 0
    _was_enabled: bool = False

    def __enter__(self) -> Watch:
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()
        gc.callbacks.append(self._collected)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._collected)
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    async def sample(self, epoch_ns: int) -> None:
        """Sleep for a short while, again and again, and note when the loop woke us; ends by being cancelled."""
        clock = time.monotonic_ns
        step_ns = round(SAMPLE_EVERY_S * 1e9)
        while True:
            due = clock() + step_ns
            try:
                await asyncio.sleep(SAMPLE_EVERY_S)
            finally:
                # cancelled in the middle of a stall, the last sample must not be lost
                if (now := clock()) >= due:
                    self.due_ns.append(due - epoch_ns)
                    self.woke_ns.append(now - epoch_ns)

    def _collected(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._begun_ns = time.monotonic_ns()
        else:
            self.pauses_ns.append(time.monotonic_ns() - self._begun_ns)


@dataclass(frozen=True, slots=True)
class LoopSamples:
    """One process's loop samples and collector pauses; ns from the run's start, shapes (samples,) and (pauses,)."""

    due_ns: Samples
    woke_ns: Samples
    pauses_ns: Samples

    @classmethod
    def of(cls, watch: Watch) -> LoopSamples:
        """Copies of what a watch holds."""
        parts = (watch.due_ns, watch.woke_ns, watch.pauses_ns)
        return cls(*(np.array(part, dtype=np.int64) for part in parts))

    @property
    def lag_ns(self) -> Samples:
        """How late each sample woke."""
        return self.woke_ns - self.due_ns

    def read_delay_ns(self, observed: Iterable[Observed]) -> Samples:
        """The lag around each first token, shape (requests with one,).

        A token read while a sample was overdue, or before the sample after it was due, may have waited as long as
        that sample did.
        """
        read = np.array([o.first_token_ns for o in observed if o.first_token_ns is not None], dtype=np.int64)
        if len(read) == 0 or len(self.due_ns) == 0:
            return np.zeros(len(read), dtype=np.int64)
        # the last sample that was due when the token was read, and no older than one that woke just before
        at = np.searchsorted(self.due_ns, read, side="right") - 1
        lag = self.lag_ns[np.maximum(at, 0)]
        near = (at >= 0) & (read <= self.woke_ns[np.maximum(at, 0)] + round(SAMPLE_EVERY_S * 1e9))
        return np.where(near, lag, 0)


def queued() -> float | None:
    """Seconds that this thread has waited for a core since it began; None where the kernel does not tell."""
    try:
        # Documentation/scheduler/sched-stats.rst: time on a core, time waiting for one (ns), slices
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None
