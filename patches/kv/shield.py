"""`shield`: the cached prefix of a preempted request, and of what is served next, is the last to be evicted."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from pydantic import Field

from patches.kv.needs import Needs
from patches.seam.patch import Hooks, Knobs, Patch

if TYPE_CHECKING:
    from patches.seam.context import Context

# What a need counts of the first so many of the queue; and the most that it counts besides for one that was preempted.
_BY_PLACE = ((2, 256), (8, 64), (24, 16), (1 << 30, 4))
_PREEMPTED = 128
# How many preemptions of one tenant the belief that all come back is worth, and how many tenants are remembered.
_PRIOR, _TENANTS = 4, 1024


class ShieldKnobs(Knobs):
    """How far ahead in the queue to look."""

    ahead_requests: int = Field(
        default=64,
        ge=0,
        le=1024,
        description="The prefixes of this many requests at the head of the waiting queue are spared. 0: only those of "
        "preempted requests.",
    )
    refresh_steps: int = Field(
        default=4,
        ge=1,
        le=1024,
        description="The head of the queue is looked at again after this many steps at the soonest, if it may have changed.",
    )


class _Preempted:
    """A request that lost its blocks and has not come back."""

    __slots__ = ("lost_tokens", "request")

    def __init__(self, request: Any, lost_tokens: int) -> None:
        self.request = request
        self.lost_tokens = lost_tokens


class Returns:
    """How often a tenant's preempted requests came back rather than being cancelled."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}

    def note(self, tenant: str, came_back: bool) -> None:
        """One came back, or will not."""
        back, all_ = self._counts.pop(tenant, (0, 0))
        while len(self._counts) >= _TENANTS:
            del self._counts[next(iter(self._counts))]
        self._counts[tenant] = (back + came_back, all_ + 1)

    def likelihood(self, tenant: str) -> float:
        """The chance that one comes back: 1 until the tenant has shown otherwise."""
        back, all_ = self._counts.get(tenant, (0, 0))
        return (back + _PRIOR) / (all_ + _PRIOR)


