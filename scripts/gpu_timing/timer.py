"""Timing a list of launches: CUDA events around a captured graph, and a twin for the CPU.

Everything that needs a GPU to be tested is in `CudaTimer`; the rest of the package runs on a CPU unchanged.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Sample:
    """Median time of one launch, us; the middle half of the repeats spreads over `spread_pct` of it."""

    us: float
    spread_pct: float
    launches: int
    repeats: int
    how: str


class Timer(Protocol):
    """Times launches that do the same work on different memory.

    `not_captured` says why launches could not go into a graph, if any could not.
    """

    not_captured: list[str]

    def time(self, calls: Sequence[Call]) -> Sample:
        """Run them in order, several times over."""
        ...


class CudaTimer:
    """CUDA events around one replay of a graph that holds all the launches.

    Before each replay a buffer of twice the L2 cache is zeroed: the replay starts from a cold cache, and its
    own launch is hidden behind that kernel. Where a launch cannot be captured, it is queued behind a waiting
    kernel instead, which hides the launches as long as the queue is ahead.
    """

    def __init__(self, repeats: int, l2_bytes: int) -> None:
        # Capture is not allowed on the default stream, so all work of the process moves to another one.
        self._stream = torch.cuda.Stream()
        torch.cuda.set_stream(self._stream)
        self._scratch = torch.empty(max(2 * l2_bytes, 1 << 26) // 4, dtype=torch.int32, device="cuda")
        self._events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(repeats)
        ]
        self._flush()  # loads its kernel, which must not happen during a capture
        self._pool = torch.cuda.graph_pool_handle()
        # The pool lives as long as one graph does: this one is kept.
        self._anchor = self._captured([self._flush])
        self.not_captured: list[str] = []

    def time(self, calls: Sequence[Call]) -> Sample:
        """See `Timer`."""
        for call in calls[:2]:
            call()
        try:
            graph = self._captured(calls)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # Ending a capture that has failed fails too; what matters is the first.
            self.not_captured.append(str(error.__context__ or error).split("\n")[0])
            torch.cuda.synchronize()
            graph = None
        if graph is not None:
            graph.replay()  # uploads it
        for start, end in self._events:
            self._flush()
            if graph is None:
                torch.cuda._sleep(8_000_000)  # about 4 ms, in cycles
            start.record()
            if graph is None:
                for call in calls:
                    call()
            else:
                graph.replay()
            end.record()
        torch.cuda.synchronize()
        taken = [start.elapsed_time(end) * 1000.0 / len(calls) for start, end in self._events]
        return _sample(taken, len(calls), "graph" if graph is not None else "eager")

    def _flush(self) -> None:
        self._scratch.zero_()

    def _captured(self, calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
        return graph


class CpuTimer:
    """Wall clock: for trying the script, not for profiles."""

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats
        self.not_captured: list[str] = []

    def time(self, calls: Sequence[Call]) -> Sample:
        """See `Timer`."""
        calls[0]()
        taken = []
        for _ in range(self._repeats):
            start = time.perf_counter()
            for call in calls:
                call()
            taken.append((time.perf_counter() - start) * 1e6 / len(calls))
        return _sample(taken, len(calls), "wall clock")


def _sample(taken: Sequence[float], launches: int, how: str) -> Sample:
    middle = statistics.median(taken)
    quarters = statistics.quantiles(taken, n=4) if len(taken) > 1 else [middle] * 3
    return Sample(middle, 100.0 * (quarters[2] - quarters[0]) / middle, launches, len(taken), how)
