"""Eviction policies for the replay, as free queues of vLLM's block pool."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

from patches.kv.segments import SegmentedFreeQueue
from patches.kv.slru import SlruKnobs, make_queue

#: From a pool's blocks to the object that keeps the free ones.
QueueFactory = Callable[[list[Any]], Any]


class FixedShareQueue(SegmentedFreeQueue):
    """Textbook segmented LRU: the protected segment holds at most 80% of the pool, whatever the traffic.

    What it pushes out goes back to probation as its newest block; probation is always evicted first. No ghosts.
    Here to show why the share should not be fixed.
    """

    def __init__(self, blocks: list[Any]) -> None:
        super().__init__(
            blocks,
            ghost_slots=1,
            marginal_blocks=1,
            doubling_blocks=1.0,
            start_factor=math.inf,
            max_factor=math.inf,
        )
        self._limit = len(blocks) * 4 // 5
        self._size = 0  # free blocks in the protected segment

    def popleft_n(self, n: int) -> list[Any]:
        before = self.evicted_protected
        taken = super().popleft_n(n)
        self._size -= self.evicted_protected - before
        return taken

    def remove(self, block: Any) -> None:
        self._size -= self._segment[block.block_id]
        super().remove(block)

    def append_n(self, blocks: list[Any]) -> None:
        super().append_n(blocks)
        self._size += sum(self._segment[block.block_id] for block in blocks)
        while self._size > self._limit:
            self._size -= 1
            block = self._protected.next_free_block
            super().remove(block)
            self._segment[block.block_id] = 0
            super().append_n([block])

    def _returned(self, block_hash: bytes) -> int:
        return 0


def _lru(blocks: list[Any]) -> Any:
    return importlib.import_module("vllm.v1.core.kv_cache_utils").FreeKVCacheBlockQueue(blocks)


def _slru(blocks: list[Any]) -> Any:
    return make_queue(blocks, SlruKnobs())


QUEUES: dict[str, QueueFactory] = {"lru": _lru, "slru": _slru, "slru-80-20": FixedShareQueue}
"""Policies that run in the real pool: `lru` is vLLM's own queue, `slru` the patch at its default knobs."""

BOUNDS = ("belady", "infinite")
"""What is computed from the trace alone."""

POLICIES = (*QUEUES, *BOUNDS)
