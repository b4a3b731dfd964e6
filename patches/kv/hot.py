"""Which prefixes do several requests share these days? Counts by block over two windows, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prefix that many requests begin with: its last block's hash, its tokens (whole blocks), and their salt."""

    last_hash: bytes
    tokens: tuple[int, ...]
    cache_salt: str | None


class HotPrefixes:
    """Counts how many requests went through each of the first blocks of their chains.

    A prefix is hot while at least `hot_requests` requests of this window and the one before went through its last
    block. Of each request the longest hot prefix is remembered. Integers only, so it is the same on any machine.

    Args:
        window_s: length of a window, seconds.
        hot_requests: requests in two windows that make a prefix hot.
        most_blocks: blocks of a chain that are looked at.
        most_nodes: blocks counted in one window; beyond that new ones are not counted.
        most_prefixes: prefixes remembered; the longest unseen go first.
    """

    def __init__(
        self,
        *,
        window_s: float,
        hot_requests: int,
        most_blocks: int,
        most_nodes: int = 16_384,
        most_prefixes: int = 64,
    ) -> None:
        self._window_s = window_s
        self._hot = hot_requests
        self._most_blocks, self._most_nodes, self._most_prefixes = most_blocks, most_nodes, most_prefixes
        self._now: dict[bytes, int] = {}
        self._before: dict[bytes, int] = {}
        self._ends_s = -1.0
        self._prefixes: OrderedDict[bytes, HotPrefix] = OrderedDict()

    def see(
        self, hashes: Sequence[bytes], tokens: Sequence[int], block_tokens: int, salt: str | None, now: float
    ) -> None:
        """A request came. `hashes` are those of its full blocks, `tokens` at least the tokens of these."""
        self._turn(now)
        current, before, deepest = self._now, self._before, 0
        for depth, name in enumerate(hashes[: self._most_blocks], start=1):
            count = current.get(name, 0) + 1
            if count > 1 or len(current) < self._most_nodes:
                current[name] = count
            if count + before.get(name, 0) < self._hot:
                # No descendant is on more paths than its ancestor.
                self._count_rest(hashes, depth)
                break
            deepest = depth
        if not deepest:
            return
        last = hashes[deepest - 1]
        if last in self._prefixes:
            self._prefixes.move_to_end(last)
            return
        self._prefixes[last] = HotPrefix(last, tuple(tokens[: deepest * block_tokens]), salt)
        if len(self._prefixes) > self._most_prefixes:
            self._prefixes.popitem(last=False)

    def hot(self, now: float) -> list[HotPrefix]:
        """The prefixes that are hot now, the one seen last first."""
        self._turn(now)
        return [
            prefix
            for name, prefix in reversed(self._prefixes.items())
            if self._now.get(name, 0) + self._before.get(name, 0) >= self._hot
        ]

    def _count_rest(self, hashes: Sequence[bytes], depth: int) -> None:
        current, rest = self._now, hashes[depth : self._most_blocks]
        if current.keys().isdisjoint(rest):
            # As nearly always: what one conversation adds is seen for the first time.
            current.update(dict.fromkeys(rest[: max(0, self._most_nodes - len(current))], 1))
            return
        for name in rest:
            if name in current:
                current[name] += 1
            elif len(current) < self._most_nodes:
                current[name] = 1

    def _turn(self, now: float) -> None:
        if now < self._ends_s:
            return
        # After a pause of more than a window nothing of before is recent.
        idle = now >= self._ends_s + self._window_s
        self._before, self._now = {} if idle else self._now, {}
        self._ends_s = now + self._window_s
