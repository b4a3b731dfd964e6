"""F3: decodes first, a reserved share of each step's prefill for short prompts, and little of it for long ones."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field

from patches.fixes.longline import LongLine
from patches.scheduling.claims import Claims
from patches.scheduling.steptime import StepBudget, StepKnobs
from patches.seam.patch import Hooks, Patch

WHY = """
A step lasts as long as its prefill, whoever it belongs to: with a document of thousands of tokens in each step, every
decode stalls and a short prompt waits for two such steps before its own. Upstream's threshold cuts each long prefill by
itself, so many of them run side by side, each with half-filled blocks, and together they fill the step again. A fixed
cut is also wrong most of the time: too wide when the decodes alone take long, too narrow when there are few.
"""

HOW = """
Beside decodes and short prompts all long prefills together get what fits into a step of a target length. The length is
a part of the tightest deadline among the short prompts of the last seconds, and never more than a multiple of what the
step takes without any prefill. How many tokens that is follows from the steps that were measured: what the decodes cost
and what a prefill token costs. Beside `overload`, which shortens steps itself, the target is longer. Of these tokens a
share is kept for short prompts while they wait or prefill; what they do not take goes to the long ones, and they always get some. Decodes have their tokens in any case.

One long prompt prefills at a time beside others, since several would only hold more blocks, half filled. A prompt that is
long but nearly all in the prefix cache counts as short. Who comes next is the queue's affair, except that a prompt that
can no longer be in time stands back for those that can: in an overload first come, first served makes all of them late.
At least every so many admissions the first in line is taken, late or not.

