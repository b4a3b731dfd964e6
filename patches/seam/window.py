"""The first few requests of a queue's heap, kept at hand between picks: what a choice is made among."""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from typing import Any

Key = tuple[Any, ...]
#: (key, stamp, entry) of the queue's heaps; live while the entry carries that stamp.
Item = tuple[Key, int, Any]

#: At most so many requests are offered to the one who chooses.
OFFERED = 64

#: (requests in order, now) -> index of the one that goes first.
Prefer = Callable[[Sequence[Any], float], int]
#: What of a key is its level; rises with the key.
LevelOf = Callable[[Key], Any]


class Choice:
    """Who chooses, and what bounds the choice: one level of the order, and the first `OFFERED` of it.

    Args:
        prefer: chooses. level_of: of a key. useful: whether a pick can come of it now; if not, nobody is asked.
    """

    __slots__ = ("_level_of", "_prefer", "useful")

    def __init__(self, prefer: Prefer, level_of: LevelOf, useful: Callable[[], bool] = lambda: True) -> None:
        self._prefer = prefer
        self._level_of = level_of
        self.useful = useful

    def of(self, items: Sequence[Item], now: float) -> Any:
        """The entry that goes first of these, which must not be empty."""
        level = self._level_of(items[0][0])
        count = min(len(items), OFFERED)
        if self._level_of(items[count - 1][0]) != level:
            count = bisect_right(items, level, hi=count, key=lambda item: self._level_of(item[0]))
        return items[self._prefer([item[2].request for item in items[:count]], now)][2]


class Window:
    """The first live items of one heap, in order.

    They stay in the heap as well. After a look at them, a pick, a removal or a new key costs O(1) here (plus a
    binary insertion where a new item belongs among them); the heap is asked again when fewer than `least` are left.
    Tell it of each item that is pushed.

    Args:
        least: items that are always there, if the heap has as many. most: as many are taken from the heap at a time.
    """

    __slots__ = ("_items", "_most", "_whole", "least")

    def __init__(self, least: int = OFFERED // 2, most: int = OFFERED) -> None:
        self.least, self._most = least, most
        # Every live item of the heap that is not above the last of these is among them; if whole, every one is.
        self._items: list[Item] = []
        self._whole = True

    def pushed(self, item: Item) -> None:
        """An item has come into the heap."""
        items = self._items
        if self._whole or (items and item < items[-1]):
            insort(items, item)
            if len(items) > 2 * self._most:
                del items[self._most :]
                self._whole = False

    def first(self, heap: list[Item]) -> list[Item]:
        """The first live items of the heap, in order: `least` of them and more, or all."""
        items = [item for item in self._items if item[2].stamp == item[1]]
        if not self._whole and len(items) < self.least:
            items = self.gather(heap)
        self._items = items
        return items

    def gather(self, heap: list[Item]) -> list[Item]:
        """The first `most` live items of the heap, or all; taken note of."""
        items: list[Item] = []
        while heap and len(items) < self._most:
            item = heapq.heappop(heap)
            if item[2].stamp == item[1]:
                items.append(item)
        self._whole = not heap
        for item in items:
            heapq.heappush(heap, item)
        self._items = items
        return items
