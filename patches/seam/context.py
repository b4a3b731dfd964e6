"""What the adapter gives to a patch: clock, seed, identity of requests, actions, counters."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patches.seam.kinds import HookError
from patches.seam.own import OwnPrefix, Share

if TYPE_CHECKING:
    from patches.seam.injected import Injector
    from patches.seam.receipt import PatchTally
    from patches.seam.runtime import Runtime
    from patches.seam.tenant_queue import TenantLine
    from patches.seam.worth import Worth


#: Where a request keeps what the adapter remembers of it.
TICKET_ATTR = "patchbench_ticket"


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """Who sent a request, and when it first reached the scheduler.

    `tenant`, `tier`, `weight` (its share under contention) and `slo_ttft_s` (the target for its first
    token, from arrival) come from `sampling_params.extra_args`; where absent they are "", "", 1 and
    infinity. `priority` is vLLM's own (smaller first), `queued_s` is the scheduler's clock when the
    request was added and `sequence` its number in order of arrival, from 0.
    """

    tenant: str
    tier: str
    priority: int
    prompt_tokens: int
    queued_s: float
    sequence: int
    weight: float = 1.0
    slo_ttft_s: float = math.inf


class Context:
    """Services for one patch on one engine.

    Attributes:
        scheduler: the vLLM Scheduler; its attributes exist once it is constructed, so read them in
            hooks, not in `build`. None on a bare block pool or at the API.
        clock: seconds, the scheduler's own monotonic clock (virtual where the engine is).
        seed: the engine's seed; the only source of randomness that a patch may use.
    """

    def __init__(self, runtime: Runtime, tally: PatchTally, name: str) -> None:
        self._runtime = runtime
        self._tally = tally
        self.name = name
        self.scheduler: Any = runtime.scheduler
        self.clock: Callable[[], float] = runtime.clock
        self.seed: int = runtime.seed

    def beside(self, patch: str) -> bool:
        """Whether a patch of that name is in force here as well."""
        return patch in self._runtime.plan.names

    # identity and state

    def request_info(self, request: Any) -> RequestInfo:
        """Who the request belongs to; computed once per request."""
        # Asked many times for each, so without a call where it is known.
        ticket = request.__dict__.get(TICKET_ATTR)
        return self._runtime.info(request) if ticket is None else ticket.info

    def tenant(self, request: Any) -> str:
        """Whose request it is, where nothing else of `request_info` is wanted."""
        return self._runtime.tenant(request)

    def arrived_s(self, request: Any) -> float:
        """When the request reached the API, on the scheduler's clock: before `queued_s`, by what lay between."""
        return self._runtime.arrived_s(request)

    def is_running(self, request: Any) -> bool:
        """Whether the request is in the running list (as of its status)."""
        return bool(request.status == self._runtime.status_running)

    def waiting_tokens(self) -> int:
        """Prompt and output tokens of all waiting requests, cached ones included; O(1). 0 without our queue."""
        return self._runtime.waiting_tokens()

    def waiting_requests(self) -> int:
        """Number of waiting requests, held ones included."""
        return self._runtime.waiting_requests()

    def held_requests(self) -> int:
        """Number of waiting requests that some gate holds."""
        return self._runtime.held_requests()

    def line(self, tenant: str) -> TenantLine:
        """What the tenant has waiting that no gate holds; O(1). Only where the queue keeps tenants apart."""
        return self._runtime.tenant_queue().line(tenant)

    def lines(self, most: int) -> list[TenantLine]:
        """The first `most` tenants by rank that have something waiting that no gate holds; O(most log tenants).

        Only where the queue keeps tenants apart: in a plan with `tenant_rank` or a patch that is `by_tenant`.
        """
        return self._runtime.tenant_queue().lines(most)

    def tenant_rank(self, tenant: str) -> float | None:
        """The tenant's rank now, smaller is served sooner; None where no patch ranks tenants."""
        rank = self._runtime.tenant_rank
        return None if rank is None else rank(tenant, self.clock())

    def kv_usage(self) -> float:
        """Share of the KV blocks that are referenced, 0 to 1."""
        return float(self.scheduler.kv_cache_manager.usage)

    def precedes(self, one: Any, other: Any) -> bool:
        """Whether the first stands before the second in one level (of one tenant, where tenants are kept apart); O(1).

        Of requests that were queued at some time; it is their last keys that are compared.
        """
        return self._runtime.precedes(one, other)

    # actions

    def rekey(self, request: Any) -> None:
        """Compute the request's ordering key anew: call it whenever `request_key` would say something else.

        O(log n) for a waiting request, O(1) for a running one, nothing for an unknown one.
        """
        self._runtime.rekey(request)

    def rerank(self, tenant: str) -> None:
        """A tenant's rank has changed. Must be called when it has fallen; a rise is noticed without."""
        self._runtime.rerank(tenant)

    def release(self, request: Any) -> None:
        """Let a request that a gate holds be considered (and its gates asked) again at once."""
        self._runtime.release(request)

    def preempt(self, request: Any) -> bool:
        """Take a running request's blocks and put it back into the queue; only from `before_schedule`.

        Returns False, and does nothing, if it is not running or its blocks cannot be freed yet: where a KV connector loads,
        upstream holds the blocks of all who run in the pass under way, and `tiering` sees to it that it need not.
        Progress is lost up to what the prefix cache keeps: preempt only for a gain above that.
        """
        done = self._runtime.preempt(request)
        if done:
            self._tally.add("before_schedule")
        return done

    def inject(
        self,
        prompt_token_ids: Sequence[int],
        *,
        name: str,
        cache_salt: str | None = None,
        share: Share | None = None,
        computing: Callable[[list[bytes]], None] | None = None,
    ) -> bool:
        """Ask for a prefix to be in the cache, computed by requests of our own when nobody waits.

        From a hook or from `at_start`; the patch must use the seam `on_own`, which tells when it is done. False, and
        nothing is done, where the prefix is empty or longer than the model takes, holds an unknown token or no full
        block, or where too many wait. `computing` is told which blocks ours are about to fill, by their names in the pool.
        """
        injector = self._own()
        tokens = list(prompt_token_ids)
        return injector.ask(OwnPrefix(self.name, name, tokens, cache_salt, share or Share(), computing))

    def at_start(self, act: Callable[[], None]) -> None:
        """Call this once the scheduler is there, before its first pass; what it injects is computed before the engine
        says that it is ready."""
        self._own().at_start(act)

    def own_requests(self) -> Injector:
        """What puts requests of our own into the scheduler."""
        return self._own()

    def _own(self) -> Injector:
        injector = self._runtime.injector
        if injector is None:
            raise HookError(f"patch {self.name!r} must use the seam on_own, on a scheduler")
        return injector

    # evidence

    def count(self, hook: str, n: int = 1) -> None:
        """Record that this patch took effect `n` times; the receipt shows it under `hook`."""
        self._tally.add(hook, n)

    def gauge(self, name: str, value: float | Callable[[], float]) -> None:
        """Declare a mechanism metric: its last value goes into the receipt, its changes into `gauges.parquet`.

        A callable is asked when the receipt is written and, on the virtual engine, after each step was scheduled: it
        must be cheap, O(1), and change nothing. `<patch>_waiting_level_<n>`, the number of requests that wait in
        level n, is drawn over time in the report.
        """
        self._tally.gauges[name] = value

    def table(self, name: str, columns: Callable[[], dict[str, list[Any]]]) -> None:
        """Declare a table of `harness.schema.EXTRA_TABLES`; on the virtual engine it is asked for when the run has ended."""
        self._tally.tables[name] = columns

    @property
    def worth(self) -> Worth:
        """What all patches together say a block is worth beyond its place in the order; for the owner of eviction."""
        return self._runtime.worth

    def revalue(self, block: Any) -> None:
        """What a patch says the block is worth has changed: let it move to its zone of the free queue.

        O(log of the blocks set aside); nothing for a block that is referenced or holds nothing. Only a fall to 0 or
        below, and a rise from below 0, must be told. No block may be worth less than its descendants.
        """
        if block.ref_cnt == 0 and not block.is_null:
            revalue = getattr(block.pool.free_block_queue, "revalue", None)
            if revalue is not None:
                revalue(block)

    def free_queue(self) -> Any:
        """What keeps the free blocks: `ZonedFreeQueue` or another owner's; None before there is a scheduler."""
        return self._runtime.free_queue()

    def first_waiting(self, most: int) -> list[Any]:
        """The next `most` waiting requests in the order in which they would be offered, over all tenants.

        Without those that a gate holds; gates are not asked and nothing is changed. O(most), at times O(most log n).
        Where tenants are kept apart they are taken in turn, by rank if they have ranks (what a pick does to the ranks is
        not known beforehand), and there may be fewer than there are where the queue is full of entries out of date.
        """
        return self._runtime.first_waiting(most)

    def waiting_changes(self) -> Hashable:
        """Compares equal to what it was as long as the latest `first_waiting` holds; O(1).

        For vLLM's own queues it may miss that a request behind the first one went as another one came.
        """
        return self._runtime.waiting_changes()
