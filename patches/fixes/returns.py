"""How soon does somebody who broke off come back? Intervals by tenant, in bounded memory."""

from __future__ import annotations

from collections import deque

_MOST_INTERVALS = 64
_LEAST_INTERVALS = 8


class Typist:
    """One tenant: how many of its requests are broken off, and how soon it goes on after one that was, and was not."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._ends: deque[bool] = deque(maxlen=_MOST_INTERVALS)
        self.returns = {cancelled: Returns(first_s, most_s) for cancelled in (False, True)}

    def ended(self, cancelled: bool) -> None:
        """A request ended, by its client's wish or by itself."""
        self._ends.append(cancelled)

    @property
    def cancelled_share(self) -> float:
        """Share of the latest requests that were broken off; 0 before there are a few."""
        return sum(self._ends) / len(self._ends) if len(self._ends) >= _LEAST_INTERVALS else 0.0


class Returns:
    """One tenant's intervals from an ending to the request that went on from there.

    Args:
        first_s: what is assumed before enough came back. most_s: the longest that is ever said.
    """

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._intervals: deque[float] = deque(maxlen=_MOST_INTERVALS)

    def returned(self, after_s: float) -> None:
        """Somebody went on from where a request had ended so long ago."""
        self._intervals.append(after_s)

    def spare_s(self) -> float:
        """How long an ending is worth waiting for: twice the interval within which nine of ten came back."""
        if len(self._intervals) < _LEAST_INTERVALS:
            return min(self._first_s, self._most_s)
        ordered = sorted(self._intervals)
        return min(2 * ordered[len(ordered) * 9 // 10], self._most_s)
