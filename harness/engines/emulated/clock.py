"""The real clock, as the executor wants it."""

from __future__ import annotations

import time
from array import array
from typing import Any


class WallClock:
    """CLOCK_MONOTONIC. Waiting is done by sleeping on the caller's thread.

    A thread of its own would fight the engine's loop for the interpreter lock, which it gives up every 5 ms only.

    Attributes:
        late_ns: for each wait, how long after its time it came back: the system's tardiness if it slept, and the
            engine's own if it asked when the time was over already.
    """

    def __init__(self) -> None:
        self.late_ns: array[Any] = array("q")

    @property
    def now_ns(self) -> int:
        """The time, ns."""
        return time.monotonic_ns()

    def advance_to(self, t_ns: int) -> None:
        """Sleep until `t_ns`, unless it is over."""
        now_ns = time.monotonic_ns()
        if now_ns < t_ns:
            time.sleep((t_ns - now_ns) / 1e9)
            now_ns = time.monotonic_ns()
        self.late_ns.append(now_ns - t_ns)
