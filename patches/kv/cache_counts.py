"""Counts of what a cache did, by tenant, kind and culprit, in windows of time; bounded whatever the traffic does."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from patches.kv.block_history import NOBODY

Ints = npt.NDArray[np.int64]

#: One count: end of its window in seconds, measure, tenant, kind, by whom, value.
Row = tuple[float, str, str, str, str, int]

#: What is counted. The numbers are positions here.
MEASURES = (
    "requests",
    "asked_blocks",
    "found_blocks",
    "missed_blocks",
    "evicted_blocks",
    "dead_protected_blocks",
    "reuse_blocks",
    "recomputed_tokens",
    "preemptions",
)
(REQUESTS, ASKED, FOUND_BLOCKS, MISSED, EVICTED_BLOCKS, DEAD_PROTECTED, REUSE, RECOMPUTED, PREEMPTIONS) = (
    range(len(MEASURES))
)
_NO_KIND = 0xFF
_MOST_TENANTS = NOBODY - 1
OTHERS = "(others)"
# Some 17 bytes each.
_MOST_ROWS = 1 << 18


def codes(measure: int, tenant: Any, kind: Any = _NO_KIND, by: Any = NOBODY) -> Any:
    """Where something is counted, as numbers that sort; arguments may be arrays."""
    return measure << 24 | tenant << 16 | kind << 8 | by


class TenantNames:
    """Small numbers for tenants; those after the 254th share one."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self.names: list[str] = []

    def number(self, name: str) -> int:
        """The tenant's number."""
        found = self._numbers.get(name)
        if found is None:
            if len(self.names) == _MOST_TENANTS - 1:
                name = OTHERS
            if len(self.names) >= _MOST_TENANTS:
                return self._numbers[OTHERS]
            found = self._numbers[name] = len(self.names)
            self.names.append(name)
        return found

    def name(self, number: int) -> str:
        """The tenant of that number; "" for nobody."""
        return self.names[number] if number < len(self.names) else ""


class CacheCounts:
    """Totals, and the same by window; windows grow when they become too many.

    Args:
        tenants: names of tenants. kinds: by measure, names of its kinds, in the order of their numbers.
        window_s: length of a window at first.
    """

    def __init__(self, tenants: TenantNames, kinds: dict[int, tuple[str, ...]], window_s: float) -> None:
        self._tenants, self._kinds = tenants, kinds
        self.window_s = window_s
        self.totals: dict[int, int] = {}
        # The totals by measure, and by measure and kind, as of the last `sum_up`.
        self._sums: dict[tuple[int, int], int] = {}
        self._now: dict[int, int] = {}
        # Number of the present window.
        self._window = 0
        # Of the closed windows: number of the window, code, count.
        self._rows = array("i"), array("q"), array("q")

    def start(self, now_s: float) -> float:
        """The present window is the one around `now_s`; when it ends."""
        self._window = int(now_s // self.window_s)
        return (self._window + 1) * self.window_s

    def add(self, code: int, count: int) -> None:
        """Count something in the present window."""
        self._now[code] = self._now.get(code, 0) + count
        self.totals[code] = self.totals.get(code, 0) + count

    def add_all(self, all_codes: Ints, times: int = 1) -> None:
        """Count each of the codes `times` times."""
        found, counts = np.unique(all_codes, return_counts=True)
        for code, count in zip(found.tolist(), counts.tolist(), strict=True):
            self.add(code, count * times)

    def close(self, now_s: float) -> float:
        """End the present window and begin the one around `now_s`; when that one ends."""
        windows, which, values = self._rows
        for code, count in sorted(self._now.items()):
            windows.append(self._window)
            which.append(code)
            values.append(count)
        self._now.clear()
        if len(windows) > _MOST_ROWS:
            self._halve()
        return self.start(now_s)

    def total(self, measure: int, kind: int = _NO_KIND) -> int:
        """Everything that was counted of one measure, or of one of its kinds, as of the last `sum_up`; O(1)."""
        return self._sums.get((measure, kind), 0)

    def sum_up(self) -> None:
        """Bring what `total` says up to date."""
        sums: dict[tuple[int, int], int] = {}
        for code, count in self.totals.items():
            measure = code >> 24
            for key in {(measure, _NO_KIND), (measure, code >> 8 & 0xFF)}:
                sums[key] = sums.get(key, 0) + count
        self._sums = sums

    def rows(self) -> Iterator[Row]:
        """Each window's counts; the present window's last."""
        for number, code, count in zip(*self._rows, strict=True):
            yield ((number + 1) * self.window_s, *self._named(code), count)
        for code, count in sorted(self._now.items()):
            yield ((self._window + 1) * self.window_s, *self._named(code), count)

    def sums(self) -> list[tuple[str, str, str, str, int]]:
        """The totals, by name."""
        return [(*self._named(code), count) for code, count in sorted(self.totals.items())]

    def _named(self, code: int) -> tuple[str, str, str, str]:
        measure, kind = code >> 24, code >> 8 & 0xFF
        kinds = self._kinds.get(measure, ())
        return (
            MEASURES[measure],
            self._tenants.name(code >> 16 & 0xFF),
            kinds[kind] if kind < len(kinds) else "",
            self._tenants.name(code & 0xFF),
        )

    def _halve(self) -> None:
        """Put each two neighbouring windows together."""
        self.window_s *= 2
        merged: dict[tuple[int, int], int] = {}
        for number, code, count in zip(*self._rows, strict=True):
            key = (number // 2, code)
            merged[key] = merged.get(key, 0) + count
        self._rows = array("i"), array("q"), array("q")
        windows, which, values = self._rows
        for (number, code), count in sorted(merged.items()):
            windows.append(number)
            which.append(code)
            values.append(count)
