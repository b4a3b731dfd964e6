"""S7: multi-level feedback queue: what has consumed little goes first, without knowing lengths."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from pydantic import Field, model_validator

from patches.seam.patch import Hooks, KeyPart, Knobs, Patch

WHY = """
Nobody tells the scheduler how long an answer will be. Under first come, first served a request that has had thousands
of tokens of service and one that has had none are equals, so a long prefill holds the token budget step after step
while short prompts wait behind it.
"""

HOW = """
Each request has a level from the tokens that were computed for it, prompt and output alike (cached tokens are free):
level 0 up to 128, level 1 up to 512, level 2 up to 2,048, level 3 beyond. Lower levels go first, first come first
served inside one. A preempted request is lifted by one level, so that it is not sent to the end of the line again, and
what it has consumed is not forgotten.

Upstream gives the budget to running requests before it looks at waiting ones. So a running prefill of a worse level
than the request at the head of the queue leaves it room in the step: as many tokens as that request could use, if it
could be admitted at all (otherwise the room would stay empty), and never more than a set share of the budget.
"""


class MlfqKnobs(Knobs):
    """What may be tuned."""

    level0_tokens: int = Field(128, ge=1, description="consumption up to which a request is in level 0")
    level1_tokens: int = Field(512, ge=1, description="consumption up to which it is in level 1")
    level2_tokens: int = Field(
        2048, ge=1, description="consumption up to which it is in level 2; beyond is level 3"
    )
    yield_share: float = Field(
        0.75,
        ge=0,
        le=1,
        description="most of a step's token budget that running prefills leave to the queue's head",
    )

    @model_validator(mode="after")
    def _rising(self) -> MlfqKnobs:
        if not self.level0_tokens < self.level1_tokens < self.level2_tokens:
            raise ValueError("level0_tokens, level1_tokens and level2_tokens must rise")
        return self


class _Mlfq:
    """The state of the patch for one scheduler."""

    def __init__(self, knobs: MlfqKnobs, context: Any) -> None:
        self._context = context
        self._bounds = (knobs.level0_tokens, knobs.level1_tokens, knobs.level2_tokens)
        self._yield_share = knobs.yield_share
        self._consumed: dict[str, int] = {}
        self._lifted: dict[str, int] = {}
        self._next_bound: dict[str, float] = {}
        self._head_level = 0
        self._head_tokens = 0
        self._demotions = self._promotions = 0
        context.gauge("mlfq_demotions", lambda: float(self._demotions))
        context.gauge("mlfq_promotions", lambda: float(self._promotions))

    def level(self, request_id: str) -> int:
        """0 is served first."""
        # A level's bound still belongs to it: level 0 is "up to 128".
        earned = bisect_right(self._bounds, self._consumed.get(request_id, 0) - 1)
        return max(0, earned - self._lifted.get(request_id, 0))

    def request_key(self, request: Any, now: float) -> KeyPart:
        """The level; it changes by service and preemption only, never by waiting."""
        return self.level(request.request_id), None

    def before_schedule(self, now: float) -> None:
        """See what the head of the queue could use in this step."""
        self._head_tokens = 0
        scheduler = self._context.scheduler
        queue = scheduler.waiting
        if not queue or len(scheduler.running) >= scheduler.max_num_active_reqs:
            return
        head = queue.peek_request()
        manager = scheduler.kv_cache_manager
        need = -(-head.num_tokens // scheduler.block_size) + manager.watermark_blocks
        if need > manager.block_pool.get_num_free_blocks():
            return
        self._head_level = self.level(head.request_id)
        most = int(self._yield_share * scheduler.max_num_scheduled_tokens)
        self._head_tokens = min(head.num_tokens, most)

    def token_cap(self, request: Any, computed: int, new_tokens: int, now: float) -> int:
        """A running prefill of a worse level leaves the head its tokens."""
        if not self._head_tokens or not self._context.is_running(request):
            return new_tokens
        if self.level(request.request_id) <= self._head_level:
            return new_tokens
        scheduler = self._context.scheduler
        room = scheduler.max_num_scheduled_tokens - len(scheduler.running) - self._head_tokens
        return max(1, min(new_tokens, room))

    def after_schedule(self, scheduler_output: Any, now: float) -> None:
        """Charge what was scheduled, and demote what crossed a bound."""
        consumed, bounds = self._consumed, self._next_bound
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            total = consumed.get(request_id, 0) + tokens
            consumed[request_id] = total
            if total > bounds.get(request_id, self._bounds[0]):
                self._demote(request_id, total)

    def _demote(self, request_id: str, total: int) -> None:
        passed = bisect_right(self._bounds, total - 1)
        self._next_bound[request_id] = self._bounds[passed] if passed < len(self._bounds) else float("inf")
        self._demotions += 1
        request = self._context.scheduler.requests.get(request_id)
        if request is not None:
            self._context.rekey(request)

    def on_preempt(self, request: Any, now: float) -> None:
        """Lift it by one level; what it consumed stays on its account."""
        if self.level(request.request_id) > 0:
            self._lifted[request.request_id] = self._lifted.get(request.request_id, 0) + 1
            self._promotions += 1

    def on_finish(self, request: Any, now: float) -> None:
        """Forget it."""
        for account in (self._consumed, self._lifted, self._next_bound):
            account.pop(request.request_id, None)


def build(knobs: MlfqKnobs, context: Any) -> Hooks:
    """The hooks for one scheduler."""
    state = _Mlfq(knobs, context)
    return Hooks(
        request_key=state.request_key,
        token_cap=state.token_cap,
        before_schedule=state.before_schedule,
        after_schedule=state.after_schedule,
        on_preempt=state.on_preempt,
        on_finish=state.on_finish,
    )


PATCH = Patch(
    name="mlfq",
    number="S7",
    area="scheduling",
    summary="multi-level feedback queue by tokens consumed; running prefills yield to the queue's head",
    knobs=MlfqKnobs,
    build=build,
    seams=("request_key", "token_cap", "before_schedule", "after_schedule", "on_preempt", "on_finish"),
    ranks={"request_key": 30, "token_cap": 30},
    why=WHY,
    how=HOW,
    baseline="none: upstream knows no feedback; --long-prefill-token-threshold caps a long prefill without looking at "
    "the queue",
    mechanism="mlfq_demotions",
    references=("Corbato, Merwin-Daggett, Daley: An experimental time-sharing system (1962)",),
    removable_when="upstream orders running and waiting work by service received",
)
