"""How much each block of the cache is needed by requests that are known but not served yet."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from patches.seam.worth import Worths

# Points at which the worth stands half-way between its least and its most.
_HALF_POINTS = 64


class Needs(Worths):
    """Points by block hash (without a group's id: it is the same for all groups), summed over all that need it.

    As an `eviction_hint` a needed block is worth more than +2 and less than +4, rising with its points. A chain's block
    is needed by all who need one behind it, so it is worth no less.
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_whom: dict[Hashable, tuple[tuple[bytes, ...], int]] = {}

    def __call__(self, block: Any) -> float:
        name = block.block_hash
        points = self.get(name[:-4], 0) if name is not None else 0
        return 2.0 + 2.0 * points / (points + _HALF_POINTS) if points else 0.0

    def add(self, who: Hashable, chain: tuple[bytes, ...], points: int) -> None:
        """Someone needs these blocks (a prefix, head first); replaces what it needed before."""
        if who in self._by_whom:
            self.remove(who)
        self._by_whom[who] = (chain, points)
        get = self.get
        for name in chain:
            self[name] = get(name, 0) + points

    def change(self, who: Hashable, points: int) -> None:
        """It needs the same blocks more, or less, than before."""
        chain, before = self._by_whom[who]
        self._by_whom[who] = (chain, points)
        for name in chain:
            self[name] += points - before

    def remove(self, who: Hashable) -> tuple[bytes, ...]:
        """It needs them no longer; its chain, head first, as far as it was known."""
        nothing: tuple[tuple[bytes, ...], int] = ((), 0)
        chain, points = self._by_whom.pop(who, nothing)
        for name in chain:
            left = self[name] - points
            if left:
                self[name] = left
            else:
                del self[name]
        return chain
