"""Scopes: which requests and which time a figure is about."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from harness.errors import UserError

_PHASES = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class Scope:
    """A tenant or a tier (or everybody), in some phases (or all measured ones).

    Written `all`, `phase:3`, `phase:3-5`, `tier:gold`, `tenant:silver-0`, or two joined by `/`.
    """

    phases: tuple[int, ...] | None = None
    tier: str | None = None
    tenant: str | None = None

    @property
    def everybody(self) -> bool:
        """True if it is about time alone."""
        return self.tier is None and self.tenant is None

    def __str__(self) -> str:
        parts = []
        if self.tenant is not None:
            parts.append(f"tenant:{self.tenant}")
        if self.tier is not None:
            parts.append(f"tier:{self.tier}")
        if self.phases is not None:
            parts.append(f"phase:{phases_text(self.phases)}")
        return "/".join(parts) or "all"


def phases_text(phases: Sequence[int]) -> str:
    """`3` or `3-5`."""
    return str(phases[0]) if len(phases) == 1 else f"{phases[0]}-{phases[-1]}"


def parse_scope(text: str) -> Scope:
    """The scope that a text names; UserError where it names none."""
    if text == "all":
        return Scope()
    phases: tuple[int, ...] | None = None
    names: dict[str, str] = {}
    for part in text.split("/"):
        key, _, value = part.partition(":")
        found = _PHASES.fullmatch(value)
        if key == "phase" and found and phases is None:
            first, last = int(found[1]), int(found[2] or found[1])
            phases = tuple(range(first, last + 1))
        elif key in ("tier", "tenant") and value and not names:
            names[key] = value
        else:
            phases = ()
            break
    if phases == ():
        raise UserError(
            f"scope {text!r} is not one of all, phase:3, phase:3-5, tier:gold, tenant:silver-0, "
            "or two of them joined by '/' (tenant:silver-0/phase:3)"
        )
    return Scope(phases, names.get("tier"), names.get("tenant"))


def scopes_of(phases: Sequence[int], tiers: Sequence[str], tenants: Sequence[str]) -> list[Scope]:
    """All scopes that a report of these measured phases, tiers and tenants gives figures for."""
    times: list[tuple[int, ...] | None] = [None, *((number,) for number in phases)]
    if {3, 4, 5} <= set(phases):
        times.append((3, 4, 5))
    who = [Scope(), *(Scope(tier=name) for name in tiers), *(Scope(tenant=name) for name in tenants)]
    return [Scope(time, one.tier, one.tenant) for one in who for time in times]
