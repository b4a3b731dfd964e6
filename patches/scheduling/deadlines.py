"""Deadlines of requests, and the moments at which something becomes of them: one heap, O(log n) an event."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any

# Added to the key of a request that is late: behind every one that is not, however far off its deadline.
LATE_S = 1e9

#: Upper bounds of the slack histogram, as shares of the promise; the last bucket has none.
SLACK_BOUNDS = (-1.0, 0.0, 0.25, 0.5, 0.75)


@dataclass(slots=True)
class Due:
    """One request's promise.

    Attributes:
        slo_s: seconds from arrival in which its first token is due.
        deadline_s: on the scheduler's clock.
        late: whether it can no longer be kept, or was not; it stays so.
        feasible: whether it could be kept when the request came, had nobody else been there.
        request: the vLLM request.
    """

    slo_s: float
    deadline_s: float
    feasible: bool
    request: Any
    late: bool = False

    def key(self) -> float:
        """Earliest deadline first; those that are late behind all others."""
        return self.deadline_s + LATE_S if self.late else self.deadline_s


class Alarms:
    """(when, request id) pairs by time; what is no longer wanted is dropped when it comes up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, when_s: float, request_id: str) -> None:
        """Wake at this time; one at infinity never comes and is not kept."""
        if when_s < math.inf:
            self._count += 1
            heapq.heappush(self._heap, (when_s, self._count, request_id))

    def due(self, now: float) -> list[str]:
        """Ids whose time has come, in order."""
        heap, out = self._heap, []
        while heap and heap[0][0] <= now:
            out.append(heapq.heappop(heap)[2])
        return out

    def compact(self, wanted: dict[str, Any]) -> None:
        """Drop alarms of requests that are gone, once they are the larger part."""
        if len(self._heap) > 64 + 4 * len(wanted):
            self._heap = [item for item in self._heap if item[2] in wanted]
            heapq.heapify(self._heap)


class SlackCounts:
    """How many first tokens came with how much of the promise left."""

    def __init__(self, context: Any, prefix: str) -> None:
        self._counts = [0] * (len(SLACK_BOUNDS) + 1)
        names = [f"below_{bound:g}".replace("-", "minus_").replace(".", "_") for bound in SLACK_BOUNDS]
        for index, name in enumerate([*names, "above"]):
            context.gauge(f"{prefix}_slack_{name}", lambda index=index: float(self._counts[index]))

    def add(self, slack_share: float) -> None:
        """Count one; a slack below 0 is a miss."""
        for index, bound in enumerate(SLACK_BOUNDS):
            if slack_share < bound:
                self._counts[index] += 1
                return
        self._counts[-1] += 1
