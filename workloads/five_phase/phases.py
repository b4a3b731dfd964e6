"""The five phases: how often each tenant sends in each, and which of them are measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.errors import UserError
from workloads.request import Phase

PHASE_SECONDS = 60.0
NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class PhaseSpec:
    """One phase; `rates_rps` maps a tenant to its requests per second before any factor."""

    number: int
    name: str
    rates_rps: Mapping[str, float]


def _rates(gold_a: float, gold_b: float, silver: float, bronze: float) -> dict[str, float]:
    """Rates by tenant; `silver` and `bronze` are the rate of each tenant of the tier."""
    return {
        "gold-a": gold_a,
        "gold-b": gold_b,
        **{f"silver-{i}": silver for i in range(3)},
        **{f"bronze-{i}": bronze for i in range(2)},
    }


PHASES: tuple[PhaseSpec, ...] = (
    PhaseSpec(1, "steady", _rates(8, 10, 8, 3)),
    PhaseSpec(2, "prompt switch", _rates(8, 10, 8, 3)),
    PhaseSpec(3, "gold-a burst", _rates(32, 10, 8, 3)),
    PhaseSpec(4, "long documents", _rates(32, 10, 8, 10)),
    PhaseSpec(5, "overload", _rates(48, 15, 12, 15)),
)

# In this phase gold-a moves from prompt v1 to v2: a tenth of its conversations first, all from the middle on.
SWITCH_PHASE = 2


@dataclass(frozen=True, slots=True)
class RatePlan:
    """What a profile multiplies the table's rates by to reach the loads it wants: a factor a phase."""

    factors: tuple[float, ...] = (1.0,) * len(PHASES)

    def __post_init__(self) -> None:
        if len(self.factors) != len(PHASES) or not all(0 <= f < math.inf for f in self.factors):
            raise UserError(
                f"rate plan: {list(self.factors)} must be {len(PHASES)} factors, one a phase, each 0 or more"
            )

    def rate_rps(self, phase: PhaseSpec, tenant: str, rate_scale: float = 1.0) -> float:
        """Requests per second of a tenant in a phase."""
        return phase.rates_rps[tenant] * self.factors[phase.number - 1] * rate_scale


def parse_phases(text: str | int | Sequence[int]) -> tuple[int, ...]:
    """The numbers that `all`, `3`, `2,4` or a sequence of numbers select, in order, each once.

    Raises:
        UserError: for anything else. `list` selects nothing: commands show `phase_lines` for it.
    """
    if isinstance(text, str):
        word = text.strip()
        if word == "all":
            return tuple(phase.number for phase in PHASES)
        pieces: Sequence[object] = [piece.strip() for piece in word.split(",")]
    else:
        pieces = [text] if isinstance(text, int) else list(text)
    numbers = {str(phase.number): phase.number for phase in PHASES}
    unknown = [str(piece) for piece in pieces if str(piece) not in numbers]
    if unknown or not pieces:
        raise UserError(
            f"--phase: {unknown[0] if unknown else ''!r} is not a phase; use all, a number from 1 to {len(PHASES)}, "
            "several as in 2,4, or see bench workload --phase list"
        )
    return tuple(sorted({numbers[str(piece)] for piece in pieces}))


def phase_lines() -> list[str]:
    """The table of phases for a terminal: seconds, and requests per second before any factor."""
    shown = ("gold-a", "gold-b", "silver-0", "bronze-0")
    lines = [f"{'phase':<7}{'name':<16}{'seconds':>9}  {'gold-a':>7}{'gold-b':>8}{'silver':>8}{'bronze':>8}"]
    for i, phase in enumerate(PHASES):
        seconds = f"{i * PHASE_SECONDS:g}-{(i + 1) * PHASE_SECONDS:g}"
        rates = "".join(f"{phase.rates_rps[name]:>8g}" for name in shown)
        lines.append(f"{phase.number:<7}{phase.name:<16}{seconds:>9} {rates}")
    return [*lines, "Requests per second before any factor; silver and bronze: each tenant's."]


def timetable(selected: Sequence[int], time_scale: float = 1.0) -> tuple[Phase, ...]:
    """Every phase up to the last selected one; the others are replayed, but not measured.

    Backlog and cache carry over, so a phase means the same alone and among the others.
    """
    length_ns = round(PHASE_SECONDS * time_scale * NS_PER_S)
    return tuple(
        Phase(
            number=spec.number,
            name=spec.name,
            start_ns=i * length_ns,
            end_ns=(i + 1) * length_ns,
            measured=spec.number in selected,
        )
        for i, spec in enumerate(PHASES)
        if spec.number <= max(selected)
    )
