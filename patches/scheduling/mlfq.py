"""S7: multi-level feedback queue: what has had little service goes first, and the last level takes what is left."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Any

from pydantic import Field, model_validator

from patches.seam.patch import Hooks, KeyPart, Knobs, Patch

WHY = """
Nobody tells the scheduler how long an answer will be. Under first come, first served a request that has had thousands
of tokens of service and one that has had none are equals: a long prefill fills step after step, each step takes as long
as its prefill, and the short prompt that came a moment later waits for two of them before its own.
"""

HOW = """
Each request has a level from the tokens that were computed for it, prompt and output alike: level 0 up to 128, level 1
up to 512, level 2 up to 2,048, level 3 beyond. A prompt is work that is known in advance, so it counts from the start;
of the answer only what was generated counts. Lower levels go first, first come first served inside one. A preempted
request is lifted by one level, so that it is not sent to the end of the line again, and what it has consumed is not
forgotten. One that waits is ordered as if it was a level better for each `wait_lift_s` that it has waited.

Order alone would change little, since upstream gives the budget to running requests before it looks at waiting ones,
and since a step lasts as long as its prefill whoever goes first. So level 3 takes what the others leave: as long as
anyone of a better level runs or waits, its prefills share a small part of each step, one of them prefills at a time
(more would only hold more blocks, half filled), and a prompt of level 3 is admitted only if it leaves some KV blocks
free for the others. If none was admitted for a while the next one no longer has to, so level 3 is slowed but never
starved; and while one waits for that room, no later one of level 3 takes it. By itself it gets whole steps; one that was
lifted out of it is no reason to hold it, or a victim would take the place of the prompt that it made room for.

