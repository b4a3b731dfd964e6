"""S4: a token bucket for each request of a lower class; what a step has to spare is never left idle."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from patches.scheduling.claims import Claims, Rank, class_of
from patches.scheduling.steptime import StepBudget, StepKnobs
from patches.seam.patch import Hooks, Patch

WHY = """
In one batch everybody goes at the speed of the step, and the step's length is set by whoever prefills most. A request
of low priority with a long prompt so slows down the decodes of all others, for as long as its prompt lasts. Upstream's
threshold cuts every long prefill alike, the important ones as well, and at the same number in an idle engine.
"""

HOW = """
Requests have classes: vLLM's priority, inside one the weight of who sent it. Only the worst class that has been seen is
limited, and only beside better ones: a middle class that was limited as well would pay for the bursts of the best one
with deadlines of its own. Each of its requests has a bucket: it starts full, gains a rate of tokens with each step, and
pays for what it is given, prompt and decode tokens alike. The rate goes down from its most to its least as the load goes
up, and load is the part of the step's target length that decodes and the prefill of better classes already take. A short
prompt passes on a full bucket; a long one, and one that was preempted and must be computed anew, goes at the rate. Drafts
that are rejected are paid back. Decodes pay but never wait.

A step that has room within its target length for more than the better classes want gives it to the limited ones in their
order, free of charge; so the limit binds only where somebody better would feel it. With nobody better running or about to
run there is no limit at all. A limited prompt that is larger than its bucket stays in the queue while another of its class
or a worse one prefills and the last step had nothing to spare: side by side at their rates they would only hold blocks,
half filled. So beside better ones that never cease a limited prompt of n tokens takes at most n / `least_rate_tokens`
steps once it runs, and one that is held waits for no more than the limited prefills before it. Bound: nobody is passed
by a later one but a limited prompt larger than a bucket, and that by better classes and by prompts that fit into one only.
"""


class RateLimitKnobs(StepKnobs):
    """What may be tuned."""

    burst_tokens: int = Field(512, ge=1, description="size of a bucket: what a request may take at once")
    most_rate_tokens: int = Field(64, ge=1, description="tokens that a bucket gains with a step without load")
    least_rate_tokens: int = Field(8, ge=1, description="tokens that it gains with a step under full load")

    @model_validator(mode="after")
    def _falling(self) -> RateLimitKnobs:
        if self.least_rate_tokens > self.most_rate_tokens:
            raise ValueError("least_rate_tokens must not be above most_rate_tokens")
        return self


class Bucket:
    """What one request may take: `level` tokens as of step `step`."""

    __slots__ = ("level", "rank", "spare", "step")

    def __init__(self, rank: Rank, level: float, step: int) -> None:
        self.rank = rank
        self.level = level
        self.step = step
        # What this pass gave to it free of charge.
        self.spare = 0

    def fill(self, step: int, rate: float, burst: float) -> None:
        """Gain the rate for each step since the last time."""
        if step > self.step:
            self.level = min(burst, self.level + (step - self.step) * rate)
            self.step = step

    def pay(self, tokens: int) -> None:
        """Take tokens out; an empty bucket owes nothing."""
        left = self.level - tokens
        self.level = left if left > 0.0 else 0.0

    def refund(self, tokens: int, burst: float) -> None:
        """Put tokens back."""
        self.level = min(burst, self.level + tokens)


class _RateLimit:
    """The state of the patch for one scheduler."""

    def __init__(self, knobs: RateLimitKnobs, context: Any) -> None:
        self._knobs, self._context = knobs, context
        self.budget = StepBudget(knobs, context.beside("overload"))
        self._buckets: dict[str, Bucket] = {}
        self._present: dict[Rank, int] = {}
        # The worst class that ever came.
        self._worst: Rank | None = None
        self._running: dict[Rank, int] = {}
        self._claims = Claims()
        # What prompts that run want still: those of better classes, and those of the worst.
        self._better_left = self._limited_left = 0
        # Whether a limited one was cut in this pass, and in the last one: nothing was left to spare for it.
        self._cut = self._was_cut = False
        self._step = 0
        # Tokens that limited requests were given in this pass.
        self._given = 0
        self.paid = self.free = self.refunded = 0
        context.gauge("ratelimit_paid_tokens", lambda: float(self.paid))
        context.gauge("ratelimit_spare_tokens", lambda: float(self.free))
        context.gauge("ratelimit_refunded_tokens", lambda: float(self.refunded))

    # the limit

    def limited(self, rank: Rank) -> bool:
        """Whether it is the worst class, and somebody better runs, or waits and is being served."""
        if rank != self._worst:
            return False
        return any(better < rank for better in self._running) or self._claims.waits(rank)

    def load(self, now: float) -> float:
        """Part of the target length that decodes and better prefills take, 0 to 1."""
        steps = self.budget.steps
        taken_s = steps.rest_s + steps.token_s * self._wanted()
        return min(1.0, taken_s / self.budget.target_s(now))

    def rate_tokens(self, now: float) -> float:
        """What the bucket of a limited request gains with a step."""
        most, least = self._knobs.most_rate_tokens, self._knobs.least_rate_tokens
        return most - (most - least) * self.load(now)

    def _wanted(self) -> int:
        """Prefill tokens that better classes want."""
        return self._claims.wanted(self._worst) + self._better_left

    def waiting_gate(self, request: Any, now: float) -> str | None:
        """Hold what would only prefill beside another limited one at its rate."""
        bucket = self._buckets[request.request_id]
        if request.num_tokens <= self._knobs.burst_tokens or not self.limited(bucket.rank):
            return None
        if self._limited_left and (self._cut or self._was_cut):
            return "limited prompts take all that the step can spare"
        return None

    def token_cap(self, request: Any, computed: int, new_tokens: int, now: float) -> int:
        """What the bucket holds, or what the step has to spare if that is more."""
        bucket = self._buckets[request.request_id]
        bucket.spare = 0
        if not self.limited(bucket.rank):
            bucket.spare = new_tokens
            return new_tokens
        bucket.fill(self._step, self.rate_tokens(now), self._knobs.burst_tokens)
        spare = max(0, self.budget.tokens(now) - self._wanted() - self._given)
        granted = max(1, min(new_tokens, max(int(bucket.level), spare)))
        bucket.spare = min(granted, spare)
        self._given += granted
        self._cut = self._cut or granted < new_tokens
        return granted

    # bookkeeping

    def on_add(self, request: Any, now: float) -> None:
        """Give it a full bucket."""
        info = self._context.request_info(request)
        rank = class_of(info)
        self._buckets[request.request_id] = Bucket(rank, self._knobs.burst_tokens, self._step)
        _add(self._present, rank, 1)
        self._worst = rank if self._worst is None else max(self._worst, rank)
        if rank == min(self._present):
            self.budget.protect(info.slo_ttft_s, now)
        self._claims.join(request, rank)

    def after_schedule(self, scheduler_output: Any, now: float) -> None:
        """Charge what was scheduled."""
        self.budget.steps.on_schedule(scheduler_output, now)
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self._on_admission(new.req_id, scheduled)
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._on_admission(request_id, scheduled)
        self._claims.end_pass()
        self._better_left = self._limited_left = 0
        requests, buckets = self._context.scheduler.requests, self._buckets
        decode_tokens = 1 + self._context.scheduler.num_spec_tokens
        paid = 0
        for request_id, tokens in scheduled.items():
            bucket = buckets[request_id]
            free = 0
            if bucket.spare:
                free, bucket.spare = min(tokens, bucket.spare), 0
                self.free += free
            paid += tokens - free
            # `pay`, written out: this is done for each that runs, in each step.
            level = bucket.level - (tokens - free)
            bucket.level = level if level > 0.0 else 0.0
            if tokens > decode_tokens and requests[request_id].is_prefill_chunk:
                left = requests[request_id].num_tokens - requests[request_id].num_computed_tokens
                if bucket.rank == self._worst:
                    self._limited_left += left
                else:
                    self._better_left += left
        self.paid += paid
        self._given = 0
        self._was_cut, self._cut = self._cut, False
        if scheduled:
            self._step += 1

    def _on_admission(self, request_id: str, scheduled: Any) -> None:
        computed = self._context.scheduler.requests[request_id].num_computed_tokens
        self._claims.admit(request_id, computed - scheduled[request_id])
        _add(self._running, self._buckets[request_id].rank, 1)

    def after_update(self, scheduler_output: Any, outputs: Any, now: float) -> None:
        """Learn what the step took, and pay back the drafts that were rejected."""
        self.budget.steps.on_update(scheduler_output, now, 1 + self._context.scheduler.num_spec_tokens)
        drafted = scheduler_output.scheduled_spec_decode_tokens
        if not drafted:
            return
        accepted = {
            output.request_id: len(output.new_token_ids) - 1
            for client in outputs.values()
            for output in client.outputs
        }
        for request_id, drafts in drafted.items():
            bucket = self._buckets.get(request_id)
            rejected = len(drafts) - max(0, accepted.get(request_id, 0))
            if bucket is not None and rejected > 0:
                bucket.refund(rejected, self._knobs.burst_tokens)
                self.refunded += rejected

    def on_preempt(self, request: Any, now: float) -> None:
        """It waits again, with what its bucket holds."""
        rank = self._buckets[request.request_id].rank
        _add(self._running, rank, -1)
        self._claims.join(request, rank)

    def on_finish(self, request: Any, now: float) -> None:
        """Forget it."""
        bucket = self._buckets.pop(request.request_id, None)
        if bucket is None:
            return
        _add(self._present, bucket.rank, -1)
        if not self._claims.leave(request.request_id):
            _add(self._running, bucket.rank, -1)


def _add(counts: dict[Rank, int], rank: Rank, n: int) -> None:
    left = counts.get(rank, 0) + n
    if left:
        counts[rank] = left
    else:
        counts.pop(rank, None)


def build(knobs: RateLimitKnobs, context: Any) -> Hooks:
    """The hooks for one scheduler."""
    state = _RateLimit(knobs, context)
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
    name="ratelimit",
    number="S4",
    area="scheduling",
    summary="a token bucket per request of a lower class; what a step can spare is given away",
    knobs=RateLimitKnobs,
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
    ranks={"waiting_gate": 22, "token_cap": 20},
    why=WHY,
    how=HOW,
    baseline="--long-prefill-token-threshold (+adaptive): one number for all, idle engine or not",
    mechanism="short_tpot_jitter_ms",
    references=("Turner: New directions in communications (1986), for the token bucket",),
    removable_when="upstream limits the tokens of a request in a step by its priority and the step's load",
)