Ageing: as what a long prefill still needs comes closer to the time that is left until its deadline, or its patience if it
has none, the reserve for short prompts shrinks to nothing. And as the line of those that can be in time grows towards
what can be served within their deadline, the target length itself grows, up to a bound: longer steps serve more, for each pays for the weights once. Where more
comes than that could save, the target goes back and the short ones keep their latency. A long prompt
with n others before it waits for at most as many prefills as the turns of the late allow, n times `late_turn_requests`,
each at no less than the least tokens a step.
With no decode and no short prompt beside it a long prefill gets whole steps, and none is held.
"""


class PrefillBudgetKnobs(StepKnobs):
    """What may be tuned."""

    long_prompt_tokens: int = Field(2048, ge=1, description="prompts of this length and above count as long")
    short_prefill_tokens: int = Field(
        512, ge=0, description="a long prompt with at most so much that is not cached counts as short"
    )
    reserved_share: float = Field(
        0.75, ge=0, le=1, description="share of a step's prefill that short prompts may claim"
    )
    least_tokens: int = Field(64, ge=1, description="what all long prefills together get at least in a step")
    long_prefill_requests: int = Field(
        1, ge=1, description="long prompts that may prefill at a time, beside others"
    )
    late_turn_requests: int = Field(
        8,
        ge=1,
        description="of so many admissions one is of the first in line, late or not; 1 is plain order",
    )
    patience_s: float = Field(
        10.0,
        gt=0,
        description="time to its first token after which a long prompt has waited enough, if it has no SLO",
    )
    aged_stretch_factor: float = Field(
        1.5,
        ge=1,
        description="the target grows up to this times its length as the line of long prompts comes near its deadlines",
    )


# How long what the cache holds of a waiting prompt is believed.
_PROBE_KEPT_S = 1.0
# How long a free place waits for a prompt that could be in time but is held by something else.
_EMPTY_PLACE_S = 0.1


class _PrefillBudget:
    """The state of the patch for one scheduler, kept as things happen and at the end of each pass."""

    def __init__(self, knobs: PrefillBudgetKnobs, context: Any) -> None:
        self._knobs, self._context = knobs, context
        self.budget = StepBudget(knobs, context.beside("overload"))
        self._long: dict[str, Any] = {}
        self._line = LongLine()
        # Long prompts in prefill, those being admitted in this pass included, and how many of them will go on.
        self._prefilling: dict[str, Any] = {}
        self._places_taken = 0
        self._shorts = Claims()
        self._short_prefill_left = 0
        # What the last long prompt that came allows until its first token.
        self._allowed_s = knobs.patience_s
        self._left: int | None = None
        self._since_late = 0
        self._place_free_s = context.clock()
        self._probed: dict[str, tuple[float, int]] = {}
        self._long_tokens = self._long_steps = 0
        self._late_held = 0
        context.gauge("prefillbudget_long_tokens_per_step", self._mean_long_tokens)
        context.gauge("prefillbudget_late_held", lambda: float(self._late_held))
        context.gauge("prefillbudget_decode_step_ms", lambda: self.budget.steps.rest_s * 1e3)
        context.gauge("prefillbudget_us_per_token", lambda: self.budget.steps.token_s * 1e6)

    def _mean_long_tokens(self) -> float:
        return self._long_tokens / self._long_steps if self._long_steps else 0.0

    # the budget

    def _beside_others(self) -> bool:
        """Whether anything decodes, or a short prompt prefills, or one waits that is being served."""
        running = len(self._context.scheduler.running)
        return running > len(self._prefilling) or self._shorts.waits()

    def budget_tokens(self, now: float) -> int:
        """Tokens that all long prefills together get in the coming step, beside others."""
        knobs = self._knobs
        urgency = max((self._urgency(r, now) for r in self._prefilling.values()), default=0.0)
        whole = self.budget.tokens(now, self._stretch(now))
        claimed = self._short_prefill_left + self._shorts.wanted()
        reserve = knobs.reserved_share * (1 - urgency)
        return max(knobs.least_tokens, whole - min(claimed, int(whole * reserve)))

    def _stretch(self, now: float) -> float:
        """How much longer than the target a step may be for the sake of the line of long prompts."""
        rate = self.budget.tokens_per_s(now)
        if not self._line or not rate:
            return 1.0
        # The part of the time allowed that those in time need: all of them, if as much comes as can be served.
        needed = self._line.tokens_in_time(now, rate) / rate / self._allowed_s
        return 1 + (self._knobs.aged_stretch_factor - 1) * max(0.0, min(1.0, 4 * needed, 2 - needed / 0.75))

    def _urgency(self, request: Any, now: float) -> float:
        """Share of the time until its deadline that its prefill needs, 1 beyond; 0 once it has its first token."""
        if request.num_tokens > request.num_prompt_tokens:
            return 0.0
        info, rate = self._context.request_info(request), self.budget.tokens_per_s(now)
        left_s = info.queued_s + self._allowed(info) - now
        needs_s = (request.num_tokens - request.num_computed_tokens) / rate if rate else 0.0
        return min(1.0, needs_s / left_s) if left_s > 0 else 1.0

    def _allowed(self, info: Any) -> float:
        return float(info.slo_ttft_s if info.slo_ttft_s < math.inf else self._knobs.patience_s)

    # seams

    def waiting_gate(self, request: Any, now: float) -> str | None:
        """Hold a long prompt while enough of them prefill, or while it is late and others are not."""
        if request.request_id not in self._long or not self._beside_others():
            return None
        if request.request_id in self._prefilling:
            # It is being admitted; that its own tokens and blocks are taken by now must not hold it.
            return None
        if self._left is not None and self._left <= 0:
            return "this step has no tokens left for long prompts"
        if self._places_taken >= self._knobs.long_prefill_requests:
            return None if self._nearly_cached(request, now) else "enough long prompts prefill"
        if self._stands_back(request, now):
            self._late_held += 1
            return "late: those who can be in time go first"
        return None

    def _stands_back(self, request: Any, now: float) -> bool:
        entry = self._line.get(request.request_id)
        if entry is None or self._since_late >= self._knobs.late_turn_requests - 1:
            return False
        if not self._context.scheduler.running or now - self._place_free_s > _EMPTY_PLACE_S:
            return False
        rate = self.budget.tokens_per_s(now)
        if entry.in_time(now, rate):
            return False
        return next(self._line.first_in_time(now, rate), None) is not None

    def _nearly_cached(self, request: Any, now: float) -> bool:
        probed = self._probed.get(request.request_id)
        if probed is None or now - probed[0] > _PROBE_KEPT_S:
            cached = self._context.scheduler.kv_cache_manager.get_computed_blocks(request)[1]
            probed = self._probed[request.request_id] = now, request.num_tokens - cached
        return probed[1] <= self._knobs.short_prefill_tokens

    def token_cap(self, request: Any, computed: int, new_tokens: int, now: float) -> int:
        """Long prefills share what the step's target leaves, in the order in which they are asked."""
        request_id = request.request_id
        if request_id not in self._long:
            return new_tokens
        remaining = request.num_tokens - computed
        if request_id not in self._prefilling:
            if remaining <= self._knobs.short_prefill_tokens:
                return new_tokens
            self._prefilling[request_id] = request
            self._places_taken += 1
            beside = self._beside_others_of_new(request)
        else:
            beside = self._beside_others()
        if not beside:
            return new_tokens
        if self._left is None:
            self._left = min(self.budget_tokens(now), self._room_beside_decodes())
        granted = max(0, min(new_tokens, self._left))
        self._left -= granted
        if granted >= remaining:
            # It ends in this step, so the next one may begin in it. While a waiting one is being admitted the queue's
            # head must stay: the others are asked in the next pass.
            self._free_place(now, offer=self._context.is_running(request))
        return granted

    def _beside_others_of_new(self, request: Any) -> bool:
        # It stands in `_prefilling` already but not yet in `running`.
        in_running = len(self._context.scheduler.running) + (not self._context.is_running(request))
        return in_running > len(self._prefilling) or self._shorts.waits()

    def _room_beside_decodes(self) -> int:
        scheduler = self._context.scheduler
        decodes = len(scheduler.running) - len(self._prefilling)
        room = scheduler.max_num_scheduled_tokens - decodes * (1 + scheduler.num_spec_tokens)
        return max(1, room)

    def _free_place(self, now: float, offer: bool = True) -> None:
        self._places_taken = max(0, self._places_taken - 1)
        self._place_free_s = now
        if offer:
            self._offer_places(now)

    def _offer_places(self, now: float) -> None:
        # The queue asks for the best that is held only, which may be one that stands back.
        if self._line and self._places_taken < self._knobs.long_prefill_requests:
            for candidate in self._line.first_in_time(now, self.budget.tokens_per_s(now)):
                self._context.release(candidate)

    # bookkeeping

    def on_add(self, request: Any, now: float) -> None:
        """Put it into its class."""
        info = self._context.request_info(request)
        if info.prompt_tokens >= self._knobs.long_prompt_tokens:
            self._long[request.request_id] = request
            self._allowed_s = self._allowed(info)
        else:
            self.budget.protect(info.slo_ttft_s, now)
        self._wait(request, now)

    def _wait(self, request: Any, now: float) -> None:
        request_id = request.request_id
        if request_id in self._long:
            info = self._context.request_info(request)
            # One that had its first token has met its deadline or missed it.
            pending = request.num_tokens <= request.num_prompt_tokens
            self._line.join(request, info.tenant, info.queued_s + info.slo_ttft_s if pending else math.inf)
        else:
            self._shorts.join(request)

    def _stop_waiting(self, request_id: str) -> None:
        self._line.leave(request_id)
        self._probed.pop(request_id, None)
        self._shorts.leave(request_id)

    def after_schedule(self, scheduler_output: Any, now: float) -> None:
        """See who was admitted, who still prefills, and what short prompts still want."""
        self.budget.steps.on_schedule(scheduler_output, now)
        scheduled, requests = scheduler_output.num_scheduled_tokens, self._context.scheduler.requests
        for new in scheduler_output.scheduled_new_reqs:
            self._on_admission(new.req_id, scheduled, now)
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._on_admission(request_id, scheduled, now)
        self._shorts.end_pass()
        self._short_prefill_left = 0
        long_tokens = 0
        decode_tokens = 1 + self._context.scheduler.num_spec_tokens
        for request_id, tokens in scheduled.items():
            if request_id in self._prefilling:
                long_tokens += tokens
            elif tokens > decode_tokens and request_id not in self._long:
                request = requests[request_id]
                if request.is_prefill_chunk:
                    self._short_prefill_left += request.num_tokens - request.num_computed_tokens
        if long_tokens:
            self._long_tokens += long_tokens
            self._long_steps += 1
        self._left = None
        if self._prefilling:
            self._prefilling = {
                request_id: request
                for request_id, request in self._prefilling.items()
                if request.is_prefill_chunk and self._context.is_running(request)
            }
        if len(self._prefilling) < self._places_taken:
            self._place_free_s = now
        self._places_taken = len(self._prefilling)
        self._offer_places(now)

    def _on_admission(self, request_id: str, scheduled: Any, now: float) -> None:
        computed = self._context.scheduler.requests[request_id].num_computed_tokens
        self._shorts.admit(request_id, computed - scheduled[request_id])
        entry = self._line.get(request_id)
        if entry is not None and request_id in self._prefilling:
            in_time = entry.in_time(now, self.budget.tokens_per_s(now))
            self._since_late = self._since_late + 1 if in_time else 0
        self._stop_waiting(request_id)

    def after_update(self, scheduler_output: Any, outputs: Any, now: float) -> None:
        """Learn what the step took."""
        self.budget.steps.on_update(scheduler_output, now, 1 + self._context.scheduler.num_spec_tokens)

    def on_preempt(self, request: Any, now: float) -> None:
        """It waits again; its place is free."""
        self._stop_prefilling(request.request_id, now)
        self._wait(request, now)

    def on_finish(self, request: Any, now: float) -> None:
        """Forget it."""
        request_id = request.request_id
        self._stop_waiting(request_id)
        self._stop_prefilling(request_id, now)
        self._long.pop(request_id, None)

    def _stop_prefilling(self, request_id: str, now: float) -> None:
        if self._prefilling.pop(request_id, None) is not None:
            self._free_place(now)


