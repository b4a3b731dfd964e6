"""Patches that learn step times and gate by capacity, on plain objects: one pass of a scheduler, as a test spells it out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from patches.seam.context import RequestInfo
from patches.seam.patch import Hooks, Knobs, Patch
from tests.scheduling.fakes import FakeContext, FakeRequest, FakeScheduler, scheduled


@dataclass(eq=False)
class Sized(FakeRequest):
    """A request with an identity."""

    tenant: str = ""
    weight: float = 1.0
    slo_s: float = math.inf
    status: Any = field(default_factory=lambda: SimpleNamespace(name="WAITING"))


class CapacityContext(FakeContext):
    """A context that knows identities and notes releases."""

    def __init__(self, scheduler: FakeScheduler) -> None:
        super().__init__(scheduler)
        self.released: list[str] = []

    def request_info(self, request: Any) -> RequestInfo:
        """Who it is."""
        return RequestInfo(
            request.tenant,
            "",
            request.priority,
            request.num_prompt_tokens,
            request.queued_s,
            0,
            request.weight,
            request.slo_s,
        )

    def release(self, request: Any) -> None:
        """Note it."""
        self.released.append(request.request_id)


class Bench:
    """One patch on plain objects. Time stands still unless the test moves `context.now`."""

    def __init__(self, patch: Patch, knobs: Knobs) -> None:
        self.scheduler = FakeScheduler()
        self.scheduler.free_blocks = self.scheduler.all_blocks
        self.scheduler.num_spec_tokens = 0  # type: ignore[attr-defined]
        self.context = CapacityContext(self.scheduler)
        self.hooks: Hooks = patch.build(knobs, self.context)  # type: ignore[arg-type]
        self.context.hooks = self.hooks

    # what happens

    def add(self, name: str, prompt_tokens: int, **identity: Any) -> Sized:
        """It comes, and waits."""
        new = Sized(
            name,
            num_prompt_tokens=prompt_tokens,
            num_tokens=prompt_tokens,
            queued_s=self.context.now,
            **identity,
        )
        assert self.hooks.on_add
        self.hooks.on_add(new, self.context.now)
        self.scheduler.queued.append(new)
        return new

    def run(self, name: str, prompt_tokens: int, *, prefills: bool = False, **identity: Any) -> Sized:
        """One that a whole pass let in; it decodes unless it still prefills."""
        new = self.add(name, prompt_tokens, **identity)
        self.admit(new, prompt_tokens // 2 if prefills else prompt_tokens)
        return new

    def admit(self, waiting: Sized, tokens: int, *, resumed: bool = False) -> None:
        """Let in by a whole pass that gave it so many tokens, whatever its cap said."""
        self.cap(waiting)
        self.enter(waiting)
        names = (waiting.request_id,)
        self.end_pass({waiting.request_id: tokens}, **({"resumed": names} if resumed else {"new": names}))

    def enter(self, waiting: Sized) -> Sized:
        """It is let in, and the pass is not over."""
        self.scheduler.queued.remove(waiting)
        self.scheduler.running.append(waiting)
        return waiting

    def end_pass(self, tokens: dict[str, int], new: Any = (), resumed: Any = ()) -> Any:
        """The pass is over: what was scheduled counts as computed."""
        for name, count in tokens.items():
            request = self.scheduler.requests[name]
            request.num_computed_tokens += count
            request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens
        output = scheduled(tokens, new, resumed)
        output.scheduled_spec_decode_tokens = {}
        assert self.hooks.after_schedule
        self.hooks.after_schedule(output, self.context.now)
        return output

    def step(self, tokens: dict[str, int], took_s: float) -> None:
        """A pass and its step, which takes some time."""
        output = self.end_pass(tokens)
        self.context.now += took_s
        assert self.hooks.after_update
        self.hooks.after_update(output, {}, self.context.now)

    def learn(self, rest_s: float, token_s: float, decode: Sized) -> None:
        """Steps enough to know what a step takes; a prompt that does not exist otherwise prefills in every other."""
        probe = self.run("probe", 100)
        for number in range(60):
            count = 100 * (number % 2)
            probe.num_tokens += count
            tokens = {decode.request_id: 1, **({"probe": count} if count else {})}
            self.step(tokens, rest_s + token_s * count)
        self.finish(probe)

    def finish(self, request: Sized, how: str = "FINISHED_LENGTH_CAPPED") -> None:
        """It ends, wherever it is."""
        request.status = SimpleNamespace(name=how)
        for where in (self.scheduler.queued, self.scheduler.running):
            if request in where:
                where.remove(request)
        assert self.hooks.on_finish
        self.hooks.on_finish(request, self.context.now)

    # what is seen

    def gate(self, request: Sized) -> str | None:
        """Why it must wait."""
        assert self.hooks.waiting_gate
        return self.hooks.waiting_gate(request, self.context.now)

    def cap(self, request: Sized, asked: int | None = None) -> int:
        """What it may have of what it asks for: the rest of its prompt."""
        if self.hooks.token_cap is None:
            return request.num_tokens
        computed = request.num_computed_tokens
        left = request.num_tokens - computed if asked is None else asked
        return min(left, self.hooks.token_cap(request, computed, left, self.context.now))
