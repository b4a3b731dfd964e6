"""S5: earliest deadline first among those that can still make it; the others last, and not for ever."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field

from patches.scheduling.deadlines import Alarms, Due, SlackCounts
from patches.scheduling.prefills import Prefills, uncached_tokens
from patches.seam.endings import DEADLINE_EXPIRED
from patches.seam.patch import Hooks, KeyPart, Knobs, Patch

WHY = """
Each tenant is promised a first token within some time, and nothing in the engine knows of it. First come, first served
makes one that is owed its answer in 200 ms stand behind one that has three seconds; a static priority serves the
important ones early although they could wait, and the others too late although there was time. And a request whose
promise is broken already goes on taking tokens from those whose promise could be kept.
"""

HOW = """
The deadline is arrival at the API plus the tenant's TTFT target; who came with none has a default one. Its slack is
what is left until then, less the time that its uncached prompt still needs at the measured prefill rate. Requests with
slack go by deadline, which is optimal as long as all of them can be met. Under overload plain earliest-deadline-first
is the worst order there is, since what is about to fail always looks most urgent; so a request without slack goes
behind all that have some, in the waiting line, in the order of prefills, and first among victims, and stays there
(unless its first token comes in time after all). It is the only change that a key ever sees while it waits, and it
happens at a known moment.

A late request that has not started waits for what the others leave, up to `expire_slo_factor` promises after it came:
then it is ended (408). It is a miss in any account from the first promise on, so keeping it cannot help attainment,
and as it only takes what is left over it hardly harms. One promise more is given because a person may well take an
answer late that would still be an answer; beyond that most have gone, and each one that is served late takes memory
and a seat that the next one in time will lack. Who has begun is never ended.

