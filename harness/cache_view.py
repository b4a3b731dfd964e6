"""What `cachedash` told, as its readers want it: from `cache.parquet`, or from a server's answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

#: What a look-up of a block can come to, from good to bad, and what that means.
OUTCOMES: Mapping[str, str] = {
    "device": "found in the device's memory",
    "below": "found in a tier below it",
    "evicted": "missed: another request got its place",
    "cut": "missed: a block before it was evicted",
    "unlanded": "missed: asked for before and not computed yet",
    "other_salt": "missed: known under another cache salt only",
    "never": "missed: never asked for before, as far as is remembered",
}
_PREFIX = {"prefix_requests": "requests", "prefix_asked_blocks": "asked", "prefix_found_blocks": "found"}


@dataclass(slots=True)
class Prefix:
    """Requests whose prompts begin with one block, told by the start of its hash; counts of blocks."""

    name: str
    tenant: str
    requests: int = 0
    asked: int = 0
    found: int = 0


@dataclass(frozen=True, slots=True)
class CacheView:
    """Counts by (measure, tenant, kind, by), as in `harness.schema.CACHE`, and the most asked prefixes first."""

    sums: Mapping[tuple[str, str, str, str], int]
    prefixes: tuple[Prefix, ...] = field(default=())

    def total(
        self, measure: str, *, tenant: str | None = None, kind: str | None = None, by: str | None = None
    ) -> int:
        """Everything that was counted of a measure; of one tenant, kind or culprit where it is named."""
        return sum(
            value
            for (what, whose, which, whom), value in self.sums.items()
            if what == measure and tenant in (None, whose) and kind in (None, which) and by in (None, whom)
        )

    @property
    def tenants(self) -> tuple[str, ...]:
        """Who asked for anything, by name."""
        return tuple(sorted({tenant for measure, tenant, _, _ in self.sums if measure == "requests"}))

    def outcomes(self, tenant: str | None = None) -> dict[str, int]:
        """Blocks asked for by what came of it, in the order of `OUTCOMES`."""
        return {
            name: self.total(
                "found_blocks" if name in ("device", "below") else "missed_blocks", tenant=tenant, kind=name
            )
            for name in OUTCOMES
        }

    def culprits(self, tenant: str | None = None) -> dict[str, int]:
        """Blocks that were missed because they (or one before them) had been evicted, by whose request did it."""
        found: dict[str, int] = {}
        for (measure, whose, _, by), value in self.sums.items():
            if measure == "missed_blocks" and by and tenant in (None, whose):
                found[by] = found.get(by, 0) + value
        return dict(sorted(found.items(), key=lambda one: (-one[1], one[0])))

    def reuse(self, tenant: str | None = None) -> dict[int, int]:
        """Blocks asked for again by the upper end of their reuse distance, in blocks, ascending."""
        found: dict[int, int] = {}
        for (measure, whose, kind, _), value in self.sums.items():
            if measure == "reuse_blocks" and tenant in (None, whose):
                found[int(kind)] = found.get(int(kind), 0) + value
        return dict(sorted(found.items()))

    @classmethod
    def of_frames(cls, frames: Iterable[pd.DataFrame]) -> CacheView:
        """The sums over whole `cache` tables."""
        sums: dict[tuple[str, str, str, str], int] = {}
        prefixes: dict[str, Prefix] = {}
        for frame in frames:
            columns = (frame[name].to_list() for name in ("measure", "tenant", "kind", "by", "value"))
            for measure, tenant, kind, by, value in zip(*columns, strict=True):
                if measure in _PREFIX:
                    one = prefixes.setdefault(kind, Prefix(kind, tenant))
                    setattr(one, _PREFIX[measure], getattr(one, _PREFIX[measure]) + int(value))
                else:
                    key = (measure, tenant, kind, by)
                    sums[key] = sums.get(key, 0) + int(value)
        most = sorted(prefixes.values(), key=lambda one: (-one.asked, one.name))
        return cls(sums, tuple(most))

    @classmethod
    def of_answer(cls, answer: Mapping[str, Any]) -> CacheView:
        """From `/patchbench/cache`. Raises KeyError, TypeError or ValueError where it is no such answer."""
        sums = {
            (str(measure), str(tenant), str(kind), str(by)): int(value)
            for measure, tenant, kind, by, value in answer["sums"]
        }
        prefixes = (
            Prefix(str(name), str(tenant), int(requests), int(asked), int(found))
            for name, tenant, requests, asked, found in answer["prefixes"]
        )
        return cls(sums, tuple(prefixes))

    def since(self, before: CacheView) -> CacheView:
        """What was counted between two answers of one server; the whole where it began anew in between."""
        gone = any(value > self.sums.get(key, 0) for key, value in before.sums.items())
        if gone:
            return self
        return CacheView({key: value - before.sums.get(key, 0) for key, value in self.sums.items()})