def build(knobs: PrefillBudgetKnobs, context: Any) -> Hooks:
    """The hooks for one scheduler."""
    state = _PrefillBudget(knobs, context)
    return Hooks(
        waiting_gate=state.waiting_gate,
        token_cap=state.token_cap,
        after_schedule=state.after_schedule,
        after_update=state.after_update,
        on_add=state.on_add,
        on_preempt=state.on_preempt,
        on_finish=state.on_finish,
    )


PATCH = Patch(
    name="prefillbudget",
    number="F3",
    area="fixes",
    summary="decodes first, a reserved prefill share for short prompts, long ones in what a target step leaves",
    knobs=PrefillBudgetKnobs,
    build=build,
    seams=(
        "waiting_gate",
        "token_cap",
        "after_schedule",
        "after_update",
        "on_add",
        "on_preempt",
        "on_finish",
    ),
    ranks={"waiting_gate": 25, "token_cap": 25},
    why=WHY,
    how=HOW,
    baseline="--long-prefill-token-threshold: a fixed number for each long prefill, however many there are",
    mechanism="short_ttft_ms_p99",
    references=(
        "Agrawal et al.: Taming throughput-latency tradeoff in LLM inference with Sarathi-Serve (OSDI 2024), "
        "for chunks sized by the time that a step may take",
    ),
    removable_when="upstream limits the prefill of a step by its expected duration, all long prompts together",
)
