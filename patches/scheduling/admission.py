"""S3: refuse early and say when to come back, from the uncached backlog and the measured drain rate."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field

from patches.scheduling.floors import Floors
from patches.scheduling.kvforecast import BlockFlow
from patches.scheduling.prefills import Prefills, uncached_tokens
from patches.scheduling.tiers import Tiers
from patches.seam.endings import refused
from patches.seam.patch import Hooks, Knobs, Patch

WHY = """
A queue that grows without bound serves nobody in time: each request waits behind all that came before, and is worth
nothing when its turn comes. Upstream can refuse beyond a number of queued requests or tokens, but a number knows
neither how fast the line drains nor that most of a prompt may be cached, it refuses gold and bronze alike, and it
does not say when to come back.
"""

HOW = """
On arrival a prompt is looked up in the prefix cache (without touching it), once, unless it is short. Its uncached
tokens join the backlog of its priority, and leave it as they are computed. The drain rate is measured over those steps
that left something over, so idle time does not make the machine look slow. The wait of a request is what is owed to
better priorities at that rate, and what is owed to its own, with its own prompt, at the rate which that has been getting.

Refused, before it ever reaches a scheduling pass, is a request

- of a lower priority while the KV cache is red, 85% of its blocks or more are referenced (`kv_red`); beside `watermark`,
  which holds it in the queue, only if the blocks that it and those before it need will not be there in time at the
  rate at which those who end give theirs back;
- when the whole backlog needs longer than `max_backlog_s` to drain, or more than `max_waiting_requests` wait
  (`queue_depth`), unless its priority is high: what is over the limit is the low priorities' own line, since the high
  ones are served before it;
- whose wait is longer than `late_slo_factor` times its TTFT target, so that it would only be late (`predicted_late`).
  Low tiers go first: one that would be late closes those of worse priority for `tier_hold_s`, and is refused itself
  only when none of them was let in for so long and none has a prompt left to compute.

None is refused while its tenant has been let in with less than its floor: `floor_share` of its weight's part of the
uncached tokens admitted lately. Retry-After is the time in which the backlog before the request drains to where it
would have been let in, at the measured rate, rounded up to seconds.