Bound: nobody is overtaken by one of its own level, nor by one of a better level that came later than `wait_lift_s` for
each level between; but for a prompt of level 3 that is first in line of its level, which may be held besides: for the
prefill of one other, and after that for at most `last_level_patience_s`.
"""


class MlfqKnobs(Knobs):
    """What may be tuned."""

    level0_tokens: int = Field(128, ge=1, description="service up to which a request is in level 0")
    level1_tokens: int = Field(512, ge=1, description="service up to which it is in level 1")
    level2_tokens: int = Field(
        2048, ge=1, description="service up to which it is in level 2; beyond is level 3"
    )
    last_level_step_tokens: int = Field(
        512,
        ge=1,
        description="prefill tokens that level 3 gets in a step, all its requests together, beside others",
    )
    last_level_prefill_requests: int = Field(
        1, ge=1, description="requests of level 3 that may prefill at a time, beside others"
    )
    wait_lift_s: float = Field(
        60.0, gt=0, description="time for which a waiting request is ordered one level better, for each level"
    )
    last_level_free_share: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="share of the KV blocks that a prompt of level 3 leaves free when it is admitted",
    )
    last_level_patience_s: float = Field(
        5.0,
        ge=0,
        description="if no prompt of level 3 was admitted for this long, the next need leave none free",
    )

    @model_validator(mode="after")
    def _rising(self) -> MlfqKnobs:
        if not self.level0_tokens < self.level1_tokens < self.level2_tokens:
            raise ValueError("level0_tokens, level1_tokens and level2_tokens must rise")
        return self


_LAST = 3


class _Service:
    """Tokens that one request has had, and beyond how many it is demoted next."""

    __slots__ = ("next_bound", "tokens")

    def __init__(self, first_bound: float) -> None:
        self.tokens = 0
        self.next_bound = first_bound


class _Mlfq:
    """The state of the patch for one scheduler.

    It is brought up to date as things happen and at the end of each pass, never at the start of one:
    whoever looks at the queue first in a pass already meets gates that know.
    """

    def __init__(self, knobs: MlfqKnobs, context: Any) -> None:
        self._knobs, self._context = knobs, context
        self._bounds = (knobs.level0_tokens, knobs.level1_tokens, knobs.level2_tokens)
        self._served: dict[str, _Service] = {}
        self._lifted: dict[str, int] = {}
        # Requests that came to the last level, lifted or not, by where they are; those that prefill run.
        self._last_waiting: set[str] = set()
        self._last_running: dict[str, Any] = {}
        self._last_prefilling = 0
        self._left_tokens = knobs.last_level_step_tokens
        self._last_admitted_s = context.clock()
        # Who of it was refused in this pass for want of room, which later ones must then leave.
        self._room_for = ""
        self._demotions = self._promotions = 0
        # The level of each waiting request (it changes by a preemption only), and how many wait in each.
        self._waits_in: dict[str, int] = {}
        self._waits_since_s: dict[str, float] = {}
        self._waiting_at = [0] * (_LAST + 1)
        context.gauge("mlfq_demotions", lambda: float(self._demotions))
        context.gauge("mlfq_promotions", lambda: float(self._promotions))
        for level in range(_LAST + 1):
            context.gauge(f"mlfq_waiting_level_{level}", lambda level=level: float(self._waiting_at[level]))

    # levels

    def level(self, request: Any) -> int:
        """0 is served first. A prompt is known work: it counts as soon as the request is there."""
        served = self._served.get(request.request_id)
        known = request.num_prompt_tokens if served is None else max(served.tokens, request.num_prompt_tokens)
        return max(0, bisect_left(self._bounds, known) - self._lifted.get(request.request_id, 0))

    def request_key(self, request: Any, now: float) -> KeyPart:
        """The level, less one for each `wait_lift_s` of waiting."""
        level, since_s = self.level(request), self._waits_since_s.get(request.request_id)
        if not level or since_s is None:
            return level, None
        lift_s = self._knobs.wait_lift_s
        lifted = int(max(0.0, now - since_s) / lift_s)
        return max(0, level - lifted), since_s + (lifted + 1) * lift_s if lifted < level else None

    # what the last level may have

    def _others(self) -> bool:
        """Whether anybody of a better level runs or waits.

        One sum for both: who is admitted goes from one to the other before the pass is noted here. One
        that was lifted out of the last level does not count: it would hold what it was preempted for.
        """
        everybody = len(self._context.scheduler.running) + self._context.waiting_requests()
        return everybody > len(self._last_running) + len(self._last_waiting)

    def waiting_gate(self, request: Any, now: float) -> str | None:
        """Hold a prompt of the last level while another prefills, or while it would take the others' room."""
        if self.level(request) < _LAST or not self._others():
            return None
        knobs = self._knobs
        if self._last_prefilling >= knobs.last_level_prefill_requests:
            return "level 3 is prefilling"
        if self._room_for not in ("", request.request_id):
            return "an earlier one of level 3 waits for room"
        if now - self._last_admitted_s > knobs.last_level_patience_s:
            return None
        scheduler = self._context.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        left = pool.get_num_free_blocks() - -(-request.num_tokens // scheduler.block_size)
        if left < knobs.last_level_free_share * pool.num_gpu_blocks:
            self._room_for = request.request_id
            return "level 3 leaves room for the others"
        return None

    def token_cap(self, request: Any, computed: int, new_tokens: int, now: float) -> int:
        """The last level's prefills share a small part of a step that others are in."""
        if self.level(request) < _LAST or not self._others():
            return new_tokens
        if not self._context.is_running(request):
            # It is being admitted, so the next one in this pass is held.
            self._last_prefilling += 1
        granted = max(1, min(new_tokens, self._left_tokens))
        self._left_tokens -= granted
        return granted

    # bookkeeping

    def on_add(self, request: Any, now: float) -> None:
        """Note where it waits, and a prompt that is in the last level from the start."""
        self._begins_to_wait(request, now)
        if self.level(request) == _LAST:
            self._last_waiting.add(request.request_id)

    def after_schedule(self, scheduler_output: Any, now: float) -> None:
        """Charge what was scheduled, demote what crossed a bound, and see who prefills now."""
        served = self._served
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            found = served.get(request_id)
            if found is None:
                found = served[request_id] = _Service(self._bounds[0])
            found.tokens += tokens
            if found.tokens > found.next_bound:
                self._demote(request_id, found)
        for new in scheduler_output.scheduled_new_reqs:
            self._on_admission(new.req_id, now)
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._on_admission(request_id, now)
        self._last_prefilling = sum(1 for r in self._last_running.values() if r.is_prefill_chunk)
        self._left_tokens = self._knobs.last_level_step_tokens
        self._room_for = ""

    def _demote(self, request_id: str, served: _Service) -> None:
        passed = bisect_left(self._bounds, served.tokens)
        served.next_bound = self._bounds[passed] if passed < len(self._bounds) else math.inf
        request = self._context.scheduler.requests.get(request_id)
        if request is None or passed <= bisect_left(self._bounds, request.num_prompt_tokens):
            # The prompt put it there already.
            return
        self._demotions += 1
        self._context.rekey(request)
        if passed == _LAST and self._context.is_running(request):
            self._last_running[request_id] = request

    def _on_admission(self, request_id: str, now: float) -> None:
        self._waits_no_more(request_id)
        if request_id in self._last_waiting:
            self._last_waiting.discard(request_id)
            request = self._last_running[request_id] = self._context.scheduler.requests[request_id]
            if self.level(request) == _LAST:
                self._last_admitted_s = now

    def on_preempt(self, request: Any, now: float) -> None:
        """Lift it by one level; what it consumed stays on its account."""
        request_id = request.request_id
        if request_id in self._last_running:
            self._last_waiting.add(request_id)
        self._stop_running(request_id)
        if self.level(request) > 0:
            self._lifted[request_id] = self._lifted.get(request_id, 0) + 1
            self._promotions += 1
        self._begins_to_wait(request, now)

    def on_finish(self, request: Any, now: float) -> None:
        """Forget it."""
        request_id = request.request_id
        self._served.pop(request_id, None)
        self._lifted.pop(request_id, None)
        self._last_waiting.discard(request_id)
        if self._room_for == request_id:
            self._room_for = ""
        self._waits_no_more(request_id)
        self._stop_running(request_id)

    def _begins_to_wait(self, request: Any, now: float) -> None:
        self._waits_no_more(request.request_id)
        self._waits_since_s[request.request_id] = now
        level = self._waits_in[request.request_id] = self.level(request)
        self._waiting_at[level] += 1

    def _waits_no_more(self, request_id: str) -> None:
        self._waits_since_s.pop(request_id, None)
        level = self._waits_in.pop(request_id, None)
        if level is not None:
            self._waiting_at[level] -= 1

    def _stop_running(self, request_id: str) -> None:
        request = self._last_running.pop(request_id, None)
        if request is not None and request.is_prefill_chunk:
            # Its place is free in the very next pass.
            self._last_prefilling -= 1


def build(knobs: MlfqKnobs, context: Any) -> Hooks:
    """The hooks for one scheduler."""
    state = _Mlfq(knobs, context)
    return Hooks(
        request_key=state.request_key,
        waiting_gate=state.waiting_gate,
        token_cap=state.token_cap,
        after_schedule=state.after_schedule,
        on_add=state.on_add,
        on_preempt=state.on_preempt,
        on_finish=state.on_finish,
    )


PATCH = Patch(
    name="mlfq",
    number="S7",
    area="scheduling",
    summary="multi-level feedback queue by service; the last level prefills in what the others leave",
    knobs=MlfqKnobs,
    build=build,
    seams=(
        "request_key",
        "waiting_gate",
        "token_cap",
        "after_schedule",
        "on_add",
        "on_preempt",
        "on_finish",
    ),
    ranks={"request_key": 30, "waiting_gate": 30, "token_cap": 30},
    why=WHY,
    how=HOW,
    baseline="--long-prefill-token-threshold caps each long prefill by itself, so many run at once and hold blocks",
    mechanism="short_tpot_jitter_ms",
    references=("Corbato, Merwin-Daggett, Daley: An experimental time-sharing system (1962)",),
    removable_when="upstream orders running and waiting work by service received",
)
