"""A request at the head of the line that finds no room in memory: who may pass it, and for how long."""

from __future__ import annotations

from typing import Any

from patches.scheduling.claims import Rank, class_of


class Roomless:
    """The first that found no room, and the classes that are there.

    Upstream's scan ends at the first that does not fit: all that stand behind it wait until enough blocks for it have
    come together, however few they need. So one is passed by better classes while it finds no room, up to a patience.
    """

    def __init__(self, patience_s: float, context: Any) -> None:
        self._patience_s, self._context = patience_s, context
        self._present: dict[Rank, int] = {}
        # Since when those that were first in a pass have found none.
        self._since_s: dict[str, float] = {}
        # The first that found none in this pass, its class, and whether it is waited for.
        self._head = ""
        self._head_rank: Rank | None = None
        self._waited_for = False

    def add(self, request: Any) -> None:
        """It came."""
        rank = class_of(self._context.request_info(request))
        self._present[rank] = self._present.get(rank, 0) + 1

    def preempted(self, request: Any) -> None:
        """It waits anew."""
        self._since_s.pop(request.request_id, None)

    def finish(self, request: Any) -> None:
        """It ended."""
        self._since_s.pop(request.request_id, None)
        rank = class_of(self._context.request_info(request))
        left = self._present.pop(rank, 1) - 1
        if left:
            self._present[rank] = left

    def holds(self, request: Any, now: float) -> str | None:
        """Why it must let others pass; None if it need not."""
        if not self._context.scheduler.running or not self._patience_s:
            return None
        rank, request_id = class_of(self._context.request_info(request)), request.request_id
        if self._waited_for and request_id == self._head:
            return None
        if self._head_rank is not None and rank >= self._head_rank:
            return "an earlier one finds no room"
        if rank == min(self._present) or self._fits(request):
            return None
        self._head, self._head_rank = request_id, rank
        self._waited_for = now - self._since_s.setdefault(request_id, now) >= self._patience_s
        return None if self._waited_for else "no room: better classes may pass"

    def _fits(self, request: Any) -> bool:
        scheduler = self._context.scheduler
        manager = scheduler.kv_cache_manager
        free = manager.block_pool.get_num_free_blocks() - manager.watermark_blocks
        return -(-int(request.num_tokens) // int(scheduler.block_size)) <= free

    def end_pass(self) -> None:
        """The pass is over."""
        self._head, self._head_rank, self._waited_for = "", None, False
