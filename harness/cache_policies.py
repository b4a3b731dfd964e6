"""Eviction policies for the replay, as free queues of vLLM's block pool."""

from __future__ import annotations

import importlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from patches.kv.needs import Needs
from patches.kv.segments import SegmentedFreeQueue
from patches.kv.slru import SlruKnobs, make_queue
from patches.kv.zones import ZonedFreeQueue
from patches.seam.receipt import PatchTally
from patches.seam.worth import Worth

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


class Ahead:
    """A factory of queues that spare what the next requests need, as `shield` does for those that wait.

    Args:
        make: a queue from blocks and what they are worth.
        requests: how many requests ahead are known.
    """

    def __init__(self, make: Callable[[list[Any], Worth], Any], requests: int = 64) -> None:
        self._make = make
        self._needs = Needs()
        self._known = requests

    def __call__(self, blocks: list[Any]) -> Any:
        self._needs = Needs()
        return self._make(blocks, Worth([("ahead", self._needs, PatchTally())]))

    def look(
        self, requests: Iterable[tuple[int, ...]], names: Callable[[tuple[int, ...]], list[bytes]]
    ) -> Iterator[tuple[int, ...]]:
        """The requests, each once the needs of those behind it are known."""
        line: deque[tuple[int, tuple[int, ...]]] = deque()
        for number, request in enumerate(requests):
            self._needs.add(number, tuple(names(request)), 1)
            line.append((number, request))
            if len(line) > self._known:
                yield self._next(line)
        while line:
            yield self._next(line)

    def _next(self, line: deque[tuple[int, tuple[int, ...]]]) -> tuple[int, ...]:
        number, request = line.popleft()
        self._needs.remove(number)
        return request


QUEUES: dict[str, QueueFactory] = {
    "lru": _lru,
    "slru": _slru,
    "slru-80-20": FixedShareQueue,
    "lru-next64": Ahead(ZonedFreeQueue),
    "slru-next64": Ahead(lambda blocks, worth: make_queue(blocks, SlruKnobs(), worth)),
}
"""Policies that run in the real pool: `lru` is vLLM's own queue, `slru` the patch at its default knobs.

With `-next64` the blocks that the next 64 requests need are spared, as `shield` does where a queue is that long.
"""

BOUNDS = ("belady", "infinite")
"""What is computed from the trace alone."""

POLICIES = (*QUEUES, *BOUNDS)
