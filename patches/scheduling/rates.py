"""A running rate, as several scheduling patches need it."""

from __future__ import annotations

import math


class Rate:
    """Exponentially weighted rate of something counted at irregular times.

    `horizon_s` is the time constant: what happened that long ago weighs 1/e. An amount is taken as
    spread evenly over the time since the last one, so a constant rate is met exactly at any interval,
    and the weight of the time that has passed normalises it, so the first seconds are not biased.
    """

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._amount = 0.0
        self._weight_s = 0.0
        self._pending = 0.0
        self._last_s: float | None = None

    def add(self, amount: float, now_s: float) -> None:
        """Count `amount` at `now_s`; the very first one only starts the clock."""
        if self._last_s is None:
            self._last_s = now_s
            return
        self._pending += amount
        elapsed_s = now_s - self._last_s
        if elapsed_s <= 0:
            return
        decay = math.exp(-elapsed_s / self._horizon_s)
        gained_s = self._horizon_s * (1 - decay)
        self._amount = self._amount * decay + self._pending / elapsed_s * gained_s
        self._weight_s = self._weight_s * decay + gained_s
        self._pending = 0.0
        self._last_s = now_s

    @property
    def per_s(self) -> float:
        """Amount per second; 0 before any time has passed."""
        return self._amount / self._weight_s if self._weight_s > 0 else 0.0
