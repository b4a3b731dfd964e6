"""The deadline patches on plain objects, as their tests drive them: one prompt computed at a time, at a fixed rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from patches.seam.context import RequestInfo
from patches.seam.patch import Hooks, Knobs, Patch


@dataclass(eq=False)
class Prompt:
    """The attributes of a vLLM request that the patches read."""

    request_id: str
    num_prompt_tokens: int
    arrival_s: float
    tenant: str = ""
    weight: float = 1.0
    slo_s: float = float("inf")
    priority: int = 0
    cached: int = 0
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    is_prefill_chunk: bool = True

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def block_hashes(self) -> Prompt:
        """What the pretended prefix cache is asked with."""
        return self


class Machine:
    """A patch and just enough of a scheduler: what waits, what runs, a clock that the test moves."""

    def __init__(
        self, patch: Patch, *, step_tokens: int = 1000, others: tuple[str, ...] = (), **knobs: Any
    ) -> None:
        self.others = others
        self.now = 100.0
        self.usage = 0.0
        self.free_blocks = 10**6
        self.waiting: list[Prompt] = []
        self.running: list[Prompt] = []
        self.probed: list[str] = []
        self.rekeyed: list[str] = []
        self.ended: dict[str, str] = {}
        self.gauges: dict[str, Callable[[], float]] = {}
        self.step_tokens = step_tokens
        self._numbers = 0
        self.scheduler = SimpleNamespace(
            running=self.running,
            requests={},
            max_num_scheduled_tokens=step_tokens,
            block_size=16,
            kv_cache_manager=SimpleNamespace(
                block_pool=SimpleNamespace(get_num_free_blocks=lambda: self.free_blocks),
                prefix_cache_lookup_enabled=lambda request: True,
                coordinator=SimpleNamespace(find_longest_cache_hit=self._probe),
            ),
        )
        made: Knobs = patch.knobs(**knobs)
        self.hooks: Hooks = patch.build(made, self)  # type: ignore[arg-type]

    def _probe(self, request: Prompt, most: int) -> tuple[Any, int, int]:
        self.probed.append(request.request_id)
        return ((), min(request.cached, most), 0)

    # what a patch asks of its context

    def beside(self, patch: str) -> bool:
        """Those that the test names."""
        return patch in self.others

    def request_info(self, request: Prompt) -> RequestInfo:
        """Its identity."""
        return RequestInfo(
            request.tenant,
            "",
            request.priority,
            request.num_prompt_tokens,
            request.arrival_s,
            0,
            request.weight,
            request.slo_s,
        )

    def arrived_s(self, request: Prompt) -> float:
        """When it came."""
        return request.arrival_s

    def is_running(self, request: Prompt) -> bool:
        """Whether it runs."""
        return request in self.running

    def waiting_requests(self) -> int:
        """How many wait."""
        return len(self.waiting)

    def waiting_tokens(self) -> int:
        """Tokens of those that wait."""
        return sum(prompt.num_tokens for prompt in self.waiting)

    def kv_usage(self) -> float:
        """What the test says."""
        return self.usage

    def rekey(self, request: Prompt) -> None:
        """Note it."""
        self.rekeyed.append(request.request_id)

    def gauge(self, name: str, value: Callable[[], float]) -> None:
        """Keep it."""
        self.gauges[name] = value

    # what happens

    def add(self, tokens: int, *, name: str = "", at_s: float | None = None, **more: Any) -> Prompt:
        """It comes, and waits."""
        self._numbers += 1
        new = Prompt(name or f"p{self._numbers}", tokens, self.now if at_s is None else at_s, **more)
        assert self.hooks.on_add
        self.hooks.on_add(new, self.now)
        self.waiting.append(new)
        self.scheduler.requests[new.request_id] = new
        return new

    def expire(self) -> dict[str, str]:
        """What the patch ends before a pass; it leaves."""
        assert self.hooks.expire
        named = dict(self.hooks.expire(self.now))
        for request_id in named:
            self.finish(self.scheduler.requests[request_id])
        self.ended |= named
        return named

    def step(self, *tokens: tuple[Prompt, int], seconds: float = 0.1) -> None:
        """A pass that gives these prompts so many tokens, and its update after `seconds`."""
        self.expire()
        new = []
        for prompt, count in tokens:
            if prompt in self.waiting:
                self.waiting.remove(prompt)
                self.running.append(prompt)
                new.append(SimpleNamespace(req_id=prompt.request_id))
            prompt.cached += count
            prompt.is_prefill_chunk = prompt.cached < prompt.num_prompt_tokens
        output = SimpleNamespace(
            num_scheduled_tokens={prompt.request_id: count for prompt, count in tokens},
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        )
        assert self.hooks.after_schedule
        self.hooks.after_schedule(output, self.now)
        self.now += seconds
        for prompt, _ in tokens:
            prompt.num_output_tokens += not prompt.is_prefill_chunk
        if self.hooks.after_update:
            self.hooks.after_update(output, {}, self.now)

    def measure(self, per_s: float) -> None:
        """Let it see a long prompt served at this rate, until nothing else is remembered; then it leaves."""
        prompt = self.add(10**7, name="measured", slo_s=1e6, priority=8)
        for _ in range(100):
            self.step((prompt, round(per_s)), seconds=1.0)
        self.finish(prompt)
        self.step()

    def finish(self, prompt: Prompt) -> None:
        """It ends, wherever it is."""
        assert self.hooks.on_finish
        self.hooks.on_finish(prompt, self.now)
        for place in (self.waiting, self.running):
            if prompt in place:
                place.remove(prompt)
        del self.scheduler.requests[prompt.request_id]

    def key(self, prompt: Prompt) -> float:
        """Its key now."""
        assert self.hooks.request_key
        return self.hooks.request_key(prompt, self.now)[0]
