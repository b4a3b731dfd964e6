"""What one `bench run` will do, settled before anything runs; its hash names the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.arms import Arm
from harness.code import code_sha256
from harness.errors import UserError
from harness.profiles import Profile, load_profile

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class WorkloadChoice:
    """Which traffic is replayed, and how it is scaled."""

    name: str = "five_phase"
    phases: str = "all"
    mode: str = "single"
    rate_scale: float = 1.0
    time_scale: float = 1.0
    length_scale: float = 1.0

    def to_json(self) -> dict[str, Any]:
        """As it stands in plan.json."""
        return {
            "name": self.name,
            "phases": self.phases,
            "mode": self.mode,
            "rate_scale": self.rate_scale,
            "time_scale": self.time_scale,
            "length_scale": self.length_scale,
        }


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Arms x seeds over one workload on one profile."""

    workload: WorkloadChoice
    profile: Profile
    seeds: tuple[int, ...]
    arms: tuple[Arm, ...]

    @property
    def tasks(self) -> list[tuple[str, int]]:
        """(arm, seed) of every run; all arms of a seed together, since they share its trace."""
        return [(arm.name, seed) for seed in self.seeds for arm in self.arms]

    def _content(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "workload": self.workload.to_json(),
            "profile": {"name": self.profile.name, "sha256": self.profile.sha256},
            "seeds": list(self.seeds),
            "arms": [arm.to_json() for arm in self.arms],
            "code_sha256": code_sha256(self.arms),
        }

    @property
    def sha256(self) -> str:
        """Hash of everything that decides the results."""
        text = json.dumps(self._content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def run_name(self) -> str:
        """Readable and unique: the same plan always lands in the same folder, which makes it resumable."""
        patched = [arm.name for arm in self.arms if arm.patches]
        what = patched[0] if patched else "baselines"
        phases = self.workload.phases.replace(",", "-")
        return f"{self.workload.name}-{phases}-{what[:60]}-{self.sha256[:8]}"

    def to_json(self) -> dict[str, Any]:
        """As it stands in plan.json."""
        # The folder finds the profile again; it is not part of what decides the results.
        where = {"profile_folder": str(self.profile.path.resolve())} if not self.profile.built_in else {}
        return {"run": self.run_name, "sha256": self.sha256, **where, **self._content()}

    def arm(self, name: str) -> Arm:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)


def from_json(raw: Mapping[str, Any]) -> RunPlan:
    """The plan that `to_json` wrote; refuses one made with another profile file or other code."""
    profile = load_profile(raw.get("profile_folder", raw["profile"]["name"]))
    if profile.sha256 != raw["profile"]["sha256"]:
        raise UserError(f"the profile {profile.name} has changed since this run was planned; start a new run")
    plan = RunPlan(
        workload=WorkloadChoice(**raw["workload"]),
        profile=profile,
        seeds=tuple(raw["seeds"]),
        arms=tuple(Arm.from_json(arm) for arm in raw["arms"]),
    )
    if plan.sha256 != raw["sha256"]:
        raise UserError("the code has changed since this run was planned; start a new run")
    return plan


def read(run_dir: Path) -> RunPlan:
    """The plan of a run folder."""
    path = run_dir / "plan.json"
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; is {run_dir} a run folder?") from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a run plan ({error})") from None
