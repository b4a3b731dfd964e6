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


#: The times that are kept of each recovery; see `Recoveries`.
PARTS = ("recovery", "own", "restore", "behind", "step")


@dataclass(slots=True)
class _Lost:
    """One that lost its blocks: how much was in them, how much it has again, and when it got how far, s."""

    tokens: int
    counted_tokens: int = 0
    again_tokens: int = 0
    picked_s: float | None = None
    scheduled_s: float | None = None
    begun_s: float | None = None
    within_s: float = 0.0


class Recoveries:
    """Each preemption, from the loss of the blocks until the request is further than it was.

    That is the end of the first pass after which it has computed all that it had and more: for one that was decoding its
    next token. The time until then, by whose it is:

    - queue: until it has blocks again. That is the scheduler's doing, and no part of the times here.
    - `restore`: from then on until its KV is in place: a load beside passes until a pass takes it up, a load that
      holds up its pass as long as it does.
    - `behind`: what was left, when it was taken up, of the pass that the GPU had been given before.
    - `step`: the passes with the request in them, mostly one, and whatever else is in them.

    `recovery` is all three, `own` is without `behind`: that is a wait for the GPU as the queue is one.
    """

    def __init__(self, kept: int = 4096) -> None:
        self._lost: dict[str, _Lost] = {}
        self._times = {name: _Percentiles(kept) for name in PARTS}
        self._ended_s = 0.0
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
        else:
            # Of what was to be computed again it did not get to these, and they will be counted when it is back.
            self.recomputed_tokens -= min(before.counted_tokens, max(0, before.tokens - computed_tokens))

    def on_pick(self, request_id: str, found_tokens: int, now_s: float) -> None:
        """It got blocks again, and so many tokens' KV is in them or on its way."""
        lost = self._lost.get(request_id)
        if lost is not None and lost.picked_s is None:
            lost.picked_s = now_s
            lost.again_tokens = found_tokens
            lost.counted_tokens = max(0, lost.tokens - found_tokens)
            self.recomputed_tokens += lost.counted_tokens

    def on_load_within_step(self, request_id: str, seconds: float) -> None:
        """A load of that length will hold up the step in which it runs."""
        lost = self._lost.get(request_id)
        if lost is not None:
            lost.within_s = seconds

    def on_scheduled(self, tokens: Mapping[str, int], now_s: float) -> None:
        """A pass gave tokens to these."""
        for request_id, lost in self._lost.items():
            if lost.picked_s is not None and lost.scheduled_s is None and request_id in tokens:
                lost.scheduled_s = now_s

    def on_pass_ended(self, tokens: Mapping[str, int], now_s: float) -> None:
        """The GPU is done with a pass, which gave tokens to these; to be called for each."""
        for request_id, lost in list(self._lost.items()):
            # What ran before it was taken up again was under way when it was preempted.
            if lost.scheduled_s is None or request_id not in tokens:
                continue
            if lost.begun_s is None:
                lost.begun_s = max(lost.scheduled_s, self._ended_s)
            lost.again_tokens += tokens[request_id]
            if lost.again_tokens > lost.tokens:
                self._recovered(request_id, lost, lost.begun_s, now_s)
        self._ended_s = now_s

    def _recovered(self, request_id: str, lost: _Lost, begun_s: float, now_s: float) -> None:
        del self._lost[request_id]
        assert lost.picked_s is not None and lost.scheduled_s is not None
        all_s, behind_s = now_s - lost.picked_s, begun_s - lost.scheduled_s
        restore_s = lost.scheduled_s - lost.picked_s + lost.within_s
        parts_s = (all_s, all_s - behind_s, restore_s, behind_s, all_s - behind_s - restore_s)
        for part, seconds in zip(PARTS, parts_s, strict=True):
            self._times[part].add(seconds * 1e3)

    def forget(self, request_id: str) -> None:
        """It ended."""
        self._lost.pop(request_id, None)

    def ms(self, name: str) -> tuple[float, float]:
        """Median and 99th percentile of one of the times above; 0 before there is one."""
        return self._times[name].p50, self._times[name].p99

    def __bool__(self) -> bool:
        """Whether somebody is on the way back."""
        return bool(self._lost)
