"""The clock that everything inside the virtual engine reads."""

from __future__ import annotations

import heapq
import sys
import time as _real_time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_NS = 1_000_000_000
# vLLM treats some timestamps as "unset" when they are falsy, so its clock does not start at zero.
EPOCH_S = 1_000


# Parts of vLLM whose clocks belong to the engine. The second is the scheduler's side of KV offloading.
_CLOCKED = ("vllm.v1", "vllm.distributed.kv_transfer.kv_connector.v1.offloading")


class VirtualClock:
    """Integer nanoseconds since the run's start; moves only when told to.

    Events registered with `at` fire in time order (ties in order of registration) while the clock
    advances over them, so that arrivals and cancellations happen during a step, not after it.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._registered = 0

    def at(self, t_ns: int, action: Callable[[], None]) -> None:
        """Run `action` when the clock reaches `t_ns`; at once on the next advance if that is past."""
        heapq.heappush(self._events, (t_ns, self._registered, action))
        self._registered += 1

    @property
    def next_event_ns(self) -> int | None:
        """When the next event is due, or None if there is none."""
        return self._events[0][0] if self._events else None

    def advance_to(self, t_ns: int) -> None:
        """Move to `t_ns` and fire what is due on the way; never moves back."""
        events = self._events
        while events and events[0][0] <= t_ns:
            due_ns, _, action = heapq.heappop(events)
            if due_ns > self.now_ns:
                self.now_ns = due_ns
            action()
        if t_ns > self.now_ns:
            self.now_ns = t_ns

    def seconds(self) -> float:
        """The time as vLLM's `time.time()` and `time.monotonic()` show it."""
        return EPOCH_S + self.now_ns / _NS


class _TimeModule(ModuleType):
    """Stands in for the module `time` inside vLLM: its clocks are virtual, the rest is the real one."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__("time")
        self._clock = clock
        self.time = self.monotonic = self.perf_counter = clock.seconds
        self.time_ns = self.monotonic_ns = self.perf_counter_ns = self._nanoseconds

    def _nanoseconds(self) -> int:
        return EPOCH_S * _NS + self._clock.now_ns

    def sleep(self, seconds: float) -> None:
        """Sleeping is how the engine waits: it moves the clock and takes no real time."""
        self._clock.advance_to(self._clock.now_ns + round(seconds * _NS))

    def __getattr__(self, name: str) -> Any:
        return getattr(_real_time, name)


@contextmanager
def vllm_reads(clock: VirtualClock) -> Iterator[None]:
    """Make every loaded module of vLLM's engine read `clock`; restored on leaving.

    vLLM imports the module `time`, so replacing that global reaches each of its reads. A test walks
    over the loaded modules and fails if one keeps a real clock some other way.
    """
    replaced: list[tuple[ModuleType, str]] = []
    stand_in = _TimeModule(clock)
    try:
        for name, module in sorted(sys.modules.items()):
            if name.startswith(_CLOCKED) and getattr(module, "time", None) is _real_time:
                setattr(module, "time", stand_in)  # noqa: B010
                replaced.append((module, "time"))
        yield
    finally:
        for module, attribute in reversed(replaced):
            setattr(module, attribute, _real_time)
