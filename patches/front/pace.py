"""How soon a place is free again, from what a server has answered lately: the Retry-After of vLLM's own refusals.

The engine's backlog is not known in this process, but what it lets go of is: answers that came through.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from patches.seam.endings import MAX_RETRY_AFTER_S

_HORIZON_S = 10.0


class Pace:
    """Answers a second, and those who were turned away and will be back; forgotten over ten seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s = self._last_s = clock()
        self._served = self._refused = 0.0

    def served(self) -> None:
        """An answer came through."""
        self._decay()
        self._served += 1

    def refused(self) -> int:
        """One is turned away: seconds until a place should be free for it, and for those turned away before it."""
        self._decay()
        self._refused += 1
        seen_s = self._last_s - self._since_s
        # Decayed counts stand for the time constant, once that has passed.
        per_s = self._served / min(_HORIZON_S, seen_s) if seen_s > 0 else 0.0
        return math.ceil(max(1.0, min(self._refused / per_s, MAX_RETRY_AFTER_S))) if per_s else 1

    def _decay(self) -> None:
        now = self._clock()
        kept = _HORIZON_S / (_HORIZON_S + now - self._last_s)
        self._served *= kept
        self._refused *= kept
        self._last_s = now
