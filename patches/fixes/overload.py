"""F5: overload control: sheds by who can still meet the deadline, keeps floors, shrinks long prefills with load."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field, model_validator

from patches.fixes.load import Load
from patches.fixes.long_prefills import LongPrefills
from patches.scheduling.admission import level_of
from patches.scheduling.deadlines import LATE_S, Alarms, Due
from patches.scheduling.floors import Floors
from patches.scheduling.misses import Tightest
from patches.scheduling.prefills import Prefills, uncached_tokens
from patches.scheduling.tiers import Tiers
from patches.seam.endings import refused
from patches.seam.patch import Hooks, KeyPart, Knobs, Patch

WHY = """
When more comes than can be served, some promises will be broken whatever is done; the order alone decides only whose.
Left alone the engine takes everything in, the line grows until each tenant is late, and the tokens go to requests that
have failed already. Whoever sheds by priority alone shuts the lowest tenant out; whoever sheds by queue length refuses
short and cached requests that would have cost nothing.
"""

HOW = """
Overload is seen in two ways. One is the share of first tokens that came after their target (or never), counted with
decay. The other is a virtual line: what the uncached backlog would be had nobody been refused, in seconds of draining
at the best rate seen lately. Refusing shortens the real line, and holding long prefills back lowers the rate of the
moment, so neither of those can tell whether an overload lasts. It begins when the line passes `enter_slo_factor` times
the tightest target of those that came lately, or the misses `enter_miss_share`; it ends when both were well below for
`calm_s`. While it lasts:

- an arrival is let in only if its predicted wait fits `accept_slo_factor` of its own target, and the standing limit: a
  line longer than what keeps the machine busy adds delay to all and tokens to nobody. A burst that is over within the
  request's own target is no such line: where `watermark` keeps blocks for better classes, and as long as these keep
  their promises, that target is the limit as an overload begins, and falls to the standing one as it lasts. The wait
  is what is owed to its own level and better ones (priorities, and within one the long behind the others), at the rate that its level has been getting; where there
  was no line to measure one by, at the pace of steps with much prefill. So the cached and the short are taken, and of
  the long as many as there is time for;
- low levels go first. Where better ones miss, the worst level's limit shrinks, from all of it at `leave_miss_share` to
  nothing at `enter_miss_share`; over the next such band the limit of the level before it, and so on. One that would be
  late closes the worse levels for `tier_hold_s`, and is refused itself only when none of those was let in for so long
  and none has a prompt left to compute;
- a waiting request that has not started and could not meet its target even if it began now, at the best pace seen, is
  refused, with a Retry-After, while its client can still go elsewhere; so is, as an overload begins, what was so before;
- whoever is below its floor is let in all the same, if its prompt by itself could be in time: `floor_share` of its
  weight's part of the work admitted lately.

Always, long prefills beside other work get a budget of their own in each step. It shrinks from the whole step as the
backlog grows to `full_load_slo_share` of the tightest target. What is left then lets a step last `step_slo_share` of
that target, less as promises are broken; it is found by what steps take, since a budget computed from the rate would
shrink itself. But for an overload the long ones keep at least the pace at which all of them are through within
`long_drain_slo_share` of their own target. While the budget is shrunk one of them prefills at a time. With nobody else
to serve it does not apply. What is late goes behind what is not, in line and in prefills, and is the first victim.

