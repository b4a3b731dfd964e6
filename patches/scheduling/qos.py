"""S1: serve the short and the important first, age by the backlog, and evict running work for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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
period that it has waited. The period follows the backlog that stands before the request: the time in which the waiting
tokens of its own and of better classes would be served at the rate of the last seconds, and never below a floor. So a
request behind a short line is lifted soon, and one behind a long line late. Ageing is there against starvation, so its
period is many times the line's own length: one near that length lifts every long prompt under a lasting overload, and
one at the head that waits for blocks keeps all the short ones behind it waiting. What a request has gained it keeps.

The class decides the waiting order, the order in which prefills get tokens, and the victim when blocks run out. A
request at the head that cannot be admitted for want of KV blocks or of a seat takes those of running requests of a
worse class with a long prompt, but not at once: only when its wait, weighted by the difference in class, has grown to
what the victim's restoration would cost (the rent-or-buy rule: never more than twice the cost of the best decision in
hindsight). It takes no more victims than it needs, none that was admitted a moment ago, and none at all if they would
not make room together. A victim starts to age anew, and stays in a worse class than the request it made room for as
long as that one waits.

Bound: one that came later and was g classes better on arrival passes a request only while that has waited for less than
g of its longest ageing periods, and one more for each class that the later one has gained by waiting itself.
"""


class QosKnobs(Knobs):
    """What may be tuned."""

    short_prompt_tokens: int = Field(512, ge=0, description="prompts below this length count as short")
    long_prompt_penalty_levels: int = Field(1, ge=0, description="classes that a longer prompt is put back")
    ageing_floor_s: float = Field(0.25, gt=0, description="shortest wait that lifts a request by one class")
    ageing_backlog_factor: float = Field(
        20.0,
        ge=0,
        description="ageing period as a multiple of the time that the line before a request needs to drain",
    )
    preempt: bool = Field(
        True, description="whether a waiting request may evict a running one of a worse class"
    )
    preempt_class_gap_levels: int = Field(1, ge=1, description="classes by which the victim must be worse")
    victim_prompt_tokens: int = Field(
        2048, ge=0, description="prompts below this length are no victims: they free little and hurt as much"
    )
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


@dataclass(frozen=True, slots=True)
class Victim:
    """A running request that could be evicted: how it is preferred (smaller first) and what that frees."""

    preference: tuple[int, int, str]
    freed_blocks: int
    request: Any


def choose(candidates: Sequence[Victim], shortage_blocks: int, most: int) -> list[Victim]:
    """Just enough victims, at most `most`; [] if they do not suffice.

    One that suffices by itself is taken before several that do so together.
    """
    ranked = sorted(candidates, key=lambda victim: victim.preference)
    for victim in ranked:
        if victim.freed_blocks >= shortage_blocks:
            return [victim]
    largest = sorted(ranked, key=lambda victim: -victim.freed_blocks)[:most]
    spare = sum(victim.freed_blocks for victim in largest) - shortage_blocks
    if spare < 0:
        return []
    chosen = sorted(largest, key=lambda victim: victim.preference)
    for victim in reversed(chosen[:]):
        if victim.freed_blocks <= spare:
            chosen.remove(victim)
            spare -= victim.freed_blocks
    return chosen


class _Standing:
    """Where one request stands: its class, since when it ages from which class, and whether it waits."""

    __slots__ = ("base", "behind", "effective", "since_s", "tokens")

    def __init__(self, base: int, since_s: float) -> None:
        self.base = self.effective = base
        self.since_s = since_s
        # Tokens that it adds to the line of its class; 0 while it runs.
        self.tokens = 0
        # Whom it made room for: as long as that one waits it stays in a worse class.
        self.behind: _Standing | None = None


