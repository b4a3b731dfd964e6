"""A profile: one GPU with one model, and everything about them that the virtual engine needs to know.

`harness/profiles/load.py` finds and reads one; docs/PROFILES.md is for people.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from harness.profiles.known_models import Model
from harness.profiles.schema import REGIMES, Domain, Regime, Source, Strict
from harness.profiles.tables import Tables

__all__ = [
    "PHASES",
    "REGIMES",
    "Domain",
    "FivePhase",
    "KnownError",
    "Memory",
    "Profile",
    "ProfileRef",
    "Source",
    "Transfers",
]

PHASES = 5


class Memory(Strict):
    """GPU memory, and the KV blocks that vLLM gets out of it."""

    device_bytes: int = Field(gt=0, description="total memory of one GPU as the driver reports it, bytes")
    utilization: float = Field(gt=0, le=1, description="vLLM's --gpu-memory-utilization")
    kv_blocks: int = Field(gt=0, description="blocks in the KV cache, all layers together")
    kv_blocks_from: Literal["recorded", "derived", "given"] = Field(
        description="read from a run, computed from memory, or set by the user"
    )
    kv_blocks_how: str = Field(description="which run, or which sum")


class Transfers(Strict):
    """How fast KV blocks move between the GPU, host memory and disk. Bytes per second that a copy reaches."""

    d2h_bytes_per_s: float = Field(gt=0, description="GPU to host")
    h2d_bytes_per_s: float = Field(gt=0, description="host to GPU, at the same time as the other way")
    launch_us: float = Field(ge=0, description="until a copy between GPU and host begins, us")
    disk_read_bytes_per_s: float = Field(gt=0, description="disk to host")
    disk_write_bytes_per_s: float = Field(gt=0, description="host to disk; reads and writes take turns")
    disk_access_us: float = Field(ge=0, description="until a transfer with the disk begins, us")
    comment: str = Field(description="where these come from")


class FivePhase(Strict):
    """How the five-phase workload is sized for this GPU and model."""

    rate_scale: list[float] = Field(
        default_factory=lambda: [1.0] * PHASES, description="factor on the rates of each phase"
    )
    slo_factor: float = Field(default=1.0, gt=0, description="factor on every tenant's TTFT target")
    comment: str = Field(default="", description="how these were chosen")

    @model_validator(mode="after")
    def _five(self) -> FivePhase:
        if len(self.rate_scale) != PHASES or min(self.rate_scale) <= 0:
            raise ValueError(f"rate_scale must be {PHASES} positive numbers, one a phase")
        return self


class KnownError(Strict):
    """How far off the profile is known to be; shown in every report. Per cent, predicted over measured."""

    step_median_pct: float | None = Field(None, description="median absolute error of a step, all regimes")
    step_p90_pct: float | None = Field(None, description="90th percentile of it")
    step_bias_pct: float | None = Field(None, description="signed mean error")
    mixed_median_pct: float | None = Field(None, description="median absolute error of mixed steps")
    rows: str = Field("", description="which rows of the tables the step errors were taken on")
    closed_loop: list[str] = Field(default_factory=list, description="a line for each measured run replayed")
    command: str = Field("", description="the commands that print these figures again")


@dataclass(frozen=True, slots=True)
class ProfileRef:
    """What `load_profile` needs to find a profile again; stands in plan.json."""

    name: str
    model: str | None = None
    tensor_parallel: int | None = None
    kv_blocks: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Without what was not given."""
        return {k: v for k, v in asdict(self).items() if v is not None}


class Profile(Strict):
    """Step-time tables, memory, default engine flags and load factors of one GPU with one model."""

    name: str = Field(pattern=r"^[a-z0-9.+_-]+/[a-z0-9.+_-]+$", description="GPU/MODEL, with -tpN for N GPUs")
    gpu: str = Field(description="the GPU as a person calls it")
    device_names: list[str] = Field(description="names that the driver reports for it")
    model: str = Field(description="the model as a person calls it")
    model_names: list[str] = Field(description="hub names with this shape")
    measured: bool = Field(description="true when the tables were timed on this GPU")
    not_measured: list[Regime] = Field(
        default_factory=list, description="regimes that are modelled because no measurement of them exists"
    )
    beyond: list[str] = Field(
        default_factory=list, description="what the tables read beyond the sizes that were measured"
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field("bfloat16", description="weights and KV cache")
    tensor_parallel: int = Field(1, ge=1, description="GPUs that share the model")
    layers: int = Field(gt=0, description="transformer layers; the tables hold one layer")
    block_size: int = Field(16, gt=0, description="tokens in a KV block")
    max_model_len: int = Field(32768, gt=0, description="longest request, tokens")
    max_capture: int = Field(512, ge=0, description="largest CUDA graph that vLLM captures on it, tokens")
    cpu_step_us: float = Field(0.0, ge=0, description="CPU time a step before the GPU may start, us")
    source: Source
    memory: Memory
    domain: Domain
    stock: dict[str, Any] = Field(description="engine flags that vLLM's API server resolves on this GPU")
    tuned: dict[str, Any] = Field(
        default_factory=dict, description="upstream's own best flags on this GPU, laid over stock"
    )
    tuned_comment: str = Field("", description="the sweep that chose them; `comment` in the table [tuned]")
    five_phase: FivePhase = Field(default_factory=FivePhase)
    error: KnownError | None = Field(None, description="how far off it is known to be")
    transfers: Transfers | None = Field(
        None, description="links to host memory and disk; without them nothing can be offloaded"
    )

    tables_of: str | None = Field(
        None,
        description="built-in profile whose tables.json this one shares: the same GPU in another setting",
    )

    ref: ProfileRef = Field(exclude=True)
    path: Path = Field(exclude=True, description="its folder; for a composed one perhaps not there yet")
    model_shape: Model = Field(exclude=True)
    tables_path: Path | None = Field(None, exclude=True, description="tables.json; None when composed")
    composed_tables: Tables | None = Field(None, exclude=True)
    gpu_path: Path | None = Field(None, exclude=True, description="the GPU's file; None when not composed")
    sha256: str = Field(exclude=True, description="over all files it is made of, line ends normalised")

    @model_validator(mode="before")
    @classmethod
    def _comment_is_no_flag(cls, raw: dict[str, Any]) -> dict[str, Any]:
        tuned = raw.get("tuned")
        if isinstance(tuned, dict) and "comment" in tuned:
            flags = {k: v for k, v in tuned.items() if k != "comment"}
            return raw | {"tuned": flags, "tuned_comment": tuned["comment"]}
        return raw

    @property
    def kv_blocks(self) -> int:
        """Blocks in the KV cache."""
        return self.memory.kv_blocks

    @property
    def model_dir(self) -> Path:
        """Folder with the model's config.json (shape only, no weights)."""
        return self.model_shape.folder

    @property
    def sized(self) -> bool:
        """Whether `bench capacity` has found the five-phase rates; the comment then says how."""
        return bool(self.five_phase.comment)

    @cached_property
    def tables(self) -> Tables:
        """The step-time tables, checked on first use."""
        if self.composed_tables is not None:
            return self.composed_tables
        assert self.tables_path is not None
        return Tables.load(self.tables_path)
