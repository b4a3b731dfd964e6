"""The long prompts that wait: who of them can still be in time, first come first served inside each tenant."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class Deadline:
    """A waiting long prompt: when its first token is due on the scheduler's clock (infinity: never)."""

    request: Any
    due_s: float
    tokens: int
    # Whether it was found to be late; then it is never offered a place again.
    late: bool = False

    def in_time(self, now: float, tokens_per_s: float) -> bool:
        """Whether it can meet its deadline if its prefill starts now at that rate; 0 is an unknown rate."""
        if self.due_s == math.inf:
            return True
        prefill_s = self.tokens / tokens_per_s if tokens_per_s else 0.0
        return now + prefill_s <= self.due_s


class LongLine:
    """Waiting long prompts by tenant. Each is looked at once when it leaves or is late: O(1) amortised."""

    def __init__(self) -> None:
        self._tokens = 0
        self._waiting: dict[str, Deadline] = {}
        self._lines: dict[str, deque[Deadline]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def join(self, request: Any, tenant: str, due_s: float) -> None:
        """It waits from now on."""
        entry = Deadline(request, due_s, request.num_tokens)
        self.leave(request.request_id)
        self._waiting[request.request_id] = entry
        self._tokens += entry.tokens
        self._lines.setdefault(tenant, deque()).append(entry)

    def leave(self, request_id: str) -> None:
        """It waits no more; nothing happens if it did not."""
        entry = self._waiting.pop(request_id, None)
        if entry is not None and not entry.late:
            self._tokens -= entry.tokens

    def get(self, request_id: str) -> Deadline | None:
        """Its entry, if it waits."""
        return self._waiting.get(request_id)

    def tokens_in_time(self, now: float, tokens_per_s: float) -> int:
        """Tokens of those that were not found to be late."""
        for _ in self.first_in_time(now, tokens_per_s):
            pass
        return self._tokens

    def first_in_time(self, now: float, tokens_per_s: float) -> Iterator[Any]:
        """Of each tenant the first that can still be in time; those before it, late or gone, are dropped."""
        for tenant in list(self._lines):
            line = self._lines[tenant]
            while line:
                entry = line[0]
                if self._waiting.get(entry.request.request_id) is entry:
                    if entry.in_time(now, tokens_per_s):
                        yield entry.request
                        break
                    entry.late = True
                    self._tokens -= entry.tokens
                line.popleft()
            else:
                del self._lines[tenant]
