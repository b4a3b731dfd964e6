"""What blocks are worth to patches beyond their place in the order of eviction: tables, and their sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from patches.seam.kinds import Bound, HookError


class Worths(dict[bytes, float]):
    """A patch's table of worths by block hash (with the group's id behind it), to be used as its `eviction_hint`.

    Better than a function of one's own: while the table is empty no block is asked about, and one that
    says nothing below 0 is not asked when blocks are freed.

    Args:
        demotes: whether it may hold values below 0.
    """

    def __init__(self, *, demotes: bool = False) -> None:
        super().__init__()
        self.demotes = demotes

    def __call__(self, block: Any) -> float:
        return self.get(block.block_hash, 0.0)


class Worth:
    """The sum over all patches, for the owner of eviction.

    Args:
        hooks: (patch, hook, tally) in order of rank; a hook that is no `Worths` may say anything at any time.
    """

    def __init__(self, hooks: Sequence[Bound]) -> None:
        self._hooks = tuple((*bound, bound[1] if isinstance(bound[1], Worths) else None) for bound in hooks)
        self._tables = tuple(table for *_, table in self._hooks if table is not None)
        self._demoting = tuple(table for table in self._tables if table.demotes)
        self._always = len(self._tables) < len(self._hooks)

    def any(self) -> bool:
        """Whether any block may have a worth other than 0 now."""
        return self._always or any(self._tables)

    def single(self) -> Worths | None:
        """The one table that alone has something to say now; None if there are several, or other hooks."""
        if self._always:
            return None
        speaking = [table for table in self._tables if table]
        return speaking[0] if len(speaking) == 1 else None

    def any_below(self) -> bool:
        """Whether any block may have a worth below 0 now."""
        return self._always or any(self._demoting)

    def __call__(self, block: Any) -> float:
        """What the block is worth, summed."""
        total = 0.0
        for name, hook, tally, table in self._hooks:
            if table is not None and not table:
                continue
            hint = hook(block)
            if hint:
                if hint != hint:
                    raise HookError(f"patch {name!r}, seam eviction_hint: returned NaN")
                tally.add("eviction_hint")
                total += hint
        return total
