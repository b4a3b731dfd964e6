"""`slru`: prefix blocks that were hit once are worth more than blocks that never were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from patches.kv.segments import SegmentedFreeQueue
from patches.kv.zones import Worth
from patches.seam.patch import Hooks, Knobs, Patch

if TYPE_CHECKING:
    from patches.seam.context import Context


class SlruKnobs(Knobs):
    """How long evictions are remembered and how fast the balance of the segments follows them."""

    ghost_times: float = Field(
        default=4.0,
        gt=0,
        le=64,
        description="Evicted blocks remembered, as a multiple of the pool's blocks (rounded up to a power of "
        "two, 16 bytes each). A block that returns while it is remembered is protected at once.",
    )
    marginal_share: float = Field(
        default=0.125,
        gt=0,
        le=1,
        description="An evicted block that returns within this many further evictions of its segment, as a "
        "share of the pool, is evidence that the segment should keep its blocks longer.",
    )
    doubling_share: float = Field(
        default=0.0625,
        gt=0,
        le=16,
        description="Surplus of such evidence, in blocks as a share of the pool, that doubles or halves the "
        "protection.",
    )
    start_factor: float = Field(
        default=4.0,
        ge=1,
        le=4096,
        description="Protection at the start: a protected block may be this many times as old as the oldest "
        "one on probation before it is evicted. 1 is LRU.",
    )
    max_factor: float = Field(
        default=64.0,
        ge=1,
        le=4096,
        description="Upper limit of the protection, so that what nobody asks for any more does leave.",
    )


def make_queue(blocks: list[Any], knobs: SlruKnobs, worth: Worth | None = None) -> SegmentedFreeQueue:
    """The free queue of one block pool: `blocks` are all of its blocks, `worth` as in `ZonedFreeQueue`."""
    pool = len(blocks)
    return SegmentedFreeQueue(
        blocks,
        ghost_slots=round(knobs.ghost_times * pool),
        marginal_blocks=max(1, round(knobs.marginal_share * pool)),
        doubling_blocks=max(1.0, knobs.doubling_share * pool),
        start_factor=min(knobs.start_factor, knobs.max_factor),
        max_factor=knobs.max_factor,
        worth=worth,
    )


def build(knobs: SlruKnobs, context: Context) -> Hooks:
    """The hooks for one engine: the owner of eviction, and the notice of prefix hits."""
    queues: list[SegmentedFreeQueue] = []

    def eviction_owner(blocks: list[Any]) -> SegmentedFreeQueue:
        queue = make_queue(blocks, knobs, context.worth)
        queues.append(queue)
        _publish(context, queues)
        return queue

    def on_touch(blocks: Any) -> None:
        if not blocks:
            return
        pool = blocks[0].pool
        queue = pool.free_block_queue if pool is not None else queues[0]
        protected = queue.on_touch(blocks)
        if protected:
            context.count("protected_hits", protected)

    return Hooks(eviction_owner=eviction_owner, on_touch=on_touch)


_COUNTERS = (
    "hits_probation",
    "hits_in_use",
    "ghost_hits_probation",
    "ghost_hits_protected",
    "evicted_probation",
    "evicted_protected",
)


def _publish(context: Context, queues: list[SegmentedFreeQueue]) -> None:
    """Counters are summed over the engine's pools; the factor is the first pool's."""

    def total(name: str) -> float:
        return float(sum(getattr(queue, name) for queue in queues))

    context.gauge("protected_hits", lambda: total("hits_protected"))
    for name in _COUNTERS:
        context.gauge(name, lambda name=name: total(name))  # type: ignore[misc]
    context.gauge("protect_factor", lambda: queues[0].protect_factor)


PATCH = Patch(
    name="slru",
    number="K2",
    area="kv",
    summary="Two segments of free blocks, never hit and hit, balanced by what a ghost list shows",
    knobs=SlruKnobs,
    build=build,
    seams=("eviction_owner", "on_touch"),
    why="""\
vLLM reuses the free block that was used longest ago. A document that is read once, or a scan, then pushes out
system prompts and histories that many requests share: a block that has been hit has, on public traces, about
twice the chance to be hit again of one that has not, and LRU does not ask. The known answer, a protected
segment of fixed size, trades one loss for another: four fifths of the pool for proven blocks is far too
much where most reuse is a first reuse, and too little under a scan.""",
    how="""\
Free blocks stand in two queues by age, probation (never hit since they were filled) and protected (hit by a
prefix look-up, also while in use). The oldest protected block is evicted only if it is older than the oldest
one on probation by more than a factor; with factor 1 that is LRU. Evicted blocks are remembered by hash in a
table of fixed size. A block that comes back while it is remembered is protected straight away, so reuse at a
distance longer than the cache is recognised as well. If it comes back soon after its eviction it also votes:
evicted from probation, the factor shrinks; evicted from protection, it grows. So the factor settles where one
block more is worth the same on either side, and no size of a segment has to be chosen.
Chains lose their tail first: blocks keep the order in which they were freed (tail first), no block stands in a
lower segment than a descendant, and a protected block is passed over while an equally old or older one is on
probation, since that may be its descendant. Blocks without cached content are always used first.
What other patches say a block is worth comes before all this: below zero it is evicted first, above zero it is
passed over until nothing else is left. A block that went, or stayed, for that reason has no vote, since it
says nothing about the balance of the two segments.
Upstream's CPU offload in its lazy mode touches each block it copies, which looks like a hit to this patch.""",
    baseline="none: vLLM's GPU blocks have LRU only, in tuned as in stock",
    mechanism="protected_hits",
    removable_when="vLLM offers a choice of eviction policy for GPU blocks that resists scans and adapts itself",
    references=(
        "R. Karedla, J. S. Love, B. G. Wherry: Caching strategies to improve disk system performance. "
        "IEEE Computer 27(3), 1994 (segmented LRU)",
        "N. Megiddo, D. S. Modha: ARC: a self-tuning, low overhead replacement cache. FAST 2003 (ghost lists "
        "that move the balance of two segments)",
        "N. Beckmann, H. Chen, A. Cidon: LHD: improving cache hit rate by maximizing hit density. NSDI 2018 "
        "(equal worth at the margin)",
        "R. Qin et al.: Mooncake: trading more storage for less computation. FAST 2025 (the traces)",
    ),
)