What bounds a wait: nobody with slack is overtaken by a request with a later deadline, so by none that comes more than
the longest promise after it; nobody who has not started waits longer than `expire_slo_factor` promises. What has
started and was preempted when late has no bound but that of the load.
"""


# Deadlines this close together are one level: within it another patch may choose.
_LEVEL_S = 0.5


class EdfKnobs(Knobs):
    """What may be tuned."""

    slo_factor: float = Field(1.0, gt=0, description="deadline after arrival, as a multiple of the target")
    default_slo_s: float = Field(10.0, gt=0, description="target of a request that comes with none")
    expire_slo_factor: float = Field(
        2.0,
        ge=1,
        description="a request that has not started by this multiple of its target is ended",
    )
    late_hint_weight: float = Field(
        4.0, ge=0, description="what lateness adds to a running request's place among victims"
    )
    rate_horizon_s: float = Field(5.0, gt=0, description="time over which the prefill rate is measured")


class _Edf:
    """The state of the patch for one scheduler."""

    def __init__(self, knobs: EdfKnobs, context: Any) -> None:
        self._knobs, self._context = knobs, context
        self._prefills = Prefills(context, knobs.rate_horizon_s)
        self._due: dict[str, Due] = {}
        self._late_at, self._expire_at = Alarms(), Alarms()
        self._slack = SlackCounts(context, "edf")
        self._feasible = self._missed = self._expired = 0
        context.gauge("edf_feasible", lambda: float(self._feasible))
        context.gauge("edf_feasible_missed", lambda: float(self._missed))
        context.gauge("edf_expired", lambda: float(self._expired))

    def on_add(self, request: Any, now: float) -> None:
        """Set its deadline, and when to look at it again."""
        knobs, request_id = self._knobs, request.request_id
        slo_s = self._context.request_info(request).slo_ttft_s
        slo_s = (slo_s if slo_s < math.inf else knobs.default_slo_s) * knobs.slo_factor
        self._prefills.add(request, 0, uncached_tokens(self._context.scheduler, request))
        arrived_s = self._context.arrived_s(request)
        due = Due(slo_s, arrived_s + slo_s, True, request)
        due.feasible = self.late_from_s(due) > now
        due.late = not due.feasible
        self._feasible += due.feasible
        self._due[request_id] = due
        self._late_at.set(self.late_from_s(due), request_id)
        self._expire_at.set(max(now, arrived_s + slo_s * knobs.expire_slo_factor), request_id)

    def late_from_s(self, due: Due) -> float:
        """When its slack will be used up, by what is known now."""
        owed = self._prefills.of(due.request.request_id)
        rate = self._prefills.per_s
        return due.deadline_s - (owed.tokens / rate if owed is not None and rate else 0.0)

    def request_key(self, request: Any, now: float) -> KeyPart:
        """Its deadline; behind all others once it is late, and it becomes so at one moment."""
        due = self._due.get(request.request_id)
        if due is None:
            return 0.0, None
        self._look(due, now)
        return due.key(), None if due.late else max(self.late_from_s(due), math.nextafter(now, math.inf))

    def _look(self, due: Due, now: float) -> None:
        """See whether it is late by now; what has its first token is judged by when that came."""
        owed = self._prefills.of(due.request.request_id)
        if not due.late and owed is not None and owed.first_s is None:
            due.late = self.late_from_s(due) <= now

    def expire(self, now: float) -> list[tuple[str, str]]:
        """Put what became late behind the others, running or not; end what waited too long."""
        for request_id in self._late_at.due(now):
            due = self._due.get(request_id)
            if due is None or due.late:
                continue
            self._look(due, now)
            if due.late:
                self._context.rekey(due.request)
            elif self._prefills.of(request_id).first_s is None:  # type: ignore[union-attr]
                # It needs less than was thought when it came.
                self._late_at.set(max(self.late_from_s(due), math.nextafter(now, math.inf)), request_id)
        ended = []
        for request_id in self._expire_at.due(now):
            owed = self._prefills.of(request_id)
            if owed is not None and not owed.started:
                ended.append((request_id, DEADLINE_EXPIRED))
        self._expired += len(ended)
        return ended

    def victim_hint(self, request: Any) -> float:
        """Whose promise is broken pays before those whose promise can be kept."""
        due = self._due.get(request.request_id)
        return self._knobs.late_hint_weight if due is not None and due.late else 0.0

    def after_schedule(self, scheduler_output: Any, now: float) -> None:
        """Charge what was prefilled."""
        self._prefills.after_schedule(scheduler_output, now)

    def after_update(self, scheduler_output: Any, outputs: Any, now: float) -> None:
        """Judge those whose first token came."""
        for request_id, _ in self._prefills.after_update(scheduler_output, now):
            due = self._due[request_id]
            self._count(due, now)
            if due.late != (now > due.deadline_s):
                due.late = not due.late
                self._context.rekey(due.request)

    def _count(self, due: Due, first_s: float) -> None:
        self._missed += due.feasible and first_s > due.deadline_s
        self._slack.add((due.deadline_s - first_s) / due.slo_s)

    def on_preempt(self, request: Any, now: float) -> None:
        """What it had computed is owed again."""
        self._prefills.on_preempt(request)

    def on_finish(self, request: Any, now: float) -> None:
        """Forget it; one that ends without a token after its deadline has missed it."""
        due = self._due.pop(request.request_id, None)
        before = self._prefills.of(request.request_id)
        judged = before is None or before.first_s is not None
        owed = self._prefills.on_finish(request, now)
        if due is None or owed is None:
            return
        if not judged and owed.first_s is not None:
            self._count(due, owed.first_s)
        elif not judged:
            self._missed += due.feasible and now > due.deadline_s
        self._late_at.compact(self._due)
        self._expire_at.compact(self._due)


def build(knobs: EdfKnobs, context: Any) -> Hooks:
    """The hooks for one scheduler."""
    state = _Edf(knobs, context)
    return Hooks(
        request_key=state.request_key,
        victim_hint=state.victim_hint,
        expire=state.expire,
        after_schedule=state.after_schedule,
        after_update=state.after_update,
        on_add=state.on_add,
        on_preempt=state.on_preempt,
        on_finish=state.on_finish,
    )


PATCH = Patch(
    name="edf",
    number="S5",
    area="scheduling",
    summary="earliest deadline first among those that can make it; the late last, and ended in the end",
    knobs=EdfKnobs,
    build=build,
    seams=(
        "request_key",
        "victim_hint",
        "expire",
        "after_schedule",
        "after_update",
        "on_add",
        "on_preempt",
        "on_finish",
    ),
    ranks={"request_key": 40, "victim_hint": 40, "expire": 20},
    key_level=lambda deadline_s: deadline_s // _LEVEL_S,
    why=WHY,
    how=HOW,
    baseline="none: no flag of upstream's knows a deadline; --scheduling-policy priority is a static number",
    mechanism="edf_feasible_missed",
    replaces=("scheduling_policy",),
    references=(
        "Liu, Layland: Scheduling algorithms for multiprogramming in a hard-real-time environment (1973), for the "
        "optimality of the order",
        "Locke: Best-effort decision making for real-time scheduling (1986), for what it does under overload",
    ),
    removable_when="upstream orders and ends requests by a deadline that they carry",
)