class Shield:
    """What one engine's shield knows: the needs of the head of its queue, and who was preempted."""

    def __init__(self, knobs: ShieldKnobs, context: Context) -> None:
        self._knobs = knobs
        self._context = context
        self._by_place = tuple(islice(_points_by_place(), knobs.ahead_requests))
        self.needs = Needs()
        self._window: list[Any] = []
        self._points: dict[str, int] = {}
        self._seen: Any = None
        self._wait_steps = 0
        self._preempted: dict[str, _Preempted] = {}
        self._returns = Returns()
        self.preempted_tokens = self.recomputed_tokens = 0

    def before_schedule(self, now: float) -> None:
        """Look at the head of the queue again, if it may have changed."""
        if self._wait_steps > 0:
            self._wait_steps -= 1
            return
        changes = self._context.waiting_changes()
        if changes == self._seen:
            return
        window = self._context.first_waiting(self._knobs.ahead_requests)
        # Reading it may set the queue's own books right, so its number is asked anew.
        self._seen = self._context.waiting_changes()
        self._wait_steps = self._knobs.refresh_steps - 1
        if window != self._window:
            self._slide(window)

    def on_preempt(self, request: Any, now: float) -> None:
        """It is about to lose its blocks; they stay findable as long as anything else can be evicted."""
        tokens = int(request.num_computed_tokens - request.num_output_placeholders)
        self.preempted_tokens += tokens
        self._preempted[request.request_id] = _Preempted(request, tokens)
        self._context.count("preemptions_seen")
        budget = int(self._context.scheduler.max_num_scheduled_tokens)
        likelihood = self._returns.likelihood(self._context.request_info(request).tenant)
        # Its restore cost in steps, saturating: beyond some steps all are dear.
        points = int(_PREEMPTED * likelihood * tokens / (tokens + budget))
        self.needs.add(("preempted", request.request_id), self._chain(request), max(1, points))

    def after_schedule(self, output: Any, now: float) -> None:
        """Requests that came back: what of theirs has to be computed again."""
        if not self._preempted:
            return
        # Which of the two lists a resumed request is in is for the model runner's version to say.
        for new in output.scheduled_new_reqs:
            self._came_back(new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                self._came_back(request_id, computed)

    def _came_back(self, request_id: str, computed_tokens: int) -> None:
        lost = self._preempted.pop(request_id, None)
        if lost is not None:
            self.recomputed_tokens += max(0, lost.lost_tokens - computed_tokens)
            self._returns.note(self._context.request_info(lost.request).tenant, True)
            # It holds what it found, and what it did not find is gone.
            self.needs.remove(("preempted", request_id))

    def on_finish(self, request: Any, now: float) -> None:
        """It ended; if it had not come back, what was kept for it is worth nothing."""
        if request.request_id in self._preempted:
            del self._preempted[request.request_id]
            self._returns.note(self._context.request_info(request).tenant, False)
            self._revalue(self.needs.remove(("preempted", request.request_id)))

    def _slide(self, window: list[Any]) -> None:
        """Change over to a new head of the queue."""
        points = dict(zip([request.request_id for request in window], self._by_place, strict=False))
        for request in self._window:
            if request.request_id not in points:
                left = self.needs.remove(("queued", request.request_id))
                # Admitted, it holds them, but for the last: of that the last token is always computed again.
                self._revalue(left[-1:] if self._context.is_running(request) else left)
        before = self._points
        for request in window:
            now = points[request.request_id]
            if (was := before.get(request.request_id)) is None:
                self.needs.add(("queued", request.request_id), self._chain(request), now)
            elif was != now:
                self.needs.change(("queued", request.request_id), now)
        self._window, self._points = window, points

    def _chain(self, request: Any) -> tuple[bytes, ...]:
        return tuple(
            request.block_hashes[: self._context.scheduler.kv_cache_manager.block_pool.num_gpu_blocks]
        )

    def _revalue(self, lapsed: tuple[bytes, ...]) -> None:
        """Let free blocks go back into the order of eviction whose need has lapsed; tails first."""
        queue = self._context.free_queue()
        if not getattr(queue, "spared_blocks", 0):
            return
        manager = self._context.scheduler.kv_cache_manager
        groups = range(len(manager.kv_cache_config.kv_cache_groups))
        for name in reversed(lapsed):
            for group in groups:
                for block in manager.block_pool.get_cached_block(name, [group]) or ():
                    self._context.revalue(block)


def _points_by_place() -> Iterator[int]:
    """What a request counts by its place in the queue: the sooner it is served, the more."""
    place = 0
    for end, points in _BY_PLACE:
        while place < end:
            yield points
            place += 1


def build(knobs: ShieldKnobs, context: Context) -> Hooks:
    """The hooks for one engine."""
    shield = Shield(knobs, context)

    def of_queue(name: str) -> float:
        return float(getattr(context.free_queue(), name, 0))

    context.gauge("spared_hits", lambda: of_queue("spared_hits"))
    context.gauge("spared_evicted", lambda: of_queue("spared_evicted"))
    context.gauge("spared_blocks", lambda: of_queue("spared_blocks"))
    context.gauge("needed_blocks", lambda: float(len(shield.needs)))
    context.gauge("preempted_tokens", lambda: float(shield.preempted_tokens))
    context.gauge("recomputed_tokens", lambda: float(shield.recomputed_tokens))
    return Hooks(
        eviction_hint=shield.needs,
        before_schedule=shield.before_schedule,
        after_schedule=shield.after_schedule,
        on_preempt=shield.on_preempt,
        on_finish=shield.on_finish,
    )


PATCH = Patch(
    name="shield",
    number="K3",
    area="kv",
    summary="Spares the cached prefixes of preempted requests and of those at the head of the queue",
    knobs=ShieldKnobs,
    build=build,
    seams=("eviction_hint", "before_schedule", "after_schedule", "on_preempt", "on_finish"),
    ranks={"eviction_hint": 30},
    why="""\
Eviction looks back: LRU, and any policy that learns from the past, gives up the block whose last use is longest ago.
But a server with a queue knows part of the future. The requests that are served next stand in it, and so do those that
were preempted, which need again precisely what they have just lost. On public traces, to spare the blocks that the next
64 requests need adds 5 to 44% to the hits of LRU, and 3 to 37% to those of `slru`, which uses the past better.
vLLM frees a preempted request's blocks as the most recently used ones, so they survive for a while. Under the pressure
that preempts, a while is short: what other requests free meanwhile is younger, and goes later, though nobody may ever ask
for it.""",
    how="""\
The hashes of the prompts of the first requests of the queue (`ahead_requests`), and of all that a preempted request had
computed, are kept in one table with the sum of what needs them. A queued request counts by its place: 256 for the
first two, then 64, 16 and 4. A preempted one counts up to 128 besides: its restore cost (tokens, in steps,
saturating) times the chance that it comes back rather than being cancelled, which each tenant shows. A block in the
table is worth +2 to +4 to the free queue: when eviction comes upon it, it is set aside and passed over as long as
anything else is free. So blocks are only ranked, never withheld: all of them count as free and are handed out if
there is nothing else, the least needed first and of equals the deepest. If the request is cancelled or overtaken,
its blocks return to the place in the order that they would have by now.
All prefixes of a needed block are needed as well, and at least as much, so no block outlives its parent.
The table follows the queue: a request's hashes are entered when it comes within reach, counted anew when it passes one of
the four places, and taken out when it leaves. Nothing is done in a step in which the head of the queue did not change,
or within `refresh_steps` of the last look. The length of the queue does not matter. Nothing is looked up in the cache,
and a freed block is not asked about: only one that is about to be evicted is.
Overtaking: none; the order of the queue and the admission of requests are left alone. That is also its limit: where a
preempted request must wait while better ones are admitted into the memory that it gave up, as under upstream's
priority policy, there is soon nothing else to evict, and its prefix goes however much it is worth. How much is lost
to that, `scripts/recompute_floor.py` tells from a run. To hold the others back instead would keep most prefixes, but give
the low classes memory that the high ones wait for; a tier below the device's memory (`tiering`) is the way out.""",
    baseline="none: in tuned as in stock, freed blocks are evicted in the order in which they were freed",
    mechanism="recomputed_tokens",
    removable_when="vLLM's free queue takes account of the waiting queue",
    references=(
        "L. A. Belady: A study of replacement algorithms for a virtual-storage computer. IBM Systems Journal 5(2), "
        "1966 (the future decides)",
        "R. Qin et al.: Mooncake: trading more storage for less computation. FAST 2025 (the traces)",
    ),
)
