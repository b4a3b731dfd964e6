"""`mlfq` on plain objects, as its tests drive it."""

from __future__ import annotations

from typing import Any

from patches.scheduling.mlfq import PATCH, MlfqKnobs
from patches.seam.patch import Hooks
from tests.scheduling.fakes import FakeContext, FakeRequest, FakeScheduler, scheduled

BOUNDS = {"level0_tokens": 128, "level1_tokens": 512, "level2_tokens": 2048}
KNOBS = {**BOUNDS, "last_level_free_share": 0.0}


class Policy:
    """`mlfq` on plain objects; blocks are plenty unless a test takes them away."""

    def __init__(self, **knobs: Any) -> None:
        self.scheduler = FakeScheduler()
        self.scheduler.free_blocks = self.scheduler.all_blocks
        self.context = FakeContext(self.scheduler)
        self.hooks: Hooks = PATCH.build(MlfqKnobs(**{**KNOBS, **knobs}), self.context)  # type: ignore[arg-type]
        self.context.hooks = self.hooks
        self.served: dict[str, int] = {}

    # what happens

    def add(self, name: str, prompt_tokens: int) -> FakeRequest:
        """It comes, and waits."""
        new = FakeRequest(name, num_prompt_tokens=prompt_tokens, num_tokens=prompt_tokens)
        assert self.hooks.on_add
        self.hooks.on_add(new, self.context.now)
        self.scheduler.queued.append(new)
        return new

    def enter(self, waiting: FakeRequest) -> FakeRequest:
        """It is let in, and the pass is not over."""
        self.scheduler.queued.remove(waiting)
        self.scheduler.running.append(waiting)
        return waiting

    def admit(self, waiting: FakeRequest, *, prefills: bool = False, resumed: bool = False) -> FakeRequest:
        """It is let in by a whole pass."""
        self.enter(waiting).is_prefill_chunk = prefills
        names = (waiting.request_id,)
        self._pass_ends(scheduled({}, resumed=names) if resumed else scheduled({}, new=names))
        return waiting

    def serve(self, **tokens: int) -> None:
        """One step."""
        for name, count in tokens.items():
            self.served[name] = self.served.get(name, 0) + count
        self._pass_ends(scheduled(tokens))

    def _pass_ends(self, output: Any) -> None:
        assert self.hooks.after_schedule
        self.hooks.after_schedule(output, self.context.now)

    def run(self, name: str, consumed: int, *, prompt_tokens: int = 1, prefills: bool = False) -> FakeRequest:
        """A running request that has consumed so much."""
        running = self.admit(self.add(name, prompt_tokens), prefills=prefills)
        if consumed:
            self.serve(**{name: consumed})
        return running

    def preempt(self, request: FakeRequest) -> None:
        """Upstream takes its blocks."""
        self.context.preempt(request)

    def finish(self, request: FakeRequest) -> None:
        """It ends, wherever it is."""
        for where in (self.scheduler.queued, self.scheduler.running):
            if request in where:
                where.remove(request)
        assert self.hooks.on_finish
        self.hooks.on_finish(request, self.context.now)

    # what is seen

    def level(self, request: FakeRequest, now: float = 0.0) -> float:
        """Its level as it is ordered."""
        assert self.hooks.request_key
        value, until = self.hooks.request_key(request, now)
        assert until is None or until > now
        return value

    def gate(self, request: FakeRequest) -> str | None:
        """Why it must wait."""
        assert self.hooks.waiting_gate
        return self.hooks.waiting_gate(request, self.context.now)

    def cap(self, request: FakeRequest, new_tokens: int) -> int:
        """What it may have of `new_tokens`."""
        assert self.hooks.token_cap
        return self.hooks.token_cap(request, 0, new_tokens, self.context.now)
