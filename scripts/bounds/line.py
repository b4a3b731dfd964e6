"""The least wait that any order of the same work allows: how many must be late for a limit, and the least limit."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def percentile(values: Floats, percent: float) -> float:
    """Nearest rank."""
    return float(np.sort(values)[max(0, int(np.ceil(percent / 100 * len(values))) - 1)])


def beyond(count: int, percent: float = 99) -> int:
    """How many of so many lie beyond that percentile, by nearest rank."""
    return count - max(1, int(np.ceil(percent / 100 * count))) if count else 0


def fewest_late(due_s: Floats, work: Floats, done_by_due: Floats, may_be_late: Bools) -> int:
    """How many must be late, whatever the order, if all is there from the start (Moore 1968).

    Args:
        due_s: when each is due.
        work: what each needs.
        done_by_due: all the work that can be done by then; it rises with `due_s`.
        may_be_late: False for those that are in time whatever it costs the others.
    """
    kept: list[float] = []
    total, late = 0.0, 0
    for index in np.argsort(due_s, kind="stable"):
        total += float(work[index])
        if may_be_late[index]:
            heapq.heappush(kept, -float(work[index]))
        while kept and total > done_by_due[index] * (1 + 1e-9):
            total += heapq.heappop(kept)
            late += 1
        # Those that must be in time were so in the run: what is over then is rounding.
        total = min(total, max(float(done_by_due[index]), 0.0))
    return late


def least_limit(late: Callable[[float], float], allowed: float, high: float) -> float:
    """The least limit beyond which no more than `allowed` must be, between 0 and `high`, to a part in 500."""
    low = 0.0
    while high - low > high / 500:
        middle = (low + high) / 2
        if late(middle) <= allowed:
            high = middle
        else:
            low = middle
    return low


def busy_periods(arrival_s: Floats, work_s: Floats) -> list[slice]:
    """Stretches in which one server is never idle, in order of arrival; they are the same whatever its order."""
    periods, begin, free_s = [], 0, -np.inf
    for index, (arrives, needs) in enumerate(zip(arrival_s, work_s, strict=True)):
        if index and arrives >= free_s:
            periods.append(slice(begin, index))
            begin = index
        free_s = max(free_s, arrives) + needs
    if len(arrival_s):
        periods.append(slice(begin, len(arrival_s)))
    return periods


def burst_limit_s(bursts: list[tuple[Floats, Floats]], before_s: Floats, allowed: float) -> float:
    """The least p99 of those who come in bursts to one server.

    Args:
        bursts: arrivals and work, both in seconds, of each busy period.
        before_s: what passes before their own work and cannot be used for it, each value as likely as the others.
        allowed: how many may be beyond it.
    """

    def late(limit_s: float) -> float:
        missed = 0
        for arrival_s, work_s in bursts:
            everybody = np.ones(len(work_s), dtype=bool)
            for before in before_s:
                due_s = arrival_s - arrival_s[0] + limit_s - before
                missed += fewest_late(due_s, work_s, due_s, everybody)
        return missed / len(before_s)

    longest_s = max((float(arrival_s[-1] - arrival_s[0] + work_s.sum()) for arrival_s, work_s in bursts))
    return least_limit(late, allowed, longest_s + float(before_s.max()))
