"""What the JSON files of a run must hold, checked when they are read.

Only what is read is described: more may stand in a file. A file that fits is used as it is; one that does
not is refused in one line that names the file and the field.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from harness.errors import UserError

Json = dict[str, Any]

_ARM_NAME = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]*")
# Files and folders that lie where the arms' folders do.
_RUN_FILES = frozenset(
    {"plan.json", "summary.json", "summary.md", "report.html", "logs", "sensitivity", "alone"}
)

Count = Annotated[int, Field(ge=0)]


def arm_name_fault(name: str) -> str:
    """Why an arm's name cannot name its folder in a run; empty if it can."""
    if not _ARM_NAME.fullmatch(name):
        return f"arm name {name!r} cannot name a folder: use letters, digits and . _ + - only"
    if name.lower() in _RUN_FILES or name.lower().startswith("compare."):
        return f"arm name {name!r} is that of a file of the run: choose another"
    return ""


class Paper(BaseModel):
    """Types are taken as they stand: no text is read as a number."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Reason(Paper):
    """Why an arm may not be believed, or what to know beside it."""

    code: str = ""
    text: str = ""
    fatal: bool | None = None


class Hook(Paper):
    """How often a patch's hooks were called."""

    hits: Count


class PatchSources(Paper):
    """Where the patches of an arm were loaded from."""

    patches: list[Json]


class PlannedArm(Paper):
    """One arm of plan.json."""

    name: str
    base: str = ""
    patches: list[str]
    knobs: dict[str, Json]
    engine_flags: Json = {}
    patch_plan: pydantic.Json[PatchSources] | None = None

    @model_validator(mode="after")
    def _named(self) -> PlannedArm:
        if fault := arm_name_fault(self.name):
            raise ValueError(fault)
        return self


class Assumed(Paper):
    """What a recomputed run assumes beyond its profile."""

    name: str
    efficiency: FiniteFloat = 1.0
    mixed_penalty: FiniteFloat | None = None
    cpu_step_us: FiniteFloat | None = None
    kv_blocks: Count | None = None


class LivePlan(Paper):
    """What plan.json says of a live run."""

    again: str = ""
    again_of: str = ""


class Plan(Paper):
    """plan.json."""

    schema_: Literal[1] = Field(alias="schema")
    run: str
    seeds: Annotated[list[Count], Field(min_length=1)]
    arms: Annotated[list[PlannedArm], Field(min_length=1)]
    workload: Json = {}
    profile: Json = {}
    assumptions: Assumed | None = None
    live: LivePlan | None = None

    @model_validator(mode="after")
    def _once(self) -> Plan:
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError("seeds: one is named twice")
        if len({arm.name for arm in self.arms}) != len(self.arms):
            raise ValueError("arms: one is named twice")
        return self


class Tenant(Paper):
    """A tenant of the workload."""

    name: str
    tier: str


class Phase(Paper):
    """A phase of the workload, ns from the run's start."""

    number: int
    name: str = ""
    start_ns: int
    end_ns: int
    measured: bool

    @model_validator(mode="after")
    def _forward(self) -> Phase:
        if self.start_ns >= self.end_ns:
            raise ValueError("the phase ends before it begins")
        return self


class Workload(Paper):
    """The workload's part of manifest.json."""

    name: str = ""
    sha256: str
    corpus_sha256: str = ""
    requests: int | None = None
    slo_factor: FiniteFloat | None = None
    tenants: Annotated[list[Tenant], Field(min_length=1)]
    phases: list[Phase]

    @model_validator(mode="after")
    def _measured(self) -> Workload:
        if not any(phase.measured for phase in self.phases):
            raise ValueError("none of its phases is measured")
        return self


class ProfileFacts(Paper):
    """The profile's part of manifest.json."""

    name: str = ""
    gpu: str = ""
    model: str = ""
    sha256: str = ""
    source: str = ""
    measured: bool | None = None
    not_measured: list[str] = []
    beyond: list[str] = []
    cpu_step_us: FiniteFloat = 0.0
    error: dict[str, FiniteFloat | str | list[str]] = {}
    not_modelled: str | list[str] = ""


