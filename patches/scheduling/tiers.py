"""Low levels are refused first: a level that would be late closes those below it before it is refused itself."""

from __future__ import annotations


class Tiers:
    """Who may be refused, by level (smaller is more important). What was seen counts for `hold_s`."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._strained_s: dict[int, float] = {}
        self._admitted_s: dict[int, float] = {}

    def refuse(self, level: int, late: bool, worse_owed: bool, now: float) -> bool:
        """Whether an arrival of this level is to be refused.

        There is a reason to if it would be `late`, or a better level would have been within the hold. It is
        acted on only once no worse level was let in within the hold and none has prompts left to compute
        (`worse_owed`): refusing those, and seeing them through, is what helps first.
        """
        since = now - self._hold_s
        if late:
            self._strained_s[level] = now
        elif not any(at > since for other, at in self._strained_s.items() if other < level):
            return False
        return not worse_owed and not any(at > since for o, at in self._admitted_s.items() if o > level)

    def admitted(self, level: int, now: float) -> None:
        """One of this level was let in, and not by its floor."""
        self._admitted_s[level] = now
