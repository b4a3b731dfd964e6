"""What the virtual engine assumes of a GPU beyond its profile, and by how much each of it may be off.

A verdict that holds under the profile alone may rest on an error of the profile. `VARIATIONS` are the ranges
in which a verdict has to hold: how fast the GPU is, what a prefill beside decodes costs on top, what the CPU
costs before each step, and how many KV blocks there are. Both ends of each range are tried, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from harness.errors import UserError

if TYPE_CHECKING:
    from harness.profiles import Profile

# Within a run's folder: one run folder for each assumption, and what could not be assumed.
FOLDER = "sensitivity"
LEFT_OUT = "left_out.json"


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What a run assumes; as it stands in the plan, so that nothing is computed from it afterwards.

    Attributes:
        name: `base`, or the variation that this is.
        efficiency: how fast the GPU is in units of the profile's; step times are divided by it.
        mixed_penalty: attention of a step in which prefills and decodes meet, as a multiple of what both take
            alone; None is what the profile says.
        cpu_step_us: CPU time before each step, us; None is the profile's.
        kv_blocks: blocks in the KV cache; None is the profile's.
    """

    name: str = "base"
    efficiency: float = 1.0
    mixed_penalty: float | None = None
    cpu_step_us: float | None = None
    kv_blocks: int | None = None

    def to_json(self) -> dict[str, Any]:
        """As it stands in plan.json and in a manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Assumptions:
        """The inverse of `to_json`; what it does not know is left out."""
        return cls(**{field.name: raw[field.name] for field in fields(cls) if field.name in raw})


BASE = Assumptions()


@dataclass(frozen=True, slots=True)
class Variation:
    """One end of one range.

    Attributes:
        name: what `--assume` and the folder are called.
        label: as the head of a table's column.
        clause: ends a sentence that begins with "when".
    """

    name: str
    label: str
    clause: str
    efficiency: float = 1.0
    mixed_penalty: float | None = None
    cpu_step_us: float | None = None
    kv_blocks_factor: float = 1.0

    def differs(self, profile: Profile) -> bool:
        """False where the profile assumes just this already."""
        if self.mixed_penalty == 1.0:
            return profile.tables.mixed is not None
        return self.cpu_step_us is None or self.cpu_step_us != profile.cpu_step_us

    def of(self, profile: Profile) -> Assumptions:
        """The assumptions of a run on this profile."""
        blocks = round(profile.kv_blocks * self.kv_blocks_factor) if self.kv_blocks_factor != 1.0 else None
        return Assumptions(self.name, self.efficiency, self.mixed_penalty, self.cpu_step_us, blocks)


# Measured tables lie between the ends of the mixed penalty on average: attention of mixed steps is about a sixth
# (RTX PRO 6000) and a third (RTX 4090) above the sum of its parts (tests/profiles/test_compose.py).
VARIATIONS: tuple[Variation, ...] = (
    Variation("efficiency-15", "efficiency −15%", "the GPU is 15% less efficient", efficiency=0.85),
    Variation("efficiency+15", "efficiency +15%", "the GPU is 15% more efficient", efficiency=1.15),
    Variation("mixed-1x", "mixed ×1", "mixed steps take no longer than their parts", mixed_penalty=1.0),
    Variation("mixed-2x", "mixed ×2", "mixed steps take twice as long as their parts", mixed_penalty=2.0),
    Variation("cpu-0ms", "CPU 0 ms", "a step costs no CPU time", cpu_step_us=0.0),
    Variation("cpu-2ms", "CPU 2 ms", "a step costs 2 ms of CPU time", cpu_step_us=2000.0),
    Variation("kv-20", "KV blocks −20%", "KV blocks are 20% fewer", kv_blocks_factor=0.8),
    Variation("kv+20", "KV blocks +20%", "KV blocks are 20% more", kv_blocks_factor=1.2),
)


def variations(profile: Profile, names: Iterable[str] = ()) -> list[Variation]:
    """What is varied on this profile, in the order of `VARIATIONS`; all of it, or what is named.

    A trailing % in a name is allowed. Raises UserError for a name that is none of them.
    """
    listed = [one for one in VARIATIONS if one.differs(profile)]
    known = {one.name for one in listed}
    wanted = {name.removesuffix("%") for name in names}
    for name in sorted(wanted - known):
        raise UserError(f"--assume {name}: it is one of {', '.join(one.name for one in listed)}")
    return [one for one in listed if not wanted or one.name in wanted]


def variation(name: str) -> Variation | None:
    """The variation of that name, or None."""
    return next((one for one in VARIATIONS if one.name == name), None)


def unfit(profile: Profile, assumed: Assumptions, max_model_len: int) -> str:
    """Why vLLM would not start under these assumptions; empty if it would.

    It wants room in the KV cache for one request of `max_model_len` tokens.
    """
    if assumed.kv_blocks is None or assumed.kv_blocks * profile.block_size >= max_model_len:
        return ""
    return (
        f"{assumed.kv_blocks:,} KV blocks of {profile.block_size} do not hold one request of "
        f"{max_model_len:,} tokens, so vLLM would not start"
    )
