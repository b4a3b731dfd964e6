"""One engine's share of the adapter: its patches' hooks, compiled, and the state they act on."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from patches.seam import kinds
from patches.seam.context import TICKET_ATTR, Context, RequestInfo
from patches.seam.injected import Injector
from patches.seam.kinds import Bound, HookError
from patches.seam.own import OWN_TENANT
from patches.seam.queue import Key, KeyedRequestQueue, in_order
from patches.seam.receipt import Tallies
from patches.seam.running import AFTER_ALL, RunningOrder
from patches.seam.tenant_queue import TenantQueue
from patches.seam.ticket import Ticket, extra_of, info_of
from patches.seam.window import Choice
from patches.seam.worth import Worth

if TYPE_CHECKING:
    from patches.seam.plan import PatchPlan

#: Where a Scheduler (or an AsyncLLM, or a bare BlockPool) keeps its Runtime; absent on a stock one.
RUNTIME_ATTR = "patchbench_runtime"
_SCHEDULER_MODULE = "vllm.v1.core.sched.scheduler"

# The longest that a request may have been under way to the scheduler.
_OLDEST_S = 60.0


def scheduler_clock() -> float:
    """Seconds on the scheduler's clock, read through its own module so that a replaced clock is seen."""
    module: Any = sys.modules.get(_SCHEDULER_MODULE) or importlib.import_module(_SCHEDULER_MODULE)
    return float(module.time.monotonic())


