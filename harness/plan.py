"""What one `bench run` will do, settled before anything runs; its hash names the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.arms import Arm
from harness.assumptions import BASE, Assumptions
from harness.code import code_sha256
from harness.errors import UserError
from harness.live_plan import LiveSettings, Machine
from harness.profiles import Profile, load_profile

if TYPE_CHECKING:
    from workloads.traces import TraceChoice

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class WorkloadChoice:
    """Which traffic is replayed, and how it is scaled; with a `trace` that, in place of the phases.

    With `only_tenant` that tenant's requests alone, at the times at which they are sent among the others'.
    """

    name: str = "five_phase"
    phases: str = "all"
    mode: str = "single"
    rate_scale: float = 1.0
    time_scale: float = 1.0
    length_scale: float = 1.0
    trace: TraceChoice | None = None
    only_tenant: str = ""

    def to_json(self) -> dict[str, Any]:
        """As it stands in plan.json."""
        return {
            "name": self.name,
            "phases": self.phases,
            "mode": self.mode,
            "rate_scale": self.rate_scale,
            "time_scale": self.time_scale,
            "length_scale": self.length_scale,
            **({} if self.trace is None else {"trace": self.trace.to_json()}),
            **({"only_tenant": self.only_tenant} if self.only_tenant else {}),
        }

    @property
    def label(self) -> str:
        """For the name of a run's folder."""
        return f"{self.name}-{self.phases.replace(',', '-') if self.trace is None else self.trace.stem}"


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Arms x seeds over one workload on one profile; with `live`, on a real server, be its device real or emulated.

    A live run without a GPU has no profile; its machine says what flags are compared and which rates fit.
    """

    workload: WorkloadChoice
    profile: Profile | Machine
    seeds: tuple[int, ...]
    arms: tuple[Arm, ...]
    assumptions: Assumptions = BASE
    live: LiveSettings | None = None

    @property
    def engine(self) -> str:
        """Which engine runs it: virtual, emulated or live."""
        return "virtual" if self.live is None else self.live.engine

    @property
    def step_profile(self) -> Profile:
        """The profile whose step times a virtual or emulated run takes; UserError where there is none."""
        if isinstance(self.profile, Machine):
            raise UserError(f"{self.run_name} ran live on {self.profile.title}, which has no step times")
        return self.profile

    @property
    def tasks(self) -> list[tuple[str, int]]:
        """(arm, seed) of every run; all arms of a seed together, since they share its trace."""
        return [(arm.name, seed) for seed in self.seeds for arm in self.arms]

    def _content(self) -> dict[str, Any]:
        # Named only where they are others than the profile's.
        assumed = {} if self.assumptions == BASE else {"assumptions": self.assumptions.to_json()}
        return {
            **assumed,
            "schema": SCHEMA,
            "workload": self.workload.to_json(),
            "profile": {"name": self.profile.name, "sha256": self.profile.sha256},
            "seeds": list(self.seeds),
            "arms": [arm.to_json() for arm in self.arms],
            "code_sha256": code_sha256(self.arms),
            **self._live_content(),
        }

    def _live_content(self) -> dict[str, Any]:
        machine = {"machine": self.profile.to_json()} if isinstance(self.profile, Machine) else {}
        return {} if self.live is None else {"engine": self.engine, "live": self.live.to_json(), **machine}

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
        under = "" if self.assumptions == BASE else f"-{self.assumptions.name}"
        engine = "" if self.live is None else f"{self.engine}-"
        return f"{engine}{self.workload.label}-{what[:60]}{under}-{self.sha256[:8]}"

    def to_json(self) -> dict[str, Any]:
        """As it stands in plan.json."""
        # How to find the profile again; it is not part of what decides the results.
        where: dict[str, Any] = {}
        if not isinstance(self.profile, Machine):
            where["profile_ref"] = self.profile.ref.to_json()
        if self.live is not None:
            where |= self.live.where
        if self.workload.trace is not None:
            where["trace_path"] = str(self.workload.trace.path.resolve())
        return {"run": self.run_name, "sha256": self.sha256, **where, **self._content()}

    def arm(self, name: str) -> Arm:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)


def from_json(raw: Mapping[str, Any], *, same_code: bool = True) -> RunPlan:
    """The plan that `to_json` wrote; refuses one made with another profile file, or with other code unless told."""
    profile: Profile | Machine
    if "machine" in raw:
        profile = Machine.from_json(raw["machine"])
    else:
        profile = load_profile(**raw.get("profile_ref", {"name": raw["profile"]["name"]}))
    if profile.sha256 != raw["profile"]["sha256"]:
        raise UserError(f"the profile {profile.name} has changed since this run was planned; start a new run")
    plan = RunPlan(
        workload=_workload(raw),
        profile=profile,
        seeds=tuple(raw["seeds"]),
        arms=tuple(Arm.from_json(arm) for arm in raw["arms"]),
        assumptions=Assumptions.from_json(raw["assumptions"]) if "assumptions" in raw else BASE,
        live=LiveSettings.from_json(raw["live"], raw.get("model_path")) if "live" in raw else None,
    )
    if same_code and plan.sha256 != raw["sha256"]:
        raise UserError("the code has changed since this run was planned; start a new run")
    return plan


def _workload(raw: Mapping[str, Any]) -> WorkloadChoice:
    fields = dict(raw["workload"])
    if "trace" in fields:
        from workloads.traces import TraceChoice

        fields["trace"] = TraceChoice.from_json(fields["trace"], Path(raw["trace_path"]))
    return WorkloadChoice(**fields)


def read(run_dir: Path, *, same_code: bool = True) -> RunPlan:
    """The plan of a run folder; UserError where there is none, or as `from_json` has it."""
    path = run_dir / "plan.json"
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")), same_code=same_code)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; is {run_dir} a run folder?") from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a run plan ({error})") from None
