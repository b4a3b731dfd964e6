"""Multilinear reading of rectangular grids in plain Python: same bits on every machine.

Blending is linear along each axis. Below the first node a grid is flat; above the last one it goes on as
its last segment does, or stays flat, as the caller asks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


class Axis:
    """Nodes of one axis, with what a look-up needs precomputed."""

    __slots__ = ("first", "last", "nodes", "segments", "widths")

    def __init__(self, nodes: Sequence[int]) -> None:
        """Nodes ascending; one node alone makes a flat axis."""
        self.nodes = [float(x) for x in nodes]
        self.first, self.last = self.nodes[0], self.nodes[-1]
        self.segments = len(nodes) - 2
        self.widths = [b - a for a, b in pairwise(self.nodes)]

    def place(self, x: float) -> tuple[int, float]:
        """Segment of x, and how far along it (above 1 past the last node)."""
        if x <= self.first or self.segments < 0:
            return 0, 0.0
        i = bisect_right(self.nodes, x) - 1
        if i > self.segments:
            i = self.segments
        return i, (x - self.nodes[i]) / self.widths[i]


class Grid2:
    """A table over two axes."""

    __slots__ = ("a", "b", "rows")

    def __init__(self, a: Sequence[int], b: Sequence[int], us: Sequence[float]) -> None:
        """`us` is flat, b running fastest."""
        self.a, self.b = Axis(a), Axis(b)
        rows = [_closed(us[i * len(b) : (i + 1) * len(b)]) for i in range(len(a))]
        self.rows = rows if len(a) > 1 else [*rows, rows[0]]

    def at(self, x: float, y: float) -> float:
        """Blended value, us; past the last nodes it goes on linearly."""
        i, u = self.a.place(x)
        j, v = self.b.place(y)
        low, high = self.rows[i], self.rows[i + 1]
        p = low[j] + v * (low[j + 1] - low[j])
        return p + u * (high[j] + v * (high[j + 1] - high[j]) - p)


class Grid4:
    """A table over four axes: a 2-D table of 2-D tables."""

    __slots__ = ("a", "b", "c", "d", "planes")

    def __init__(
        self, a: Sequence[int], b: Sequence[int], c: Sequence[int], d: Sequence[int], us: Sequence[float]
    ) -> None:
        """`us` is flat, d running fastest."""
        self.a, self.b, self.c, self.d = Axis(a), Axis(b), Axis(c), Axis(d)
        size = len(c) * len(d)
        grids = [
            [Grid2(c, d, us[k * size : (k + 1) * size]).rows for k in range(i * len(b), (i + 1) * len(b))]
            for i in range(len(a))
        ]
        self.planes = _closed([_closed(row) for row in grids])

    def at(self, w: float, x: float, y: float, z: float) -> float:
        """Blended value, us; flat past the last nodes."""
        i, s = self.a.place(min(w, self.a.last))
        j, t = self.b.place(min(x, self.b.last))
        k, u = self.c.place(min(y, self.c.last))
        m, v = self.d.place(min(z, self.d.last))
        value = 0.0
        for planes, share in ((self.planes[i], 1.0 - s), (self.planes[i + 1], s)):
            if share:
                for rows, part in ((planes[j], share * (1.0 - t)), (planes[j + 1], share * t)):
                    if part:
                        low, high = rows[k], rows[k + 1]
                        p = low[m] + v * (low[m + 1] - low[m])
                        value += part * (p + u * (high[m] + v * (high[m + 1] - high[m]) - p))
        return value


def _closed(values: Sequence[T]) -> list[T]:
    """At least two entries, so that a segment always has both ends."""
    return list(values) if len(values) > 1 else [values[0], values[0]]
