"""How many KV blocks the running requests will come to need together, from what earlier answers took."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from patches.scheduling.prefills import Drain

# Weight of one finished answer in the mean length of its class, once there are several.
_LEARN = 0.05


class OutputLengths:
    """Mean length of the answers of each class, tokens; `first_tokens` as long as none has ended."""

    def __init__(self, first_tokens: int) -> None:
        self._first = float(first_tokens)
        self._mean: dict[str, float] = {}
        self._count: dict[str, int] = {}

    def finished(self, name: str, tokens: int) -> None:
        """An answer of this length came to its own end."""
        count = self._count[name] = self._count.get(name, 0) + 1
        mean = self._mean.get(name, 0.0)
        self._mean[name] = mean + (tokens - mean) * max(_LEARN, 1 / count)

    def longest(self) -> float:
        """No answer of any class is expected to have more left than this."""
        return max([self._first, *self._mean.values()])

    def left(self, name: str, generated: int) -> float:
        """Tokens that an answer with `generated` is expected to have before it; never below a quarter of the mean.

        Lengths are skewed: one that is past the mean already is a long one and goes on for a while.
        """
        mean = self._mean.get(name, self._first)
        return max(mean - generated, mean / 4)


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request holds and will need.

    Attributes:
        held: blocks that would be free if it ended now.
        prompt: blocks that its prompt still needs.
        left: tokens that it is expected to generate yet.
    """

    held: float
    prompt: float
    left: float


def peak_blocks(demands: Iterable[Demand], block_tokens: int) -> float:
    """The most blocks that these requests hold at one time if nobody else comes.

    All grow by a token a step; each gives back what it holds when it ends. The peak is at the end of
    one of them, so it is enough to look there: sorted by what is left, those that outlast it hold what
    they hold and have grown by its tokens. O(n log n).
    """
    held = peak = 0.0
    for alive, demand in enumerate(sorted(demands, key=lambda demand: -demand.left), start=1):
        held += demand.held + demand.prompt
        peak = max(peak, held + alive * demand.left / block_tokens)
    return peak


class BlockFlow:
    """How fast those who end give back their KV blocks, and how long a newcomer so waits for its own."""

    def __init__(self, context: Any, horizon_s: float) -> None:
        self._context = context
        self._given_back = Drain(horizon_s)
        self._blocks = 0
        self._last_s: float | None = None

    def on_finish(self, request: Any) -> None:
        """It ends, before its blocks are freed."""
        self._blocks += -(-request.num_computed_tokens // self._context.scheduler.block_size)

    def after_schedule(self, now: float) -> None:
        """Time passed; O(1)."""
        if self._last_s is not None:
            self._given_back.add(self._blocks, now - self._last_s)
            self._blocks = 0
        self._last_s = now

    def wait_s(self, request: Any) -> float:
        """Seconds until there are blocks for a request that comes now, behind all that wait; infinite if none come."""
        scheduler = self._context.scheduler
        tokens = self._context.waiting_tokens() + request.num_tokens
        lacks = (
            -(-tokens // scheduler.block_size) - scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        )
        if lacks <= 0:
            return 0.0
        return lacks / self._given_back.per_s if self._given_back.per_s else math.inf
