"""A running rate, as several scheduling patches need it."""

from __future__ import annotations

import math


class Rate:
    """Exponentially weighted rate of something counted at irregular times.

    `horizon_s` is the time constant: what happened that long ago weighs 1/e. The weight of the time
    that has passed normalises it, so that the first seconds are not biased towards zero.
    """

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._amount = 0.0
        self._time = 0.0
        self._last_s: float | None = None

    def add(self, amount: float, now_s: float) -> None:
        """Count `amount` at `now_s`."""
        if self._last_s is None:
            self._last_s = now_s
            return
        elapsed_s = now_s - self._last_s
        if elapsed_s > 0:
            decay = math.exp(-elapsed_s / self._horizon_s)
            self._amount *= decay
            self._time = self._time * decay + elapsed_s
            self._last_s = now_s
        self._amount += amount

    @property
    def per_s(self) -> float:
        """Amount per second; 0 before any time has passed."""
        return self._amount / self._time if self._time > 0 else 0.0
