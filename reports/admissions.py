"""Tables of what became of offered requests (admitted, refused and why, expired) and of who was preempted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from reports.view import Arm, RunView

REASONS_SHOWN = 6
OTHERS = "other reasons"
UNNAMED = "no reason given"


@dataclass(frozen=True, slots=True)
class Decisions:
    """Requests of one tier that one arm was offered, all seeds.

    Attributes:
        rejected: refused, by reason in the order of the table's.
        expired: admitted, and ended because their deadline had passed.
    """

    arm: str
    tier: str
    offered: int
    rejected: tuple[int, ...]
    expired: int
    struck: bool

    @property
    def accepted(self) -> int:
        """Not refused, whatever became of them."""
        return self.offered - sum(self.rejected)

    @property
    def counts(self) -> tuple[int, ...]:
        """Accepted, rejected by reason, expired: the table's columns."""
        return self.accepted, *self.rejected, self.expired


@dataclass(frozen=True, slots=True)
class Admissions:
    """Every arm by tier."""

    reasons: tuple[str, ...]
    rows: tuple[Decisions, ...]


@dataclass(frozen=True, slots=True)
class Victims:
    """Preemptions by tenant (rows) and arm, all seeds; `struck` says whose numbers may not be believed."""

    arms: tuple[str, ...]
    struck: tuple[bool, ...]
    rows: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def totals(self) -> tuple[int, ...]:
        """Of each arm."""
        return tuple(sum(counts) for counts in zip(*(c for _, c in self.rows), strict=True))


def admissions(view: RunView, arms: Sequence[Arm] | None = None) -> Admissions | None:
    """What became of the measured requests; None where no arm refused one or let one expire."""
    found = {arm.name: _requests(view, arm) for arm in (view.arms if arms is None else arms)}
    tables = {arm: table for arm, table in found.items() if table is not None}
    refused = Counter(
        reason for table in tables.values() for reason in table["refused"] if reason is not None
    )
    if not refused and not any((table["status"] == "expired").any() for table in tables.values()):
        return None
    order = sorted(refused, key=lambda reason: (-refused[reason], reason))
    shown = tuple(order[:REASONS_SHOWN])
    reasons = (*shown, OTHERS) if len(order) > REASONS_SHOWN else shown
    tiers = list(dict.fromkeys(str(tenant.get("tier", "")) for tenant in view.tenants))
    rows = []
    for arm, table in tables.items():
        one = view.arm(arm)
        for tier in tiers:
            part = table[table["tier"] == tier]
            counts = Counter(part["refused"].dropna())
            by_reason = [counts.pop(reason, 0) for reason in shown]
            if len(reasons) > len(shown):
                by_reason.append(sum(counts.values()))
            expired = int((part["status"] == "expired").sum())
            struck = one is not None and not one.valid
            rows.append(Decisions(arm, tier, len(part), tuple(by_reason), expired, struck))
    return Admissions(reasons, tuple(rows))


def _requests(view: RunView, arm: Arm) -> pd.DataFrame | None:
    """Measured requests, with why each was refused; None where it was not."""
    columns = ("tier", "measured", "status", "reason")
    tables = [t for seed in arm.seeds if (t := view.table(arm.name, seed, "requests", columns)) is not None]
    if not tables:
        return None
    whole = pd.concat([table[table["measured"]] for table in tables], ignore_index=True)
    refused = zip(whole["status"], whole["reason"], strict=True)
    why = [(reason or UNNAMED) if status == "rejected" else None for status, reason in refused]
    return whole.assign(refused=pd.Series(why, dtype=object))


def victims(view: RunView, arms: Sequence[Arm] | None = None) -> Victims | None:
    """Whose measured requests were preempted how often; None where no arm preempted any."""
    counted = [(arm, _preempted(view, arm)) for arm in (view.arms if arms is None else arms)]
    known = [(arm, counts) for arm, counts in counted if counts is not None]
    if not any(counts for _, counts in known):
        return None
    names = [str(tenant["name"]) for tenant in view.tenants]
    return Victims(
        tuple(arm.name for arm, _ in known),
        tuple(not arm.valid for arm, _ in known),
        tuple((name, tuple(counts[name] for _, counts in known)) for name in names),
    )


def _preempted(view: RunView, arm: Arm) -> Counter[str] | None:
    counts: Counter[str] = Counter()
    any_table = False
    for seed in arm.seeds:
        requests = view.table(arm.name, seed, "requests", ("tenant", "measured"))
        events = view.table(arm.name, seed, "events", ("kind", "request"))
        if requests is None or events is None:
            continue
        any_table = True
        lost = events[(events["kind"] == "preempt") & events["request"].notna()]
        hit = requests.iloc[lost["request"].to_numpy("int64")]
        counts.update(map(str, hit.loc[hit["measured"], "tenant"]))
    return counts if any_table else None
