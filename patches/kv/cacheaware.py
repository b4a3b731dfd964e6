"""K1: among the next few, the least uncached prefill first; whoever shares a prefix that is being computed waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from patches.kv.probe import PrefixProbe
from patches.kv.siblings import Leaders
from patches.seam.patch import Hooks, Knobs, Patch
from patches.seam.window import OFFERED

WHY = """
Order of arrival does not know what the prefix cache holds. A request whose prefix is there now stands behind long
prompts that will push it out, and then pays for it again. And when several requests with one new prefix come together,
the first has computed a chunk of it when the second is admitted: that one finds the chunk, computes the rest beside
the first, and both fill blocks with the same content.
"""

HOW = """
At each pick the first requests of one level (class, priority, tenant: whatever orders the queue before arrival does) are
compared, and the one with the fewest tokens that the cache does not hold goes first; among equals the earlier one.
Whom the choice passes over is counted, and nobody is passed over more often than `overtakes_max_times`: once a
request has reached that number nobody behind it is chosen. So the law is exact, whatever comes: of the requests of its
level that stand behind it at most so many are admitted before it. Requests that are held for their prefix are passed
over by the others too, and that counts all the same.

A request that would have to compute a block that a running prefill is about to compute is held until that prefill has
got as far as both go together. Never is one held for nothing: the leader is running, and when it is done, preempted or
cancelled its siblings go on at once; nor for longer than `hold_max_s`, nor if less than `sibling_tokens` are to gain.
A chunk can be found from the moment it is scheduled, so siblings of a prefix that fits into one step are not held at
all: they hit it in the same step. And since upstream gives a step's budget to running prefills before it looks at
the queue, a sibling meets a leader half-way only where something else caps the leader's share of a step: a threshold
for long prefills, a level, a budget.

