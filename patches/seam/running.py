"""The order in which running requests get tokens, and who stands where upstream looks for a victim."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from patches.seam.context import TICKET_ATTR
from patches.seam.queue import Key

if TYPE_CHECKING:
    from patches.seam.runtime import Runtime

# How many of the worst requests are brought to the tail when a preemption is near: one victim nearly
# always frees enough, and each that is moved gives up its place in the token budget for this step.
_VICTIMS_AT_TAIL = 4

#: The key of requests of our own: behind any other, however many parts that has.
AFTER_ALL: Key = (math.inf,) * 16


class RunningOrder:
    """Arranges one Scheduler's `running` before each pass.

    Args:
        runtime: of the Scheduler, which must be constructed.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._scheduler = scheduler = runtime.scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        self._groups = max(1, len(scheduler.kv_cache_config.kv_cache_groups))
        self._block_size: int = scheduler.block_size
        self._decode_tokens: int = 1 + scheduler.num_spec_tokens + scheduler.num_lookahead_tokens
        self._decode_blocks = 1 + self._decode_tokens // self._block_size

    def arrange(self) -> None:
        """Put `running` into the order in which it gets tokens, and the likely victims at its tail.

        Decodes go first, in upstream's order, then prefill chunks by key: a key alone would let a
        long prefill with a good key take the whole budget and stall every decode. Upstream preempts
        from the tail, so when blocks may run short in this step the worst few by (hint, key) are
        moved there.
        """
        running = self._scheduler.running
        if len(running) < 2:
            return
        chunks = [request for request in running if request.is_prefill_chunk]
        ordered = self._runtime.has_key
        if ordered and len(running) * self._decode_tokens > self._scheduler.max_num_scheduled_tokens:
            # Not even the decodes all fit: now their order matters too.
            place = self.place_key()
            running.sort(key=lambda r: (r.is_prefill_chunk, place(r)))
        elif ordered and chunks:
            chunks.sort(key=self.place_key())
            if running[-len(chunks) :] != chunks:
                running[:] = [r for r in running if not r.is_prefill_chunk] + chunks
        if self._blocks_may_run_short(running, len(chunks)):
            worst = heapq.nlargest(_VICTIMS_AT_TAIL, running, key=self.badness)
            tail = set(worst)
            running[:] = [r for r in running if r not in tail] + worst[::-1]

    def place_key(self) -> Callable[[Any], Key]:
        """What orders running requests: their key, behind their tenant's rank as it is now if tenants have one."""
        rank, now = self._runtime.tenant_rank, self._runtime.clock()
        if rank is None:
            return _key_of_ticket

        def ranked(request: Any) -> Key:
            ticket = request.__dict__[TICKET_ATTR]
            return (rank(ticket.info.tenant, now), *ticket.key)

        return ranked

    def badness(self, request: Any) -> tuple[float, float, Key]:
        """What makes a victim, the greatest first: hints, its tenant's rank, its key; our own before all others."""
        runtime = self._runtime
        if runtime.is_own(request):
            return math.inf, math.inf, AFTER_ALL
        hint = runtime.victim_hint(request) if runtime.victim_hint is not None else 0.0
        ticket, now = runtime.ticket(request), runtime.clock()
        rank = runtime.tenant_rank(ticket.info.tenant, now) if runtime.tenant_rank is not None else 0.0
        return hint, rank, ticket.key or runtime.key_of(request, now)[0]

    def _blocks_may_run_short(self, running: list[Any], num_chunks: int) -> bool:
        free = self._pool.get_num_free_blocks()
        chunk_blocks = 0
        if num_chunks:
            chunk_blocks = self._scheduler.max_num_scheduled_tokens // self._block_size + num_chunks
        # First a bound that costs nothing; only if it fails look at each request.
        if free >= self._groups * (chunk_blocks + len(running) * self._decode_blocks):
            return False
        size, tokens = self._block_size, self._decode_tokens
        growing = sum(1 for r in running if -r.num_computed_tokens % size < tokens)
        return bool(free < self._groups * (chunk_blocks + growing * self._decode_blocks))


def _key_of_ticket(request: Any) -> Key:
    key: Key = request.__dict__[TICKET_ATTR].key
    return key