What bounds a wait: nobody waits behind a later arrival of the same priority unless it is late, or long where the other
is not; a long prompt that is held is held by one long prefill at a time, first come first served, until it has waited
`long_patience_s`.
"""


class OverloadKnobs(Knobs):
    """What may be tuned."""

    enter_slo_factor: float = Field(
        6.0,
        gt=0,
        description="line, had nobody been refused, from which it is overload, as a multiple of the tightest target",
    )
    standing_slo_factor: float = Field(
        2.5, gt=0, description="longest line in overload, as a multiple of the tightest target"
    )
    accept_slo_factor: float = Field(
        0.9, gt=0, description="longest predicted wait in overload, as a multiple of the request's own target"
    )
    enter_miss_share: float = Field(0.05, gt=0, le=1, description="share of misses from which it is overload")
    leave_miss_share: float = Field(0.01, ge=0, le=1, description="share of misses below which it may end")
    calm_s: float = Field(5.0, ge=0, description="time below both limits after which overload ends")
    tier_hold_s: float = Field(
        1.0,
        ge=0,
        description="time for which worse priorities are refused after a better one would have been late",
    )
    miss_horizon_s: float = Field(10.0, gt=0, description="time over which misses are counted")
    floor_share: float = Field(
        0.25, ge=0, le=1, description="part of its weight's share of admitted work that each tenant keeps"
    )
    floor_horizon_s: float = Field(30.0, gt=0, description="time over which admitted work is counted")
    default_slo_s: float = Field(10.0, gt=0, description="target of a request that comes with none")
    long_prompt_tokens: int = Field(
        2048, ge=1, description="uncached prompts from this length share the budget of long prefills"
    )
    step_slo_share: float = Field(
        0.25,
        gt=0,
        le=1,
        description="part of the tightest target that a step with long prefills may last under load",
    )
    step_slo_least_share: float = Field(
        0.1, gt=0, le=1, description="the same where the misses are those from which it is overload"
    )
    full_load_slo_share: float = Field(
        0.5,
        gt=0,
        description="backlog, as a part of the tightest target, from which the load counts as full",
    )
    long_drain_slo_share: float = Field(
        0.35,
        gt=0,
        description="part of their own target in which all long prompts that wait are to be through, whatever steps take",
    )
    long_step_least_tokens: int = Field(
        128, ge=1, description="tokens that long prefills get in a step, whatever the load"
    )
    long_patience_s: float = Field(
        10.0, ge=0, description="a long prompt that has waited for so long is not held for another's prefill"
    )
    late_hint_weight: float = Field(
        4.0, ge=0, description="what lateness adds to a running request's place among victims"
    )
    capacity_horizon_s: float = Field(
        60.0, gt=0, description="time over which the best drain rate is remembered as what can be done"
    )
    rate_horizon_s: float = Field(5.0, gt=0, description="time over which the drain rate is measured")

    @model_validator(mode="after")
    def _hysteresis(self) -> OverloadKnobs:
        if self.leave_miss_share > self.enter_miss_share:
            raise ValueError("leave_miss_share must not be above enter_miss_share")
        if self.step_slo_least_share > self.step_slo_share:
            raise ValueError("step_slo_least_share must not be above step_slo_share")
        return self


def _is_long(level: int) -> bool:
    """Whether a level is that of the long prompts of a priority."""
    return bool(level % 2)


class _Overload:
    """The state of the patch for one scheduler."""

    def __init__(self, knobs: OverloadKnobs, context: Any) -> None:
        self._knobs, self._context = knobs, context
        self._prefills = Prefills(context, knobs.rate_horizon_s)
        self._floors = Floors(knobs.floor_share, knobs.floor_horizon_s)
        self._tiers = Tiers(knobs.tier_hold_s)
        self.load = Load(knobs, context, self._prefills)
        # The tightest target of a long prompt.
        self._long_slo = Tightest(knobs.floor_horizon_s)
        self._due: dict[str, Due] = {}
        self._late_at = Alarms()
        # Waiting and late: refused in an overload, and otherwise as soon as one begins.
        self._late_waiting: dict[str, Due] = {}
        self._refused: dict[str, str] = {}
        self._long = LongPrefills(knobs, context, self._prefills)
        # A burst that is let in takes the memory that others need, unless something keeps blocks for them.
        self._blocks_kept = context.beside("watermark")
        self._arrivals = self._late = self._by_floor = self._hopeless = 0
        context.gauge("overload_refused_on_arrival", lambda: float(self._arrivals))
        context.gauge("overload_refused_hopeless", lambda: float(self._hopeless))
        context.gauge("overload_by_floor", lambda: float(self._by_floor))
        context.gauge("overload_late", lambda: float(self._late))
        context.gauge("overload_drain_tokens_per_s", lambda: self._prefills.per_s)

    # arrival

    def on_add(self, request: Any, now: float) -> None:
        """Set its deadline; in overload let it in only if it can be in time, or is owed a floor."""
        knobs, request_id = self._knobs, request.request_id
        info = self._context.request_info(request)
        slo_s = info.slo_ttft_s if info.slo_ttft_s < math.inf else knobs.default_slo_s
        uncached = uncached_tokens(self._context.scheduler, request)
        # Long ones stand back for the others of their priority, so these need not wait for them.
        long = uncached >= knobs.long_prompt_tokens
        owed = self._prefills.add(request, 2 * level_of(info.priority) + long, uncached)
        due = self._due[request_id] = Due(slo_s, self._context.arrived_s(request) + slo_s, True, request)
        self.load.see(slo_s, uncached, now)
        below_floor = self._floors.ask(info.tenant, info.weight, now)
        self.load.update(now)
        if self.load.overloaded:
            room = self.load.room_for(owed.level, now)
            bursts = self._blocks_kept and room >= 1
            longest_s = self.load.burst_s(slo_s, now) if bursts else self.load.standing_s()
            limit_s = min(slo_s * knobs.accept_slo_factor, longest_s) * room
            # What it has spent on its way here is gone.
            wait_s = self._prefills.wait_s(owed.level) + max(0.0, now - (due.deadline_s - slo_s))
            late = wait_s > limit_s
            alone_s = owed.uncached / self._prefills.per_s if self._prefills.per_s else 0.0
            worse_owed = self._prefills.owed_below(owed.level)
            if self._tiers.refuse(owed.level, late, worse_owed, now):
                if not below_floor or alone_s > slo_s:
                    self._arrivals += 1
                    self._refuse(request_id, max(wait_s - limit_s, 1.0))
                    self._prefills.on_finish(request, now)
                    return
                self._by_floor += 1
            else:
                self._tiers.admitted(owed.level, now)
        self._floors.admit(info.tenant, owed.uncached)
        self._late_at.set(self.late_from_s(due), request_id)
        if long:
            self._long.add(request_id)
            self._long_slo.see(slo_s, now)

    def _refuse(self, request_id: str, retry_after_s: float) -> None:
        self._refused[request_id] = refused("overload", retry_after_s)

    def late_from_s(self, due: Due) -> float:
        """From when its deadline cannot be met, even if its prefill began at once at the best pace seen."""
        owed = self._prefills.of(due.request.request_id)
        rate = max(self._prefills.per_s, self._prefills.pace_per_s)
        return due.deadline_s - (owed.tokens / rate if owed is not None and rate else 0.0)

    # lateness

    def expire(self, now: float) -> list[tuple[str, str]]:
        """What was refused since the last pass, and in overload what waits in vain."""
        self.load.update(now)
        for request_id in self._late_at.due(now):
            due, owed = self._due.get(request_id), self._prefills.of(request_id)
            if due is None or owed is None or due.late or owed.first_s is not None:
                continue
            from_s = self.late_from_s(due)
            if from_s > now:
                self._late_at.set(from_s, request_id)
                continue
            due.late = True
            self._late += 1
            if not owed.started:
                self._late_waiting[request_id] = due
            if owed.started or not self.load.overloaded:
                self._context.rekey(due.request)
        if self.load.overloaded and self._late_waiting:
            self._give_up_late(now)
        if not self._refused:
            return []
        out = list(self._refused.items())
        self._refused.clear()
        return out

    def _give_up_late(self, now: float) -> None:
        """Refuse what is late and has not started."""
        for request_id, due in self._late_waiting.items():
            owed = self._prefills.of(request_id)
            if due.late and owed is not None and not owed.started:
                self._hopeless += 1
                self.load.count(owed.level, True, now)
                self._refuse(request_id, self.load.backlog_s())
        self._late_waiting.clear()

    def request_key(self, request: Any, now: float) -> KeyPart:
        """Late or not; what changes it is noticed before each pass."""
        due = self._due.get(request.request_id)
        return (LATE_S if due is not None and due.late else 0.0), None

    def victim_hint(self, request: Any) -> float:
        """Whose promise is broken pays before those whose promise can be kept."""
        due = self._due.get(request.request_id)
        return self._knobs.late_hint_weight if due is not None and due.late else 0.0

    # long prefills

    def waiting_gate(self, request: Any, now: float) -> str | None:
        """One long prefill at a time while their budget is not the whole step."""
        due = self._due.get(request.request_id)
        waited_s = now - (due.deadline_s - due.slo_s) if due is not None else 0.0
        return self._long.gate(request, waited_s)

    def token_cap(self, request: Any, computed: int, new_tokens: int, now: float) -> int:
        """Long prefills share their budget of the step."""
        return self._long.cap(request, new_tokens)

    # bookkeeping

    def after_schedule(self, scheduler_output: Any, now: float) -> None:
        """Charge what was prefilled, and set the long prefills' budget of the next step."""
        self._prefills.after_schedule(scheduler_output, now)
        pace = 0.0
        if not self.load.overloaded:
            pace = self._prefills.owed_to(_is_long) / (
                self._long_slo.slo_s * self._knobs.long_drain_slo_share
            )
        self._long.after_schedule(scheduler_output, self.load.step_s(now), self.load.pressure(now), pace, now)

    def after_update(self, scheduler_output: Any, outputs: Any, now: float) -> None:
        """Judge those whose first token came."""
        for request_id, owed in self._prefills.after_update(scheduler_output, now):
            due = self._due[request_id]
            missed = now > due.deadline_s
            self.load.count(owed.level, missed, now)
            if due.late != missed:
                due.late = missed
                self._context.rekey(due.request)

    def on_preempt(self, request: Any, now: float) -> None:
        """What it had computed is owed again."""
        self._prefills.on_preempt(request)
        self._long.stop(request.request_id)

    def on_finish(self, request: Any, now: float) -> None:
        """Forget it."""
        request_id = request.request_id
        self._long.forget(request_id)
        self._refused.pop(request_id, None)
        self._late_waiting.pop(request_id, None)
        due = self._due.pop(request_id, None)
        before = self._prefills.of(request_id)
        judged = before is None or before.first_s is not None
        owed = self._prefills.on_finish(request, now)
        if due is None or owed is None:
            return
        if not judged and owed.first_s is not None:
            self.load.count(owed.level, now > due.deadline_s, now)
        elif not judged and not due.late and now > due.deadline_s:
            # Ended by others, or by its client, without a token in time.
            self.load.count(owed.level, True, now)
        if not owed.started:
            self._floors.withdraw(self._context.request_info(request).tenant, owed.uncached)
        self._late_at.compact(self._due)


