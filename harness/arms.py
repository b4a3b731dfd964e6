"""The arms of a run: what is compared with what.

`stock` is vLLM as it resolves on the profile's GPU, `tuned` upstream's own best flags on it; every
run has both. A patched arm sits on a base's flags, less the native features that its patches replace.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.engines.flags import EngineFlags, parse_flags
from harness.errors import UserError
from harness.papers import arm_name_fault
from patches.seam import registry
from patches.seam.plan import PatchPlan, resolve

BASELINES = ("stock", "tuned")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,79}")
Knobs = Mapping[str, Mapping[str, Any]]


class FlagSets(Protocol):
    """What knows the flags of both baselines: a profile, or a live run's machine."""

    @property
    def name(self) -> str: ...
    @property
    def stock(self) -> Mapping[str, Any]: ...
    @property
    def tuned(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm, resolved: the flags that vLLM gets and the patches that are installed."""

    name: str
    base: str
    flags: EngineFlags
    plan: PatchPlan | None = None

    @property
    def patches(self) -> tuple[str, ...]:
        """Names of its patches, in canonical order."""
        return self.plan.names if self.plan is not None else ()

    def to_json(self) -> dict[str, Any]:
        """As it stands in plan.json."""
        return {
            "name": self.name,
            "base": self.base,
            "patches": list(self.patches),
            "knobs": self.plan.knobs if self.plan is not None else {},
            "engine_flags": self.flags.model_dump(),
            "patch_plan": self.plan.to_json() if self.plan is not None else None,
        }

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Arm:
        """The inverse of `to_json`."""
        patch_plan = raw.get("patch_plan")
        return Arm(
            name=raw["name"],
            base=raw["base"],
            flags=EngineFlags(**raw["engine_flags"]),
            plan=PatchPlan.from_json(patch_plan) if patch_plan else None,
        )


def baseline(profile: FlagSets, name: str) -> Arm:
    """`stock` or `tuned` on this profile."""
    flags: dict[str, Any] = dict(profile.stock)
    if name == "tuned":
        flags.update(profile.tuned)
    return Arm(name, name, parse_flags(flags, f"profile {profile.name}, arm {name}"))


def patched(
    profile: FlagSets,
    enable: Sequence[str],
    knobs: Knobs,
    *,
    base: str = "tuned",
    name: str | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Arm:
    """An arm with patches on a base's flags; `flags` of its own come last."""
    plan = resolve(enable, (), knobs) if enable else None
    under = baseline(profile, base).flags.model_dump()
    if plan is not None:
        for replaced in sorted(plan.replaces):
            under[replaced] = EngineFlags.model_fields[replaced].get_default()
            if replaced in profile.stock:
                under[replaced] = profile.stock[replaced]
    label = name or (plan.label if plan is not None else base)
    if base != "tuned" and name is None:
        label = f"{label}.on-{base}"
    under.update(flags or {})
    if plan is not None:
        under.update(_brought(plan, under, f"arm {label}"))
    return Arm(_checked_name(label), base, parse_flags(under, f"arm {label}"), plan)


def _brought(plan: PatchPlan, under: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The engine flags that the plan's patches bring along; UserError if the arm has set one of them itself."""
    flags = plan.engine_flags
    for flag, value in flags.items():
        own = under.get(flag)
        if own is not None and own != value:
            need = "needs it unset" if value is None else "brings its own"
            raise UserError(
                f"{where}: engine flag {flag!r} is set, but patch {plan.brought_by(flag)!r} {need}; "
                "leave out the flag, or the patch"
            )
    return flags


def with_ablations(
    profile: FlagSets, enable: Sequence[str], knobs: Knobs, base: str, *, each: bool, leave_one_out: bool
) -> list[Arm]:
    """The arm of all patches together, and, if asked, of each alone and of all but each."""
    arms = [patched(profile, enable, knobs, base=base)] if enable else []
    subsets: list[tuple[str, ...]] = []
    if each:
        subsets += [(one,) for one in enable]
    if leave_one_out and len(enable) > 1:
        subsets += [tuple(p for p in enable if p != one) for one in enable]
    for subset in subsets:
        # Knobs go by the patch's name, which for one from outside is not what it was enabled by.
        names = {registry.find(source).name for source in subset}
        kept = {name: values for name, values in knobs.items() if name in names}
        arm = patched(profile, subset, kept, base=base)
        if all(arm.name != other.name for other in arms):
            arms.append(arm)
    return arms


class _ArmTable(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    base: Literal["stock", "tuned"] = "tuned"
    patches: list[str] = Field(default_factory=list)
    knobs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    engine_flags: dict[str, Any] = Field(default_factory=dict)


class _ArmFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    arm: list[_ArmTable]


def from_toml(path: Path, profile: FlagSets) -> list[Arm]:
    """Arms of a TOML file: `[[arm]]` tables of name, base, patches, knobs and engine_flags."""
    raw = read_toml(path)
    try:
        tables = _ArmFile(**raw).arm
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {place}: {first['msg']}; see the README, 'Arms from a file'") from None
    return [
        patched(profile, t.patches, t.knobs, base=t.base, name=_checked_name(t.name), flags=t.engine_flags)
        for t in tables
    ]


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dict; UserError when it is missing or malformed."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: not readable as TOML: {error}") from None


def select(arms: Iterable[Arm], only: Sequence[str] | None) -> list[Arm]:
    """All arms, or those named; unknown names are an error, and so are two arms of one name."""
    listed = list(arms)
    names = [arm.name for arm in listed]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two arms are called {name!r}; give one of them another name")
    if not only:
        return listed
    for name in only:
        if name not in names:
            raise UserError(f"--only-arms: there is no arm {name!r}; this run has {', '.join(names)}")
    return [arm for arm in listed if arm.name in only]


def _checked_name(name: str) -> str:
    fault = arm_name_fault(name)
    if fault:
        raise UserError(fault)
    if not _NAME.fullmatch(name):
        raise UserError(
            f"arm name {name!r}: use letters, digits, '.', '_', '+' and '-', at most 80, not starting with a sign"
        )
    return name
