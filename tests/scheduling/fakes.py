"""What a scheduling patch sees of an engine, as plain objects: for tests of its arithmetic only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

from patches.seam.context import RequestInfo
from patches.seam.patch import Hooks

BLOCK_TOKENS = 16

_ids = count()


@dataclass(eq=False)
class FakeBlock:
    """A KV block: how many hold it."""

    ref_cnt: int = 1
    block_id: int = field(default_factory=lambda: next(_ids))


@dataclass(eq=False)
class FakeRequest:
    """The attributes of a vLLM request that the patches read.

    `blocks` are what it holds while it runs (by default what its computed tokens need, for itself
    alone), `cached` what the prefix cache would give to it.
    """

    request_id: str
    priority: int = 0
    num_prompt_tokens: int = 100
    num_tokens: int = 100
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    queued_s: float = 0.0
    is_prefill_chunk: bool = False
    blocks: list[FakeBlock] = field(default_factory=list)
    cached: list[FakeBlock] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.blocks:
            self.blocks = [FakeBlock() for _ in range(-(-self.num_computed_tokens // BLOCK_TOKENS))]


@dataclass
class FakeScheduler:
    """Just enough of a scheduler: lists, a pool that only counts, and limits."""

    free_blocks: int = 0
    all_blocks: int = 1000
    block_size: int = BLOCK_TOKENS
    max_num_active_reqs: int = 64
    max_num_scheduled_tokens: int = 2048
    queued: list[FakeRequest] = field(default_factory=list)
    running: list[FakeRequest] = field(default_factory=list)

    @property
    def waiting(self) -> Any:
        """A queue whose head is the first of `queued`."""
        return _Queue(self.queued)

    @property
    def requests(self) -> dict[str, FakeRequest]:
        """All requests by id."""
        return {request.request_id: request for request in [*self.queued, *self.running]}

    @property
    def kv_cache_manager(self) -> Any:
        """A manager without a watermark."""
        pool = SimpleNamespace(get_num_free_blocks=lambda: self.free_blocks, num_gpu_blocks=self.all_blocks)
        return SimpleNamespace(
            watermark_blocks=0,
            block_pool=pool,
            get_blocks=lambda request_id: SimpleNamespace(blocks=(self.requests[request_id].blocks,)),
            get_computed_blocks=lambda request: (
                SimpleNamespace(blocks=(request.cached,)),
                len(request.cached) * BLOCK_TOKENS,
                0,
            ),
        )


class _Queue:
    def __init__(self, queued: list[FakeRequest]) -> None:
        self._queued = queued

    def __bool__(self) -> bool:
        return bool(self._queued)

    def peek_request(self) -> FakeRequest:
        return self._queued[0]


class FakeContext:
    """Stands in for the adapter's Context; `preempted` and `rekeyed` are what the patch asked for.

    It tells the hooks of a preemption as the adapter does: the notice first, then the new key.
    """

    def __init__(self, scheduler: FakeScheduler, others: tuple[str, ...] = ()) -> None:
        self.scheduler = scheduler
        self.others = others
        self.now = 0.0
        self.hooks = Hooks()
        self.preempted: list[FakeRequest] = []
        self.rekeyed: list[str] = []
        self.gauges: dict[str, Callable[[], float]] = {}

    def clock(self) -> float:
        """The time that the test sets."""
        return self.now

    def beside(self, patch: str) -> bool:
        """Those that the test names; alone without."""
        return patch in self.others

    def request_info(self, request: FakeRequest) -> RequestInfo:
        """Its identity; no tenant."""
        return RequestInfo("", "", request.priority, request.num_prompt_tokens, request.queued_s, 0)

    def is_running(self, request: FakeRequest) -> bool:
        """Whether it is in the running list."""
        return request in self.scheduler.running

    def waiting_requests(self) -> int:
        """Length of the queue."""
        return len(self.scheduler.queued)

    def preempt(self, request: FakeRequest) -> bool:
        """Back into the queue, behind the head; blocks that it alone holds become free."""
        scheduler = self.scheduler
        assert self.hooks.on_preempt
        self.hooks.on_preempt(request, self.now)
        scheduler.running.remove(request)
        for block in request.blocks:
            block.ref_cnt -= 1
            scheduler.free_blocks += block.ref_cnt == 0
        request.blocks = []
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        scheduler.queued.append(request)
        if self.hooks.request_key:
            self.hooks.request_key(request, self.now)
        self.preempted.append(request)
        return True

    def rekey(self, request: FakeRequest) -> None:
        """Note it."""
        self.rekeyed.append(request.request_id)

    def gauge(self, name: str, value: Callable[[], float]) -> None:
        """Keep it."""
        self.gauges[name] = value


def scheduled(tokens: dict[str, int], new: Sequence[str] = (), resumed: Sequence[str] = ()) -> Any:
    """A SchedulerOutput's relevant fields."""
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_new_reqs=[SimpleNamespace(req_id=request_id) for request_id in new],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
    )