def build(knobs: OverloadKnobs, context: Any) -> Hooks:
    """The hooks for one scheduler."""
    state = _Overload(knobs, context)
    return Hooks(
        request_key=state.request_key,
        waiting_gate=state.waiting_gate,
        token_cap=state.token_cap,
        victim_hint=state.victim_hint,
        expire=state.expire,
        after_schedule=state.after_schedule,
        after_update=state.after_update,
        on_add=state.on_add,
        on_preempt=state.on_preempt,
        on_finish=state.on_finish,
    )


PATCH = Patch(
    name="overload",
    number="F5",
    area="fixes",
    summary="sheds by who can still meet the deadline; late work yields, long prefills shrink, floors hold",
    knobs=OverloadKnobs,
    build=build,
    seams=(
        "request_key",
        "waiting_gate",
        "token_cap",
        "victim_hint",
        "expire",
        "after_schedule",
        "after_update",
        "on_add",
        "on_preempt",
        "on_finish",
    ),
    ranks={"request_key": 35, "waiting_gate": 35, "token_cap": 35, "victim_hint": 50, "expire": 30},
    why=WHY,
    how=HOW,
    baseline="--max-num-queued-tokens: sheds whoever comes when the line is long, by tokens cached or not",
    mechanism="rejection_rate",
    references=(
        "Nichols, Jacobson: Controlling queue delay (2012), for the standing queue that serves nobody",
        "Welsh, Culler: Adaptive overload control for busy Internet servers (2003), for admission by measured response times",
    ),
    removable_when="upstream sheds load by deadlines and keeps floors",
)
