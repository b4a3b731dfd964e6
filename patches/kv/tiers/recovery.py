"""How preempted requests come back: what they compute again, and how long that takes."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass


class _Percentiles:
    """Of the first `kept` values, by nearest rank; O(1) to read."""

    def __init__(self, kept: int) -> None:
        self._sorted: list[float] = []
        self._kept = kept
        self.p50 = 0.0
        self.p99 = 0.0

    def add(self, value: float) -> None:
        """One more."""
        count = len(self._sorted) + 1
        if count > self._kept:
            return
        insort(self._sorted, value)
        self.p50 = self._sorted[(count - 1) // 2]
        self.p99 = self._sorted[-(-99 * count // 100) - 1]


@dataclass(slots=True)
class _Lost:
    tokens: int
    picked_s: float | None = None
    restored: bool = False


class Recoveries:
    """Each preemption from the loss of the blocks to the next token.

    Both times count from when the request got its blocks again (before a load): what it waited in the queue for
    them is the scheduler's doing, not this patch's. `restore` ends with the pass that gives it tokens, and
    has the load that holds up that pass added; `recovery` ends with the next token.
    """

    def __init__(self, kept: int = 4096) -> None:
        self._lost: dict[str, _Lost] = {}
        self._recovery, self._restore = _Percentiles(kept), _Percentiles(kept)
        self._within_step_s: dict[str, float] = {}
        self.preempted = 0
        self.lost_tokens = 0
        self.recomputed_tokens = 0

    def on_preempt(self, request_id: str, computed_tokens: int) -> None:
        """Its blocks are freed; so many tokens were in them."""
        before = self._lost.get(request_id)
        # Preempted again before it got as far: the loss is still the larger one, and was counted.
        tokens = max(computed_tokens, before.tokens if before is not None else 0)
        self._lost[request_id] = _Lost(tokens)
        self.preempted += 1
        if before is None:
            self.lost_tokens += tokens

    def on_pick(self, request_id: str, found_tokens: int, now_s: float) -> None:
        """It got blocks again, and so many tokens' KV is in them or on its way."""
        lost = self._lost.get(request_id)
        if lost is not None and lost.picked_s is None:
            lost.picked_s = now_s
            self.recomputed_tokens += max(0, lost.tokens - found_tokens)

    def on_load_within_step(self, request_id: str, seconds: float) -> None:
        """A load of that length will hold up the step in which it runs."""
        if request_id in self._lost:
            self._within_step_s[request_id] = seconds

    def on_scheduled(self, tokens: Mapping[str, int], now_s: float) -> None:
        """A pass gave tokens to these."""
        for request_id, lost in self._lost.items():
            if lost.picked_s is not None and not lost.restored and request_id in tokens:
                lost.restored = True
                within_s = self._within_step_s.pop(request_id, 0.0)
                self._restore.add((now_s - lost.picked_s + within_s) * 1e3)

    def on_token(self, request_id: str, now_s: float) -> None:
        """It produced a token."""
        lost = self._lost.get(request_id)
        if lost is None or lost.picked_s is None:
            # Output of a step that was under way when it was preempted.
            return
        del self._lost[request_id]
        self._recovery.add((now_s - lost.picked_s) * 1e3)

    def forget(self, request_id: str) -> None:
        """It ended."""
        self._lost.pop(request_id, None)
        self._within_step_s.pop(request_id, None)

    @property
    def recovery_ms(self) -> tuple[float, float]:
        """Median and 99th percentile to the next token; 0 before there is one."""
        return self._recovery.p50, self._recovery.p99

    @property
    def restore_ms(self) -> tuple[float, float]:
        """Median and 99th percentile to the pass with its KV in place; 0 before there is one."""
        return self._restore.p50, self._restore.p99

    def __bool__(self) -> bool:
        """Whether somebody is on the way back."""
        return bool(self._lost)