It delays nobody: who is not refused is queued as without it, so nobody is overtaken for its sake. A tenant cannot be shut
out, by its floor.
"""


class AdmissionKnobs(Knobs):
    """What may be tuned."""

    kv_red_share: float = Field(
        0.85,
        gt=0,
        le=1,
        description="share of KV blocks referenced from which only high priorities are let in",
    )
    high_priority_rank: int = Field(
        1, description="API priorities up to this number are high (smaller is more important)"
    )
    max_backlog_s: float = Field(
        30.0,
        gt=0,
        description="uncached backlog, in seconds of draining, from which low priorities are refused",
    )
    max_waiting_requests: int = Field(
        10_000, ge=1, description="waiting requests from which low priorities are refused"
    )
    late_slo_factor: float = Field(
        1.0, gt=0, description="longest predicted wait, as a multiple of the request's TTFT target"
    )
    tier_hold_s: float = Field(
        1.0,
        ge=0,
        description="time for which worse priorities are refused after a better one would have been late",
    )
    floor_share: float = Field(
        0.25,
        ge=0,
        le=1,
        description="part of its weight's share of admitted work below which no tenant is refused",
    )
    floor_horizon_s: float = Field(30.0, gt=0, description="time over which admitted work is counted")
    rate_horizon_s: float = Field(5.0, gt=0, description="time over which the drain rate is measured")


# Priorities beyond count as these: the cost of a look at the backlog is in the number of levels.
_LEVELS = 8


def level_of(priority: int) -> int:
    """The level of an API priority."""
    return max(-_LEVELS, min(_LEVELS, priority))


class _Admission:
    """The state of the patch for one scheduler."""

    def __init__(self, knobs: AdmissionKnobs, context: Any) -> None:
        self._knobs, self._context = knobs, context
        self._prefills = Prefills(context, knobs.rate_horizon_s)
        self._floors = Floors(knobs.floor_share, knobs.floor_horizon_s)
        self._tiers = Tiers(knobs.tier_hold_s)
        self._blocks = BlockFlow(context, knobs.rate_horizon_s)
        self._held_for_blocks = context.beside("watermark")
        self._refused: dict[str, str] = {}
        self._by_code = {"kv_red": 0, "queue_depth": 0, "predicted_late": 0}
        self._by_floor = 0
        for code in self._by_code:
            context.gauge(f"admission_{code}", lambda code=code: float(self._by_code[code]))
        context.gauge("admission_by_floor", lambda: float(self._by_floor))
        context.gauge("admission_drain_tokens_per_s", lambda: self._prefills.per_s)

    def on_add(self, request: Any, now: float) -> None:
        """Decide; one that is refused leaves the queue before the next pass."""
        info = self._context.request_info(request)
        level = level_of(info.priority)
        owed = self._prefills.add(request, level, uncached_tokens(self._context.scheduler, request))
        below_floor = self._floors.ask(info.tenant, info.weight, now)
        found = self._refusal(request, info, level, now)
        if found is not None and not below_floor:
            code, retry_after_s = found
            self._by_code[code] += 1
            self._refused[request.request_id] = refused(code, retry_after_s)
            # It will be ended before the next pass: those that come in between need not wait for it.
            self._prefills.on_finish(request, now)
            return
        self._by_floor += found is not None
        if found is None:
            self._tiers.admitted(level, now)
        self._floors.admit(info.tenant, owed.uncached)

    def _refusal(self, request: Any, info: Any, level: int, now: float) -> tuple[str, float] | None:
        """Why it is refused, and for how long; None if it is not."""
        knobs, prefills = self._knobs, self._prefills
        rate = prefills.per_s
        backlog_s = prefills.total / rate if rate else 0.0
        wait_s = prefills.wait_s(level)
        if info.priority > knobs.high_priority_rank:
            if self._context.kv_usage() >= knobs.kv_red_share:
                # Where nothing holds it in the queue, it would take the last blocks as soon as it can.
                blocks_s = self._blocks.wait_s(request) if self._held_for_blocks else math.inf
                if blocks_s > min(info.slo_ttft_s * knobs.late_slo_factor, knobs.max_backlog_s):
                    return "kv_red", max(backlog_s, blocks_s if blocks_s < math.inf else 0.0)
            if backlog_s > knobs.max_backlog_s:
                return "queue_depth", backlog_s - knobs.max_backlog_s
            if self._context.waiting_requests() >= knobs.max_waiting_requests:
                return "queue_depth", backlog_s
        limit_s = info.slo_ttft_s * knobs.late_slo_factor
        if self._tiers.refuse(level, wait_s > limit_s, prefills.owed_below(level), now):
            return "predicted_late", max(wait_s - limit_s, knobs.tier_hold_s)
        return None

    def expire(self, now: float) -> list[tuple[str, str]]:
        """What was refused since the last pass."""
        if not self._refused:
            return []
        out = list(self._refused.items())
        self._refused.clear()
        return out

    def after_schedule(self, scheduler_output: Any, now: float) -> None:
        """Charge what was prefilled."""
        self._prefills.after_schedule(scheduler_output, now)
        self._blocks.after_schedule(now)

    def on_preempt(self, request: Any, now: float) -> None:
        """What it had computed is owed again."""
        self._prefills.on_preempt(request)

    def on_finish(self, request: Any, now: float) -> None:
        """Forget it; work that never started was not admitted after all."""
        self._refused.pop(request.request_id, None)
        self._blocks.on_finish(request)
        owed = self._prefills.on_finish(request, now)
        if owed is not None and not owed.started:
            self._floors.withdraw(self._context.request_info(request).tenant, owed.uncached)


def build(knobs: AdmissionKnobs, context: Any) -> Hooks:
    """The hooks for one scheduler."""
    state = _Admission(knobs, context)
    return Hooks(
        expire=state.expire,
        after_schedule=state.after_schedule,
        on_add=state.on_add,
        on_preempt=state.on_preempt,
        on_finish=state.on_finish,
    )


PATCH = Patch(
    name="admission",
    number="S3",
    area="scheduling",
    summary="refuses on arrival what would be late, with a Retry-After from uncached backlog / drain rate",
    knobs=AdmissionKnobs,
    build=build,
    seams=("expire", "after_schedule", "on_add", "on_preempt", "on_finish"),
    ranks={"expire": 10},
    why=WHY,
    how=HOW,
    baseline="--max-num-queued-reqs, --max-num-queued-tokens: 503 beyond a number, for all alike, without Retry-After",
    mechanism="rejection_rate",
    removable_when="upstream refuses by predicted wait and says Retry-After",
)
