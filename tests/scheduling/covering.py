"""Few subsets in which any two things meet: both on, either one, neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, count
from math import comb


def covering_subsets(
    names: Sequence[str], clash: Callable[[str, str], bool] = lambda a, b: False
) -> list[tuple[str, ...]]:
    """Subsets such that for every two names each of the four on/off combinations occurs in one of them.

    The first has all names. After it each name is on in a set of rows of its own, all of one size below half of the
    rows: two such sets differ, so either occurs alone, and do not fill all rows together, so neither occurs. No design
    has fewer subsets; their number grows with the logarithm of that of the names.

    Names that clash never stand in one subset: one with several of them becomes several, each with as much as fits.

    Source: Kleitman, Spencer: Families of k-independent sets (1973); Katona (1973).
    """
    rows = next(n for n in count(2) if comb(n, (n - 1) // 2) >= len(names))
    on_in = dict(zip(names, combinations(range(rows), (rows - 1) // 2), strict=False))
    subsets = [tuple(names), *(tuple(n for n in names if row in on_in[n]) for row in range(rows))]
    return [part for subset in subsets for part in _without_clashes(subset, clash) if part]


def _without_clashes(subset: tuple[str, ...], clash: Callable[[str, str], bool]) -> list[tuple[str, ...]]:
    for one, other in combinations(subset, 2):
        if clash(one, other):
            parts = [tuple(name for name in subset if name != left_out) for left_out in (other, one)]
            return [split for part in parts for split in _without_clashes(part, clash)]
    return [subset]
