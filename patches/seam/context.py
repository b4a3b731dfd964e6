"""What the adapter gives to a patch: clock, seed, identity of requests, actions, counters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patches.seam.receipt import PatchTally
    from patches.seam.runtime import Runtime
    from patches.seam.tenant_queue import TenantLine


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
        return self._runtime.info(request)

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

    def kv_usage(self) -> float:
        """Share of the KV blocks that are referenced, 0 to 1."""
        return float(self.scheduler.kv_cache_manager.usage)

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

        Returns False, and does nothing, if it is not running or its blocks cannot be freed yet.
        Progress is lost up to what the prefix cache keeps: preempt only for a gain above that.
        """
        done = self._runtime.preempt(request)
        if done:
            self._tally.add("before_schedule")
        return done

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

    def eviction_hint(self, block: Any) -> float:
        """Sum of what the other patches say the block is worth beyond the owner's own view."""
        return self._runtime.eviction_hint(block)
