"""`qos` on plain objects, as its tests drive it."""

from __future__ import annotations

import math
from typing import Any

from patches.scheduling.qos import PATCH, QosKnobs
from patches.seam.patch import Hooks
from tests.scheduling.fakes import FakeContext, FakeRequest, FakeScheduler, scheduled

TOKENS_PER_S = 1000

#: A class that is better than any in these tests: what is in its line stands before everybody.
BEST = -100_000


class Policy:
    """`qos` on plain objects, its service rate known to be `TOKENS_PER_S` from 1 s on."""

    def __init__(self, **knobs: Any) -> None:
        self.knobs = QosKnobs(**{"preempt_cooldown_s": 0.0, "victim_prompt_tokens": 0, **knobs})
        self.scheduler = FakeScheduler()
        self.context = FakeContext(self.scheduler)
        self.hooks: Hooks = PATCH.build(self.knobs, self.context)  # type: ignore[arg-type]
        self.context.hooks = self.hooks
        self.serve(0, 0.0)
        self.serve(TOKENS_PER_S, 1.0)
        self._made = 0

    # what happens

    def serve(self, tokens: int, now: float, new: tuple[str, ...] = ()) -> None:
        """A step that was given `tokens` in all."""
        assert self.hooks.after_schedule
        self.hooks.after_schedule(scheduled({"any": tokens}, new=new), now)

    def run(self, victim: FakeRequest, admitted_s: float = 0.0) -> FakeRequest:
        """Let it come, and run since `admitted_s`."""
        self.key(victim, victim.queued_s)
        return self.admit(victim, admitted_s)

    def admit(self, waiting: FakeRequest, now: float, *, resumed: bool = False) -> FakeRequest:
        """Let a request that has its key run from `now` on."""
        if waiting in self.scheduler.queued:
            self.scheduler.queued.remove(waiting)
        self.scheduler.running.append(waiting)
        assert self.hooks.after_schedule
        names = (waiting.request_id,)
        self.hooks.after_schedule(scheduled({}, resumed=names) if resumed else scheduled({}, new=names), now)
        return waiting

    def wait(self, head: FakeRequest, now: float) -> FakeRequest:
        """Let it stand at the head of the queue; who stood there is gone."""
        for gone in self.scheduler.queued[:]:
            if gone is not head:
                self.finish(gone, now)
        self.key(head, now)
        self.scheduler.queued[:] = [head]
        return head

    def finish(self, request: FakeRequest, now: float) -> None:
        """It ends, wherever it is."""
        for where in (self.scheduler.queued, self.scheduler.running):
            if request in where:
                where.remove(request)
        assert self.hooks.on_finish
        self.hooks.on_finish(request, now)

    def preempt(self, request: FakeRequest, now: float) -> None:
        """Upstream takes its blocks."""
        self.context.now = now
        self.context.preempt(request)

    def evict(self, now: float) -> list[str]:
        """Ids that one pass takes out of the running list."""
        assert self.hooks.before_schedule
        self.context.now = now
        before = len(self.context.preempted)
        self.hooks.before_schedule(now)
        return [victim.request_id for victim in self.context.preempted[before:]]

    # what is seen

    def key(self, request: FakeRequest, now: float) -> tuple[float, float]:
        """Effective class and until when it holds (for ever: infinity)."""
        assert self.hooks.request_key
        value, until = self.hooks.request_key(request, now)
        return value, math.inf if until is None else until

    def line(self, tokens: int, now: float, priority: int = BEST) -> FakeRequest:
        """A request of so many tokens that waits; `finish` it to take it away."""
        self._made += 1
        waiting = FakeRequest(f"line{self._made}", priority, num_tokens=tokens, queued_s=now)
        self.key(waiting, now)
        self.scheduler.queued.append(waiting)
        return waiting

    def period_s(self, now: float, priority: int = 0) -> float:
        """The ageing period as a request that comes now meets it."""
        self._made += 1
        probe = FakeRequest(f"probe{self._made}", priority, queued_s=now)
        period = self.key(probe, now)[1] - now
        self.finish(probe, now)
        return period

    def line_tokens(self) -> dict[int, int]:
        """What the patch believes to wait, by class."""
        state: Any = self.hooks.request_key.__self__  # type: ignore[union-attr]
        return dict(state._line_tokens)