class Validity(Paper):
    """What the run said of itself."""

    valid: bool = True
    reasons: list[Reason] = []


class RunFacts(Paper):
    """What may differ between equal runs."""

    wall_s: FiniteFloat = 0.0
    upstream_s: FiniteFloat = 0.0
    host: str | None = None
    started: str | None = None


class LiveModel(Paper):
    """Which model was served."""

    model_name: str


class Server(Paper):
    """How the server came up."""

    start_s: FiniteFloat
    compute_cores: Count | None = None


class Client(Paper):
    """How late the client was."""

    send_delay_ms_p99: FiniteFloat
    read_delay_ms_p99: FiniteFloat


class TelemetryFacts(Paper):
    """What the engine's own notes cost, as a share of step time."""

    overhead: FiniteFloat | None


class Host(Paper):
    """The machine, and its load averages before the run."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    load_before: Annotated[list[FiniteFloat], Field(min_length=1)]


class Manifest(Paper):
    """manifest.json: one arm, one seed."""

    schema_: Literal[1] = Field(alias="schema")
    arm: str
    seed: Count
    engine: str = ""
    versions: Json = {}
    profile: ProfileFacts = ProfileFacts()
    workload: Workload
    plan_sha256: str
    patch_plan_sha256: str | None = None
    patches: list[str]
    schedule_digest: str | None = None
    virtual_s: FiniteFloat = 0.0
    extrapolated: dict[str, FiniteFloat] = {}
    unmeasured: dict[str, FiniteFloat] = {}
    command: list[str] = []
    validity: Validity = Validity()
    run_facts: RunFacts = RunFacts()
    live: LiveModel | None = None
    server: Server | None = None
    client: Client | None = None
    telemetry: TelemetryFacts | None = None
    host: Host | None = None
    gpu: Json | None = None

    @model_validator(mode="after")
    def _whole(self) -> Manifest:
        parts = (self.live, self.server, self.client, self.telemetry, self.host, self.gpu)
        if self.engine == "live" and None in parts:
            raise ValueError("a live run names its model, server, client, telemetry, host and gpu")
        return self


class Receipt(Paper):
    """receipt.json: what the patches of one arm and one seed counted."""

    schema_: Literal[1] = Field(alias="schema")
    plan_sha256: str | None = Field(description="of the patches' plan; null where there are none")
    hooks: dict[str, Hook]
    metrics: dict[str, Json]


class Figure(Paper):
    """One metric in one scope."""

    value: FiniteFloat | None
    ci95: Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)] | None
    unit: str = ""
    reason: str = ""
    few_samples: bool = False


Figures = dict[str, Figure]


class SummedArm(Paper):
    """One arm of summary.json."""

    name: str
    patches: list[str]
    seeds: list[Count]
    valid: bool
    reasons: list[Reason]
    metrics: Figures
    by_phase: dict[str, Figures]
    by_tenant: dict[str, Figures]
    by_tenant_phase: dict[str, dict[str, Figures]]
    by_scope: dict[str, Figures]


class Summary(Paper):
    """summary.json, as far as `bench compare` reads it."""

    schema_: Literal[1] = Field(alias="schema")
    run: str
    valid: bool
    reasons: list[Reason]
    arms: list[SummedArm]


def checked(model: type[Paper], value: Json, path: Path, advice: str) -> Json:
    """The value itself, if it fits.

    Args:
        model: what it must hold.
        value: what a file held.
        path: that file, for the message.
        advice: what to do about it, as the end of a sentence.

    Raises:
        UserError: naming the file, the first field that does not fit, and why.
    """
    try:
        model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        why = first["msg"].removeprefix("Value error, ")
        said = " ".join(f"{where}: {why[:1].lower()}{why[1:]}".split()) if where else why
        raise UserError(f"{path}, {said}; {advice}") from None
    return value