class _Qos:
    """The state of the patch for one scheduler."""

    def __init__(self, knobs: QosKnobs, context: Any) -> None:
        self._knobs, self._context = knobs, context
        self._standing: dict[str, _Standing] = {}
        self._line_tokens: dict[int, int] = {}
        self._admitted_s: dict[str, float] = {}
        self._served = Rate(horizon_s=5.0)
        self._blocked = ("", 0.0)
        self._room_for: _Standing | None = None
        self._preemptions = 0
        context.gauge("qos_preemptions", lambda: float(self._preemptions))

    # order

    def ageing_period_s(self, effective: int) -> float:
        """Wait that is worth one class, from the line before a request of this class as it stands."""
        knobs = self._knobs
        if not self._served.per_s:
            return knobs.ageing_floor_s
        line = sum(tokens for level, tokens in self._line_tokens.items() if level <= effective)
        return max(knobs.ageing_floor_s, knobs.ageing_backlog_factor * line / self._served.per_s)

    def request_key(self, request: Any, now: float) -> KeyPart:
        """Effective class; it may change when the next ageing period is over."""
        standing = self._standing.get(request.request_id)
        if standing is None:
            standing = self._standing[request.request_id] = self._first_standing(request)
        self._leave_line(standing)
        if self._context.is_running(request):
            # What runs does not wait, so it does not age.
            return standing.effective, None
        period_s = self.ageing_period_s(standing.effective)
        waited_s = max(0.0, now - standing.since_s)
        aged = standing.base - math.floor(waited_s / period_s)
        if standing.behind is not None and standing.behind.tokens:
            aged = max(aged, standing.behind.effective + 1)
        # Once lifted, never put back because the line grew.
        standing.effective = min(standing.effective, aged)
        standing.tokens = request.num_tokens
        self._line_tokens[standing.effective] = self._line_tokens.get(standing.effective, 0) + standing.tokens
        next_period = standing.base - standing.effective + 1
        return standing.effective, max(
            standing.since_s + next_period * period_s, math.nextafter(now, math.inf)
        )

    def _first_standing(self, request: Any) -> _Standing:
        info = self._context.request_info(request)
        long = info.prompt_tokens >= self._knobs.short_prompt_tokens
        return _Standing(info.priority + long * self._knobs.long_prompt_penalty_levels, info.queued_s)

    def _leave_line(self, standing: _Standing) -> None:
        if standing.tokens:
            left = self._line_tokens[standing.effective] - standing.tokens
            if left:
                self._line_tokens[standing.effective] = left
            else:
                del self._line_tokens[standing.effective]
            standing.tokens = 0

    # eviction of running requests

    def before_schedule(self, now: float) -> None:
        """Make room for the head of the queue if waiting longer costs more than a restoration."""
        if not self._knobs.preempt:
            return
        scheduler = self._context.scheduler
        queue = scheduler.waiting
        if not queue or not scheduler.running:
            self._blocked = ("", 0.0)
            return
        head = queue.peek_request()
        missing = self._missing_blocks(scheduler, head)
        if missing <= 0 and len(scheduler.running) < scheduler.max_num_active_reqs:
            self._blocked = ("", 0.0)
            return
        if self._blocked[0] != head.request_id:
            self._blocked = (head.request_id, now)
        candidates = self._candidates(scheduler, head, now - self._blocked[1], now)
        if not candidates:
            return
        # Only now the dearer look: cached blocks that somebody uses cost the head nothing.
        shared = self._blocks_in_use_that_it_shares(scheduler, head)
        missing -= len(shared)
        if missing <= 0 and len(scheduler.running) < scheduler.max_num_active_reqs:
            return
        self._room_for = self._standing[head.request_id]
        victims = [
            Victim(preference, self._blocks_to_gain(scheduler, request, shared), request)
            for preference, request in candidates
        ]
        for victim in choose(victims, max(missing, 0), self._knobs.preempt_max_requests):
            if self._context.preempt(victim.request):
                self._preemptions += 1
        self._room_for = None

    @staticmethod
    def _missing_blocks(scheduler: Any, head: Any) -> int:
        """KV blocks that the head lacks if nothing of it is cached; not above 0 when it would fit."""
        manager = scheduler.kv_cache_manager
        free = manager.block_pool.get_num_free_blocks() - manager.watermark_blocks
        return int(-(-head.num_tokens // scheduler.block_size) - free)

    @staticmethod
    def _blocks_in_use_that_it_shares(scheduler: Any, head: Any) -> set[int]:
        found = scheduler.kv_cache_manager.get_computed_blocks(head)[0].blocks
        return {block.block_id for group in found for block in group if block.ref_cnt > 0}

    @staticmethod
    def _blocks_to_gain(scheduler: Any, victim: Any, shared: set[int]) -> int:
        """Blocks that an eviction frees: not those that others hold too, nor those that the head counts on."""
        held = scheduler.kv_cache_manager.get_blocks(victim.request_id).blocks
        return sum(
            1 for group in held for block in group if block.ref_cnt == 1 and block.block_id not in shared
        )

    def _candidates(
        self, scheduler: Any, head: Any, waited_s: float, now: float
    ) -> list[tuple[tuple[int, int, str], Any]]:
        """Running requests that may be evicted for the head: worst class first, least progress first."""
        knobs, rate = self._knobs, self._served.per_s
        head_class = self._standing[head.request_id].effective
        found = []
        for request in scheduler.running:
            if request.num_prompt_tokens < knobs.victim_prompt_tokens:
                continue
            gap = self._standing[request.request_id].effective - head_class
            if gap < knobs.preempt_class_gap_levels or request.num_preemptions >= knobs.preempt_max_times:
                continue
            if now - self._admitted_s.get(request.request_id, now) < knobs.preempt_cooldown_s:
                continue
            computed = request.num_computed_tokens
            # The weight on the right side: on the left it would overflow for a head that waited for long.
            if not rate or waited_s < computed / rate * knobs.preempt_gain_factor**-gap:
                continue
            found.append(((-gap, computed, request.request_id), request))
        return found

    # bookkeeping

    def after_schedule(self, scheduler_output: Any, now: float) -> None:
        """Measure the service rate; take what was admitted out of its line."""
        self._served.add(scheduler_output.total_num_scheduled_tokens, now)
        for new in scheduler_output.scheduled_new_reqs:
            self._on_admission(new.req_id, now)
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._on_admission(request_id, now)

    def _on_admission(self, request_id: str, now: float) -> None:
        self._admitted_s[request_id] = now
        self._leave_line(self._standing[request_id])

    def on_preempt(self, request: Any, now: float) -> None:
        """Age anew from the class it had: what it waited for was given to it once already."""
        standing = self._standing[request.request_id]
        standing.base, standing.since_s = standing.effective, now
        standing.behind = self._room_for

    def on_finish(self, request: Any, now: float) -> None:
        """Forget it."""
        standing = self._standing.pop(request.request_id, None)
        if standing is not None:
            self._leave_line(standing)
        self._admitted_s.pop(request.request_id, None)


def build(knobs: QosKnobs, context: Any) -> Hooks:
    """The hooks for one scheduler."""
    state = _Qos(knobs, context)
    return Hooks(
        request_key=state.request_key,
        before_schedule=state.before_schedule,
        after_schedule=state.after_schedule,
        on_preempt=state.on_preempt,
        on_finish=state.on_finish,
    )


PATCH = Patch(
    name="qos",
    number="S1",
    area="scheduling",
    summary="effective priority: API priority, prompt length and ageing scaled to the backlog",
    knobs=QosKnobs,
    build=build,
    seams=("request_key", "before_schedule", "after_schedule", "on_preempt", "on_finish"),
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
