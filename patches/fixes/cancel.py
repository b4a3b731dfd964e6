"""`cancel`: what a cancelled completion had computed is spared until its user has gone on, or would have."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from pydantic import Field

from patches.fixes.returns import Typist
from patches.seam.patch import Hooks, Knobs, Patch
from patches.seam.worth import Worths

if TYPE_CHECKING:
    from patches.seam.context import Context

_MOST_TENANTS = 1024
# A request that goes on from another begins with all of its prompt but for the last block or two, which were re-typed.
_RETYPED_BLOCKS = 3
# So many of a new request's last blocks are looked up.
_LOOKED_AT_BLOCKS = 12


class CancelKnobs(Knobs):
    """Whose blocks are spared, how much and for how long."""

    worth: float = Field(
        default=0.75,
        gt=0,
        le=2,
        description="What such a block is worth: above 0 it goes after all that nobody speaks for.",
        json_schema_extra={"unit": "worth"},
    )
    cancelled_share: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="A tenant of whose latest requests at least this share was cancelled types: what its requests had when "
        "they ended by themselves is spared as well, for the session that goes on from there.",
    )
    first_s: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        description="How long it is spared before the tenant has shown how soon it comes back.",
    )
    most_s: float = Field(
        default=60.0,
        gt=0,
        le=3600,
        description="The longest it is spared; usually twice the time within which nine of ten come back.",
    )
    pool_share: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="Most of the KV cache that is spared at a time; those whose time is nearly over lose it first.",
    )


class _Ending:
    """What one request had when it ended."""

    __slots__ = ("cancelled", "ended_s", "keys", "marks", "tenant", "until_s")

    def __init__(
        self,
        tenant: str,
        cancelled: bool,
        keys: list[bytes],
        marks: list[bytes],
        ended_s: float,
        until_s: float,
    ) -> None:
        self.tenant, self.cancelled, self.keys, self.marks = tenant, cancelled, keys, marks
        self.ended_s, self.until_s = ended_s, until_s


class Cancels:
    """The endings that are still worth waiting for."""

    def __init__(self, knobs: CancelKnobs, context: Context) -> None:
        self._knobs, self._context = knobs, context
        self._tenants: OrderedDict[str, Typist] = OrderedDict()
        # By the blocks that the request which goes on will end with or near.
        self._by_mark: dict[bytes, _Ending] = {}
        self._order: list[tuple[float, int, _Ending]] = []
        self._numbers = 0
        self._counts: dict[bytes, int] = {}
        self.spared = Worths()
        self.returned = self.expired = self.endings = 0

    def on_add(self, request: Any, now: float) -> None:
        """A request came; perhaps it goes on from where another ended."""
        hashes = request.block_hashes
        for each in hashes[: -_LOOKED_AT_BLOCKS - 1 : -1]:
            ending = self._by_mark.get(each)
            if ending is not None:
                if ending.tenant == self._context.request_info(request).tenant:
                    self._typist(ending.tenant).returns[ending.cancelled].returned(now - ending.ended_s)
                    self.returned += 1
                    self._context.count("returned")
                    self._drop(ending)
                return

    def on_finish(self, request: Any, now: float) -> None:
        """A request ended: what it had computed is worth waiting for, if its user will go on."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
        from vllm.v1.request import RequestStatus

        cancelled = request.status == RequestStatus.FINISHED_ABORTED
        tenant = self._context.request_info(request).tenant
        typist = self._typist(tenant)
        typist.ended(cancelled)
        if not cancelled and typist.cancelled_share < self._knobs.cancelled_share:
            return
        scheduler = self._context.scheduler
        size = scheduler.hash_block_size
        hashes = request.block_hashes[: request.num_computed_tokens // size]
        if not hashes:
            return
        groups = range(len(scheduler.kv_cache_config.kv_cache_groups))
        keys = [make_block_hash_with_group_id(each, group) for each in hashes for group in groups]
        prompt = min(request.num_prompt_tokens // size, len(hashes))
        # With nothing to tell who goes on there is nobody to wait for.
        marks = list(hashes[max(0, prompt - _RETYPED_BLOCKS) : prompt]) or list(hashes[:1])
        spare_s = typist.returns[cancelled].spare_s()
        ending = _Ending(tenant, cancelled, keys, marks, now, now + spare_s)
        self._add(ending)
        self._context.count("spared_endings")

    def before_schedule(self, now: float) -> None:
        """Those that did not come back are worth no more than others."""
        order = self._order
        while order and (not order[0][2].marks or order[0][0] <= now):
            ending = heapq.heappop(order)[2]
            if ending.keys:
                self._expire(ending)
            elif ending.marks:
                self._forget(ending)

    # inside

    def _typist(self, tenant: str) -> Typist:
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = Typist(self._knobs.first_s, self._knobs.most_s)
            if len(self._tenants) > _MOST_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        return found

    def _add(self, ending: _Ending) -> None:
        counts, spared, worth = self._counts, self.spared, self._knobs.worth
        for key in ending.keys:
            counts[key] = counts.get(key, 0) + 1
            spared[key] = worth
        for mark in ending.marks:
            before = self._by_mark.get(mark)
            if before is not None:
                self._drop(before)
            self._by_mark[mark] = ending
        self._numbers += 1
        heapq.heappush(self._order, (ending.until_s, self._numbers, ending))
        self.endings += 1
        limit = self._knobs.pool_share * self._context.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        while len(spared) > limit:
            first = heapq.heappop(self._order)[2]
            if first.keys:
                self._expire(first)

    def _expire(self, ending: _Ending) -> None:
        """It is worth no more than others; but whether it comes back is still to be seen."""
        self.expired += 1
        self._spare_no_more(ending)
        forget_s = ending.ended_s + self._knobs.most_s
        self._numbers += 1
        heapq.heappush(self._order, (forget_s, self._numbers, ending))

    def _drop(self, ending: _Ending) -> None:
        self._spare_no_more(ending)
        self._forget(ending)

    def _forget(self, ending: _Ending) -> None:
        for mark in ending.marks:
            if self._by_mark.get(mark) is ending:
                del self._by_mark[mark]
        ending.marks = []

    def _spare_no_more(self, ending: _Ending) -> None:
        if not ending.keys:
            return
        counts, spared = self._counts, self.spared
        pool = self._context.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        for key in ending.keys:
            counts[key] -= 1
            if counts[key]:
                continue
            del counts[key]
            del spared[key]
            block = pool.get_one_block(key)
            if block is not None:
                self._context.revalue(block)
        ending.keys = []
        self.endings -= 1


def build(knobs: CancelKnobs, context: Context) -> Hooks:
    """The hooks for one engine. On a bare block pool nothing is known of requests."""
    cancels = Cancels(knobs, context)
    context.gauge("spared_endings", lambda: float(cancels.endings))
    context.gauge("spared_blocks", lambda: float(len(cancels.spared)))
    context.gauge("returned", lambda: float(cancels.returned))
    context.gauge("expired", lambda: float(cancels.expired))
    return Hooks(
        on_add=cancels.on_add,
        on_finish=cancels.on_finish,
        before_schedule=cancels.before_schedule,
        eviction_hint=cancels.spared,
    )


PATCH = Patch(
    name="cancel",
    number="F1",
    area="fixes",
    summary="Spares what a cancelled completion computed until its user goes on, or would have",
    knobs=CancelKnobs,
    build=build,
    seams=("on_add", "on_finish", "before_schedule", "eviction_hint"),
    ranks={"eviction_hint": 20},
    why="""\
An editor cancels a completion with every keystroke and sends the next, which begins with nearly all of the one before. vLLM
keeps the full blocks of a cancelled request in the cache, as the youngest, so the next keystroke finds them. What it
does not know is that this user comes back and the reader of a document does not: over a pause between two words, or
between two stints, documents push the file out.""",
    how="""\
What a cancelled request had computed is worth more than other free blocks until a request of the same tenant goes on from
there, or until twice the time has passed within which nine of ten came back (at first `first_s`, at most `most_s`). For a
tenant that cancels `cancelled_share` of its requests the same holds for those that ended by themselves, with times of
their own: the next word goes on from them. At most `pool_share` of the cache is spared at a time. A block is still free: if the need is
greater it goes as well.
Not done: the last, partly filled block of a cancelled request cannot be found by anybody (upstream hashes full blocks), and
what a request cancelled before its prefill was through had not computed is not computed for it, since its user has already
sent the next.""",
    baseline="none: upstream keeps a cancelled request's full blocks like any other's",
    mechanism="returned",
    removable_when="vLLM's eviction knows which sessions come back",
    references=(),
)
