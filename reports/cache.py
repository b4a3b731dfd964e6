"""The report's tables of the prefix cache: hit rates beside their bounds, misses by cause, waste, the most asked prefixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.cache_view import OUTCOMES, CacheView, Prefix
from harness.schema import CACHE
from reports.view import Arm, RunView

PREFIXES_SHOWN = 12
RATES = ("hit_rate", "clairvoyant", "whole_pool", "infinite")
_COLUMNS = tuple(column.name for column in CACHE)
# A hit rate may pass a bound by this before that is worth a word: tokens of a last block, and rounding.
_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Bounded:
    """One arm's hit rate and its bounds, everywhere and by phase; `struck` where they may not be believed.

    Attributes:
        rates: by place (`all`, then the phases' numbers), the four of `RATES` in order.
        estimate: why the bounds are estimates; empty where they are bounds.
    """

    arm: str
    struck: bool
    blocks: int
    block_tokens: int
    rates: Mapping[str, tuple[float, ...]]
    estimate: tuple[str, ...]

    def reached(self, place: str = "all") -> float | None:
        """Which share of the clairvoyant bound was reached; None where that is 0."""
        hit_rate, bound = self.rates[place][:2]
        return hit_rate / bound if bound > 0 else None

    @property
    def passed(self) -> bool:
        """The hit rate is above the clairvoyant bound, which only an estimate allows."""
        hit_rate, bound = self.rates["all"][:2]
        return hit_rate > bound + _SLACK


def bounds(view: RunView) -> tuple[Bounded, ...]:
    """Every arm whose records tell its bounds, in the report's order."""
    out = []
    for arm in view.arms:
        told = arm.raw.get("cache_bounds")
        if not told:
            continue
        places = {"all": told["all"], **told["by_phase"]}
        out.append(
            Bounded(
                arm.name,
                not arm.valid,
                int(told["blocks"]),
                int(told["block_tokens"]),
                {str(place): tuple(float(rates[name]) for name in RATES) for place, rates in places.items()},
                tuple(map(str, told["estimate"])),
            )
        )
    return tuple(out)


@dataclass(frozen=True, slots=True)
class Watched:
    """What `cachedash` saw of one arm, all seeds.

    Attributes:
        rows: for each tenant and for all (`""`), blocks asked for by outcome, in the order of `OUTCOMES`.
        culprits: by tenant, whose requests had evicted what it missed, and how many blocks, the most first.
        waste: tokens computed again after an eviction, and after a preemption; blocks kept long and never found again.
    """

    arm: str
    struck: bool
    view: CacheView
    rows: tuple[tuple[str, tuple[int, ...]], ...]
    culprits: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
    waste: Mapping[str, int]
    prefixes: tuple[Prefix, ...]


def watched(view: RunView, arms: Sequence[Arm] | None = None) -> tuple[Watched, ...]:
    """The arms with `cachedash` in them."""
    out = []
    for arm in view.arms if arms is None else arms:
        tables = [view.table(arm.name, seed, "cache", _COLUMNS) for seed in arm.seeds]
        found = [table for table in tables if table is not None]
        if not found:
            continue
        seen = CacheView.of_frames(found)
        names = ("", *seen.tenants)
        out.append(
            Watched(
                arm.name,
                not arm.valid,
                seen,
                tuple((name, tuple(seen.outcomes(name or None).values())) for name in names),
                tuple((name, tuple(seen.culprits(name).items())) for name in seen.tenants),
                {
                    "eviction": seen.total("recomputed_tokens", kind="eviction"),
                    "preemption": seen.total("recomputed_tokens", kind="preemption"),
                    "dead": seen.total("dead_protected_blocks"),
                    "evicted": seen.total("evicted_blocks"),
                    "unused": seen.total("evicted_blocks", kind="unused"),
                },
                seen.prefixes[:PREFIXES_SHOWN],
            )
        )
    return tuple(out)


def context(view: RunView) -> dict[str, Any]:
    """What the template needs."""
    return {"cache_bounds": bounds(view), "cache_watched": watched(view), "cache_outcomes": OUTCOMES}