class Runtime:
    """The hooks of a plan for one Scheduler (or, with none, for one block pool or one API front end)."""

    def __init__(self, plan: PatchPlan, tallies: Tallies, scheduler: Any = None, seed: int = 0) -> None:
        self.plan = plan
        self.scheduler = scheduler
        self.seed = seed
        self.clock: Callable[[], float] = scheduler_clock
        self.status_running = RequestStatus.RUNNING
        self._queues: list[KeyedRequestQueue] = []
        self._arrivals = 0
        self._may_preempt = False
        self._native_priority = False
        self._pool: Any = None
        # Requests that a patch ended, with the stop reason, until an update delivers it.
        self._ended: list[tuple[Any, str]] = []
        self._bind(plan, tallies)

    def _bind(self, plan: PatchPlan, tallies: Tallies) -> None:
        hooks: dict[str, Any] = {}
        # Before the patches are built: they may ask it for something at the start.
        own = "on_own" in plan.order() and self.scheduler is not None
        self.injector = Injector(self, lambda name, *told: hooks[name].on_own(*told)) if own else None
        for chosen in plan.patches:
            patch = chosen.patch
            built = patch.build(chosen.knobs, Context(self, tallies[patch.name], patch.name))
            kinds.check_hooks(patch, built)
            hooks[patch.name] = built

        def bound(seam: str) -> list[Bound]:
            return [(name, getattr(hooks[name], seam), tallies[name]) for name in plan.on_seam(seam)]

        keys, caps, hints, worth = (
            bound(s) for s in ("request_key", "token_cap", "victim_hint", "eviction_hint")
        )
        endings, owner, admission = (bound(s) for s in ("expire", "eviction_owner", "api_admission"))
        self.key = kinds.compile_key(keys)
        rank = bound("tenant_rank")
        self.tenant_rank = self._but_own_rank(kinds.compile_rank(rank[0])) if rank else None
        self.by_tenant = bool(rank) or any(chosen.patch.by_tenant for chosen in plan.patches)
        by_tenant = {chosen.patch.name for chosen in plan.patches if chosen.patch.by_tenant}
        self._gates_by_tenant = tuple(name in by_tenant for name in plan.on_seam("waiting_gate"))
        prefer = bound("prefer")
        self.prefer = self._but_own_first(kinds.compile_prefer(prefer[0])) if prefer else None
        levels = {chosen.patch.name: chosen.patch.key_level for chosen in plan.patches}
        # A continuous part decides all that comes after it, so only the first one matters.
        self._continuous = next(
            ((i, level) for i, name in enumerate(plan.on_seam("request_key")) if (level := levels[name])),
            None,
        )
        self.gates = tuple(map(self._but_own, kinds.compile_gates(bound("waiting_gate"))))
        self._gate_names = plan.on_seam("waiting_gate")
        self.cap = kinds.compile_cap(caps)
        self.victim_hint = kinds.compile_score(hints, "victim_hint") if hints else None
        self.worth = Worth(worth)
        self.expire = kinds.compile_expiry(endings) if endings else None
        self.eviction_owner = owner[0][1] if owner else self._spare if worth else None
        self.admission = tuple(admission)
        self.before_schedule = kinds.compile_observers(bound("before_schedule"))
        self.after_schedule = kinds.compile_observers(bound("after_schedule"))
        self.after_update = kinds.compile_observers(bound("after_update"))
        self.on_add = kinds.compile_observers(bound("on_add"))
        self.on_finish = kinds.compile_observers(bound("on_finish"))
        self.on_preempt = kinds.compile_observers(bound("on_preempt"))
        self.on_pick = tuple(map(self._but_own, kinds.compile_observers(bound("on_pick"))))
        self.on_put_back = tuple(map(self._but_own, kinds.compile_observers(bound("on_put_back"))))
        self.on_touch = kinds.compile_observers(bound("on_touch"))
        self.on_evict = kinds.compile_observers(bound("on_evict"))
        self.reports = {name: hook for name, hook, _ in bound("report")}
        self.has_key = bool(keys or rank)
        self.has_queue = bool(self.has_key or prefer or self.gates or self.on_pick or self.on_put_back)

    # construction

    def constructed(self) -> None:
        """Called once the Scheduler's own `__init__` has run."""
        scheduler = self.scheduler
        if self.has_queue:
            scheduler.kv_holding_waiting.drop_gates()
        if self.has_key:
            # The key already carries the native priority where one applies. Under FCFS upstream
            # preempts running[-1], which is where `RunningOrder` puts the worst key.
            scheduler.policy = type(scheduler.policy).FCFS
        self.running_order = RunningOrder(self)
        self._pool = scheduler.kv_cache_manager.block_pool

    def make_queue(self, policy: Any) -> KeyedRequestQueue:
        """The queue that takes the place of upstream's; `policy` is what the engine was configured with."""
        replaced = any("scheduling_policy" in chosen.patch.replaces for chosen in self.plan.patches)
        self._native_priority = policy.value == "priority" and not replaced
        choice = None if self.prefer is None else Choice(self.prefer, self.level_of, self._has_seat)
        notices = (self.on_pick, self.on_put_back, choice)
        queue: KeyedRequestQueue
        if self.by_tenant:
            queue = TenantQueue(
                self.key_of,
                self.clock,
                self.gates,
                *notices,
                tenant_of=lambda request: self.ticket(request).info.tenant,
                # Tenants kept apart but not ranked: the better key goes first, as in one queue.
                rank=self.tenant_rank or (lambda tenant, now: 0.0),
                by_tenant=self._gates_by_tenant,
            )
        else:
            queue = KeyedRequestQueue(self.key_of, self.clock, self.gates, *notices)
        self._queues.append(queue)
        return queue

    def _has_seat(self) -> bool:
        return len(self.scheduler.running) < self.scheduler.max_num_active_reqs

    def _spare(self, blocks: list[Any]) -> Any:
        """The free queue of a plan whose patches only say what blocks are worth: LRU but for that."""
        from patches.kv.zones import ZonedFreeQueue

        return ZonedFreeQueue(blocks, self.worth)

    def free_queue(self) -> Any:
        """What keeps the free blocks of the scheduler's pool; None before it is constructed."""
        return self._pool.free_block_queue if self._pool is not None else None

    # requests of our own

    def is_own(self, request: Any) -> bool:
        """Whether some patch put the request in, and no client waits for it."""
        return self.injector is not None and request.request_id in self.injector.live

    def _but_own(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook of (request, now) that is not called for requests of our own; the very same where there are none."""
        if self.injector is None:
            return hook
        live = self.injector.live
        return lambda request, now: None if request.request_id in live else hook(request, now)

    def _but_own_first(self, prefer: Callable[[Sequence[Any], float], int]) -> Callable[..., int]:
        if self.injector is None:
            return prefer
        live = self.injector.live
        # Where one of ours is queued nobody else is.
        return lambda requests, now: 0 if requests[0].request_id in live else prefer(requests, now)

    def _but_own_rank(self, rank: Callable[[str, float], float]) -> Callable[[str, float], float]:
        if self.injector is None:
            return rank
        return lambda tenant, now: math.inf if tenant == OWN_TENANT else rank(tenant, now)

    # requests

    def ticket(self, request: Any) -> Ticket:
        """The request's ticket; made when it is first seen."""
        found: Ticket | None = request.__dict__.get(TICKET_ATTR)
        if found is not None:
            return found
        own = self.is_own(request)
        extra = {"tenant": OWN_TENANT} if own else extra_of(request)
        info = info_of(request, extra, self.clock(), self._arrivals)
        # The numbers are the clients': those without any of ours.
        self._arrivals += not own
        made = Ticket(info)
        setattr(request, TICKET_ATTR, made)
        return made

    def tenant(self, request: Any) -> str:
        """Whose request it is; as `info`, without the rest."""
        found: Ticket | None = request.__dict__.get(TICKET_ATTR)
        if found is not None:
            return found.info.tenant
        return str(extra_of(request).get("tenant", ""))

    def info(self, request: Any) -> RequestInfo:
        """Who the request belongs to."""
        return self.ticket(request).info

    def arrived_s(self, request: Any) -> float:
        """When the request reached the API, on the scheduler's clock.

        The API stamps it by the wall clock. Where the two clocks do not agree (an age below 0 or beyond a
        minute) it counts as having come when it was queued.
        """
        module: Any = sys.modules[_SCHEDULER_MODULE]
        age_s = float(module.time.time()) - float(request.arrival_time)
        queued_s = self.info(request).queued_s
        since_queued_s = self.clock() - queued_s
        return queued_s - (age_s - since_queued_s) if since_queued_s <= age_s <= _OLDEST_S else queued_s

    def key_of(self, request: Any, now: float) -> tuple[Key, float | None]:
        """The whole ordering key and when it expires: patches' parts, then arrival, then sequence."""
        ticket = self.ticket(request)
        if self.is_own(request):
            ticket.key = AFTER_ALL
            return ticket.key, None
        parts, until = self.key(request, now)
        key: Key = (*parts, request.arrival_time, ticket.info.sequence)
        if self._native_priority:
            key = (request.priority, *key)
        ticket.key = key
        return key, until

    def level_of(self, key: Key) -> Key:
        """What of a key is its level: all before the innermost part that is continuous, be it arrival."""
        if self._continuous is None or key is AFTER_ALL:
            return key[:-2]
        place, level = self._continuous
        place += self._native_priority
        return (*key[:place], level(key[place]))

    def precedes(self, one: Any, other: Any) -> bool:
        """Whether both stand in one level (and tenant, where tenants are kept apart), and the first one before."""
        first, second = self.ticket(one), self.ticket(other)
        if self.by_tenant and first.info.tenant != second.info.tenant:
            return False
        return first.key < second.key and self.level_of(first.key) == self.level_of(second.key)

    def rekey(self, request: Any) -> None:
        """Apply a changed key, wherever the request is."""
        if request.status == RequestStatus.RUNNING:
            self.key_of(request, self.clock())
            return
        for queue in self._queues:
            queue.rekey(request)

    def rerank(self, tenant: str) -> None:
        """Apply a tenant's changed rank."""
        for queue in self._queues:
            queue.rerank(tenant)

    def tenant_queue(self) -> TenantQueue:
        """The waiting queue of a plan whose queue keeps tenants apart; HookError in another plan."""
        queue = self.scheduler.waiting
        if not isinstance(queue, TenantQueue):
            raise HookError("this needs a queue that keeps tenants apart: set by_tenant on the patch")
        return queue

    def release(self, request: Any) -> None:
        """Let a held request be considered again."""
        for queue in self._queues:
            queue.release(request)

    def waiting_tokens(self) -> int:
        """Tokens of all waiting requests."""
        return sum(queue.tokens for queue in self._queues)

    def waiting_requests(self) -> int:
        """Number of waiting requests, held ones included."""
        return int(self.scheduler.get_request_counts()[1])

    def held_requests(self) -> int:
        """Number of waiting requests that gates hold."""
        return sum(queue.held for queue in self._queues)

    def held_by_reason(self) -> dict[tuple[str, str], int]:
        """Number of held requests by (patch whose gate holds them, its reason); reasons without any left out."""
        names, out = self._gate_names, dict[tuple[str, str], int]()
        for queue in self._queues:
            for (gate, reason), count in queue.held_by.items():
                key = (names[gate - 1], reason)
                out[key] = out.get(key, 0) + count
        return out

    def first_waiting(self, most: int) -> list[Any]:
        """See `Context.first_waiting`."""
        queue = self.scheduler.waiting
        if isinstance(queue, KeyedRequestQueue):
            return queue.first(most)
        heap: list[Any] | None = getattr(queue, "_heap", None)
        return list(islice(queue if heap is None else in_order(heap, most, _stock_key), most))

    def waiting_changes(self) -> Hashable:
        """See `Context.waiting_changes`."""
        queue = self.scheduler.waiting
        if isinstance(queue, KeyedRequestQueue):
            return queue.changes
        return len(queue), queue.peek_request() if len(queue) else None

    def next_due(self) -> float | None:
        """When the next waiting request's key expires, on the scheduler's clock; None if none will."""
        due = [d for d in (queue.next_due() for queue in self._queues) if d is not None]
        return min(due) if due else None

    # a step

    def begin_step(self) -> None:
        """Before upstream's `schedule`: due keys, the patches' own actions, the running order."""
        if self.injector is not None:
            self.injector.before_pass()
        now = self.clock()
        for queue in self._queues:
            queue.begin_step(now)
        if self.expire is not None:
            self._end_named(now)
        if self.before_schedule:
            self._may_preempt = True
            try:
                for hook in self.before_schedule:
                    hook(now)
            finally:
                self._may_preempt = False
        if self.has_key or self.victim_hint is not None:
            self.running_order.arrange()
        if self.injector is not None:
            self.injector.admit()

    def end_schedule(self, scheduler_output: Any) -> None:
        """After upstream's `schedule`."""
        now = self.clock()
        if self.injector is not None:
            scheduler_output = self.injector.after_pass(scheduler_output)
        for hook in self.after_schedule:
            hook(scheduler_output, now)

    def _end_named(self, now: float) -> None:
        assert self.expire is not None
        finish = self.scheduler.finish_requests
        for request_id, reason in self.expire(now).items():
            # One by one: upstream walks several as a set, whose order is not the same in every process.
            for request in finish(request_id, RequestStatus.FINISHED_ABORTED):
                self._ended.append((request, reason))

    def take_ended(self) -> list[tuple[Any, str]]:
        """Requests ended since the last call, with their stop reasons; an update delivers them."""
        ended, self._ended = self._ended, []
        return ended

    def preempt(self, request: Any) -> bool:
        """External preemption; see `Context.preempt`."""
        scheduler = self.scheduler
        if not self._may_preempt:
            raise HookError("Context.preempt was called outside before_schedule")
        if request.status != RequestStatus.RUNNING or not scheduler._request_blocks_can_be_freed(request):
            return False
        scheduler.running.remove(request)
        # As upstream does within schedule(): output still in flight is delivered and the request
        # resumes once it has drained, unless a connector must hand over its blocks.
        scheduler._preempt_request(request, self.clock(), drop_stale_output=scheduler.requires_kv_delivery)
        # Preempted before the pass, it may come back in this very pass: to the runner it must then
        # look resumed, not continued.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        return True


def _stock_key(request: Any) -> tuple[int, float, str]:
    """How upstream's priority queue orders requests."""
    return request.priority, request.arrival_time, request.request_id