How much of a request is cached is looked up in the hash table of the pool, without touching the order of eviction: by
bisection at first, then by confirming the end that was known. At most 64 requests are looked at for a pick, however
many wait.
"""


class CacheawareKnobs(Knobs):
    """What may be tuned."""

    window_requests: int = Field(
        OFFERED, ge=1, le=OFFERED, description="requests among which the next one is chosen"
    )
    overtakes_max_times: int = Field(
        24, ge=0, description="how often a request may be passed over by those behind it; 0 keeps the order"
    )
    hold_siblings: bool = Field(
        True, description="whether requests wait for a running prefill that computes their prefix"
    )
    sibling_tokens: int = Field(
        64, ge=1, description="least tokens that a request must stand to gain for it to be held"
    )
    hold_max_s: float = Field(2.0, ge=0, description="longest time that a request is held, in total")
    hold_max_requests: int = Field(64, ge=0, description="requests that are held at a time; others go on")


class _Passed:
    """What was done to one request: how often it was passed over, and since when it is held for whom."""

    __slots__ = ("by", "held_s", "leader", "request", "since_s", "until_tokens")

    def __init__(self, request: Any) -> None:
        self.request = request
        self.by = 0
        # Held in all, before this time.
        self.held_s = 0.0
        self.since_s = 0.0
        self.leader: Any = None
        self.until_tokens = 0


class _CacheAware:
    """The state of the patch for one scheduler."""

    def __init__(self, knobs: CacheawareKnobs, context: Any) -> None:
        self._knobs, self._context = knobs, context
        self._probe: PrefixProbe | None = None
        self._passed: dict[str, _Passed] = {}
        self._held: dict[str, _Passed] = {}
        # The choice that was offered last, and those before it; and whom each pick of this pass passed over.
        self._offered: tuple[Any, Sequence[Any]] = (None, ())
        self._picked: dict[str, list[_Passed]] = {}
        self._prompt_tokens = self._hit_tokens = 0
        self._overtakes = self._overtakes_max = self._siblings_held = self._holds_cut = 0
        context.gauge("cacheaware_hit_rate", self._hit_rate)
        context.gauge("cacheaware_overtakes", lambda: float(self._overtakes))
        context.gauge("cacheaware_overtakes_max", lambda: float(self._overtakes_max))
        context.gauge("cacheaware_siblings_held", lambda: float(self._siblings_held))
        context.gauge("cacheaware_holds_cut", lambda: float(self._holds_cut))

    def _hit_rate(self) -> float:
        return self._hit_tokens / self._prompt_tokens if self._prompt_tokens else 0.0

    def _ready(self) -> PrefixProbe:
        """The probe; made when the first request comes, since the scheduler is not complete before."""
        if self._probe is None:
            scheduler = self._context.scheduler
            self._probe = PrefixProbe(scheduler)
            self._leaders = Leaders(self._probe, int(scheduler.block_size))
        return self._probe

    # the choice

    def prefer(self, requests: Sequence[Any], now: float) -> int:
        """The least uncached one that may go before those ahead of it."""
        chosen = self._choose(requests, now) if len(requests) > 1 else 0
        self._offered = (requests[chosen], requests[:chosen])
        return chosen

    def _choose(self, requests: Sequence[Any], now: float) -> int:
        passed, most = self._passed, self._knobs.overtakes_max_times
        free = self._knobs.window_requests
        for place, request in enumerate(requests[:free]):
            record = passed.get(request.request_id)
            if (record.by if record is not None else 0) >= most:
                # Nobody behind this one may go before it.
                free = place + 1
                break
        uncached = self._ready().uncached_tokens(requests[:free])
        if not self._leaders or not self._knobs.hold_siblings:
            return uncached.index(min(uncached))
        places = sorted(range(len(uncached)), key=uncached.__getitem__)
        for place in places:
            if self._to_hold(requests[place], now) is None:
                return place
        # All of them wait for a prefix: the gate takes this one out of the way, and the next ones come into view.
        return places[0]

    def on_pick(self, request: Any, now: float) -> None:
        """Count whom it passes over, and take note of its prefill."""
        self._ready().forget(request)
        request_id = request.request_id
        chosen, before = self._offered
        self._offered = (None, ())
        own = self._held.pop(request_id, None)
        if own is not None:
            self._let_go(own, now)
        passed: list[_Passed] = []
        if chosen is request:
            passed += [self._record(other) for other in before if other.request_id not in self._held]
        passed += [held for held in self._held.values() if self._context.precedes(held.request, request)]
        for record in passed:
            record.by += 1
            if record.leader is not None and record.by >= self._knobs.overtakes_max_times:
                self._release(record, now)
        self._picked[request_id] = passed
        self._leaders.add(request)

    def on_put_back(self, request: Any, now: float) -> None:
        """It was not admitted, so it passed nobody over."""
        for record in self._picked.pop(request.request_id, ()):
            record.by -= 1
        self._leaders.remove(request)

    def _record(self, request: Any) -> _Passed:
        record = self._passed.get(request.request_id)
        if record is None:
            record = self._passed[request.request_id] = _Passed(request)
        return record

    # siblings

    def waiting_gate(self, request: Any, now: float) -> str | None:
        """Hold it while a running prefill computes what it needs next."""
        held = self._held.get(request.request_id)
        shared = self._to_hold(request, now)
        if shared is None:
            if held is not None:
                del self._held[request.request_id]
                self._let_go(held, now)
            return None
        if held is None:
            if len(self._held) >= self._knobs.hold_max_requests:
                return None
            held = self._held[request.request_id] = self._record(request)
            held.since_s = now
            self._siblings_held += 1
        held.leader, held.until_tokens = shared.leader, shared.until_tokens
        return "its prefix is being computed"

    def _to_hold(self, request: Any, now: float) -> Any:
        """The running prefill that it is to wait for, if any."""
        knobs = self._knobs
        if self._probe is None or not self._leaders or not knobs.hold_siblings:
            return None
        record = self._record(request)
        since_s = now - record.since_s if record.leader is not None else 0.0
        if record.by >= knobs.overtakes_max_times or record.held_s + since_s >= knobs.hold_max_s:
            return None
        shared = self._leaders.find(request)
        return shared if shared is not None and shared.gain_tokens >= knobs.sibling_tokens else None

    def _release(self, record: _Passed, now: float) -> None:
        """It waits no longer for its leader."""
        del self._held[record.request.request_id]
        self._let_go(record, now)
        self._context.release(record.request)

    def _let_go(self, record: _Passed, now: float) -> None:
        record.held_s += now - record.since_s
        record.leader = None

    def _release_siblings_of(self, leader: Any, now: float) -> None:
        if self._held and self._leaders.remove(leader):
            for record in [held for held in self._held.values() if held.leader is leader]:
                self._release(record, now)

    # what happens

    def before_schedule(self, now: float) -> None:
        """Let those go whose time is up: nobody else would ask for them."""
        if self._probe is None:
            return
        self._probe.begin_step()
        self._picked.clear()
        self._offered = (None, ())
        for record in list(self._held.values()):
            if record.held_s + now - record.since_s >= self._knobs.hold_max_s:
                self._holds_cut += 1
                self._release(record, now)

    def after_schedule(self, scheduler_output: Any, now: float) -> None:
        """See what has landed, and count hits and overtakes of what was admitted."""
        for new in scheduler_output.scheduled_new_reqs:
            self._hit_tokens += new.num_computed_tokens
            self._prompt_tokens += len(new.prompt_token_ids)
        for passed in self._picked.values():
            self._overtakes += len(passed)
            for record in passed:
                self._overtakes_max = max(self._overtakes_max, record.by)
        self._picked.clear()
        if self._probe is None:
            return
        for leader in self._leaders.prefilling():
            if not (self._context.is_running(leader) and leader.is_prefill_chunk):
                self._leaders.remove(leader)
        for record in list(self._held.values()):
            leader = record.leader
            if leader not in self._leaders or leader.num_computed_tokens >= record.until_tokens:
                self._release(record, now)

    def on_preempt(self, request: Any, now: float) -> None:
        """It computes nothing for anybody now."""
        if self._probe is not None:
            self._release_siblings_of(request, now)
            self._leaders.remove(request)

    def on_finish(self, request: Any, now: float) -> None:
        """Forget it."""
        self._passed.pop(request.request_id, None)
        self._held.pop(request.request_id, None)
        if self._probe is not None:
            self._release_siblings_of(request, now)
            self._leaders.remove(request)


def build(knobs: CacheawareKnobs, context: Any) -> Hooks:
    """The hooks for one scheduler."""
    state = _CacheAware(knobs, context)
    return Hooks(
        prefer=state.prefer,
        on_pick=state.on_pick,
        on_put_back=state.on_put_back,
        waiting_gate=state.waiting_gate,
        before_schedule=state.before_schedule,
        after_schedule=state.after_schedule,
        on_preempt=state.on_preempt,
        on_finish=state.on_finish,
    )


PATCH = Patch(
    name="cacheaware",
    number="K1",
    area="kv",
    summary="least uncached prefill first within a bounded window; siblings wait for their prefix's leader",
    knobs=CacheawareKnobs,
    build=build,
    seams=(
        "prefer",
        "on_pick",
        "on_put_back",
        "waiting_gate",
        "before_schedule",
        "after_schedule",
        "on_preempt",
        "on_finish",
    ),
    ranks={"waiting_gate": 40},
    why=WHY,
    how=HOW,
    baseline="none: upstream's queue is ordered by arrival or priority only; it knows of hits when it admits",
    mechanism="cacheaware_hit_rate",
    references=(
        "Zheng et al.: SGLang: efficient execution of structured language model programs (2024), for the order by "
        "matched prefix",
    ),
    removable_when="upstream orders waiting requests by what the prefix cache holds, with a bound on overtaking",
)
