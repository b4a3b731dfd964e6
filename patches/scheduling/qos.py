"""S1: serve the short and the important first, age by the backlog, and evict running work for them."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field

from patches.scheduling.rates import Rate
from patches.seam.patch import Hooks, KeyPart, Knobs, Patch

WHY = """
First come, first served lets one long prompt stand before a hundred short ones. Upstream's priority policy orders the
queue by a number that never changes, so under overload the lowest priority is never served, and a request that waits
for KV blocks is never given those of a running one, however cheap that would be.
"""

HOW = """
Each request has an effective class: its API priority, plus a penalty for a long prompt, minus one for each ageing
period that it has waited. The period follows the backlog: it is the time in which the waiting tokens would be served
at the rate of the last seconds, and never below a floor. A faster period would lift everybody at once and turn the
order into first come, first served again.

The class decides the waiting order, the order in which prefills get tokens, and the victim when blocks run out. A
request at the head that cannot be admitted for want of KV blocks takes them from running requests of a worse class,
but not at once: only when its wait, weighted by the difference in class, has grown to what the victim's restoration
would cost (the rent-or-buy rule: never more than twice the cost of the best decision in hindsight). It takes no more
victims than it needs, none that has just been restored, and none if the victims together would not make room.
"""


class QosKnobs(Knobs):
    """What may be tuned."""

    short_prompt_tokens: int = Field(512, ge=0, description="prompts below this length count as short")
    long_prompt_penalty_levels: int = Field(1, ge=0, description="classes that a longer prompt is put back")
    ageing_floor_s: float = Field(10.0, gt=0, description="shortest wait that lifts a request by one class")
    ageing_backlog_factor: float = Field(
        1.0, ge=0, description="ageing period as a multiple of the time that the backlog needs to drain"
    )
    preempt: bool = Field(
        True, description="whether a waiting request may evict a running one of a worse class"
    )
    preempt_class_gap_levels: int = Field(2, ge=1, description="classes by which the victim must be worse")
    preempt_gain_factor: float = Field(
        2.0,
        ge=1,
        description="weight of a class: waiting time counts this factor more for each class between",
    )
    preempt_cooldown_s: float = Field(
        1.0, ge=0, description="a request admitted later than this ago is no victim"
    )
    preempt_max_requests: int = Field(4, ge=1, description="most victims in one step")
    preempt_max_times: int = Field(
        3, ge=1, description="a request preempted this often is no victim any more"
    )


class _Qos:
    """The state of the patch for one scheduler."""

    def __init__(self, knobs: QosKnobs, context: Any) -> None:
        self._knobs, self._context = knobs, context
        self._class_of: dict[str, int] = {}
        self._admitted_s: dict[str, float] = {}
        self._served = Rate(horizon_s=5.0)
        self._blocked = ("", 0.0)
        self._preemptions = 0
        context.gauge("qos_preemptions", lambda: float(self._preemptions))

    # order

    def ageing_period_s(self) -> float:
        """Wait that is worth one class, from the backlog as it stands."""
        knobs = self._knobs
        drain_s = self._context.waiting_tokens() / self._served.per_s if self._served.per_s else 0.0
        return max(knobs.ageing_floor_s, knobs.ageing_backlog_factor * drain_s)

    def request_key(self, request: Any, now: float) -> KeyPart:
        """Effective class; it may change when the next ageing period is over."""
        knobs = self._knobs
        info = self._context.request_info(request)
        fixed = info.priority
        if info.prompt_tokens >= knobs.short_prompt_tokens:
            fixed += knobs.long_prompt_penalty_levels
        period_s = self.ageing_period_s()
        periods = math.floor((now - info.queued_s) / period_s)
        effective = fixed - periods
        # Once lifted, never put back because the backlog grew.
        before = self._class_of.get(request.request_id)
        if before is not None and before < effective:
            effective = before
        self._class_of[request.request_id] = effective
        return effective, info.queued_s + (periods + 1) * period_s

    # eviction of running requests

    def before_schedule(self, now: float) -> None:
        """Make room for the head of the queue if waiting longer costs more than a restoration."""
        if not self._knobs.preempt:
            return
        scheduler = self._context.scheduler
        queue = scheduler.waiting
        if not queue or not scheduler.running:
            return
        head = queue.peek_request()
        shortage = self._shortage_blocks(scheduler, head)
        if shortage <= 0:
            return
        waited_s = now - self._blocked_since(head, now)
        victims = self._victims(scheduler, head, shortage, waited_s, now)
        for victim in victims:
            if self._context.preempt(victim):
                self._preemptions += 1

    def _blocked_since(self, head: Any, now: float) -> float:
        if self._blocked[0] != head.request_id:
            self._blocked = (head.request_id, now)
        return self._blocked[1]

    @staticmethod
    def _shortage_blocks(scheduler: Any, head: Any) -> int:
        """KV blocks that the head lacks to be admitted; above 0 also when all seats are taken."""
        manager = scheduler.kv_cache_manager
        size = scheduler.block_size
        need = -(-head.num_tokens // size) + manager.watermark_blocks
        missing = need - manager.block_pool.get_num_free_blocks()
        if len(scheduler.running) >= scheduler.max_num_active_reqs:
            return int(max(missing, 1))
        return int(missing)

    def _victims(self, scheduler: Any, head: Any, shortage: int, waited_s: float, now: float) -> list[Any]:
        """Just enough running requests, worst class first, least progress first; [] if they do not suffice."""
        knobs = self._knobs
        head_class = self._class_of.get(head.request_id, 0)
        candidates = []
        for request in scheduler.running:
            gap = self._class_of.get(request.request_id, 0) - head_class
            if gap < knobs.preempt_class_gap_levels or request.num_preemptions >= knobs.preempt_max_times:
                continue
            if now - self._admitted_s.get(request.request_id, now) < knobs.preempt_cooldown_s:
                continue
            restore_s = request.num_computed_tokens / self._served.per_s if self._served.per_s else math.inf
            if waited_s * knobs.preempt_gain_factor**gap >= restore_s:
                candidates.append((-gap, request.num_computed_tokens, request.request_id, request))
        candidates.sort(key=lambda c: c[:3])
        chosen: list[Any] = []
        size = scheduler.block_size
        for _, computed, _, request in candidates[: knobs.preempt_max_requests]:
            chosen.append(request)
            shortage -= computed // size
            if shortage <= 0:
                return chosen
        return []

    # bookkeeping

    def after_schedule(self, scheduler_output: Any, now: float) -> None:
        """Measure the service rate; remember when each request was admitted."""
        self._served.add(scheduler_output.total_num_scheduled_tokens, now)
        for new in scheduler_output.scheduled_new_reqs:
            self._admitted_s[new.req_id] = now
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._admitted_s[request_id] = now

    def on_finish(self, request: Any, now: float) -> None:
        """Forget it."""
        self._class_of.pop(request.request_id, None)
        self._admitted_s.pop(request.request_id, None)


def build(knobs: QosKnobs, context: Any) -> Hooks:
    """The hooks for one scheduler."""
    state = _Qos(knobs, context)
    return Hooks(
        request_key=state.request_key,
        before_schedule=state.before_schedule,
        after_schedule=state.after_schedule,
        on_finish=state.on_finish,
    )


PATCH = Patch(
    name="qos",
    number="S1",
    area="scheduling",
    summary="effective priority: API priority, prompt length and ageing scaled to the backlog",
    knobs=QosKnobs,
    build=build,
    seams=("request_key", "before_schedule", "after_schedule", "on_finish"),
    ranks={"request_key": 20},
    why=WHY,
    how=HOW,
    baseline="--scheduling-policy priority: a static number; it never evicts running work for waiting work",
    mechanism="short_queue_wait_ms_p99",
    replaces=("scheduling_policy",),
    references=(
        "Karlin, Manasse, Rudolph, Sleator: Competitive snoopy caching (1988), for the rent-or-buy rule",
    ),
    removable_when="upstream's priority policy ages by the backlog and can evict running work for waiting work",
)
