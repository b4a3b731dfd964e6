"""The profile file: its schema, where profiles live, and how one is loaded.

A profile is a folder with `profile.toml` (what a person edits) and `tables.json` (numbers made by
`scripts/make_profile.py` from measured kernel tables). Built-in ones are named GPU/MODEL and lie beside
this module; any other folder in the same form is loaded by its path.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.errors import UserError
from harness.profiles.tables import Tables

BUILT_IN = Path(__file__).resolve().parent
MODELS = BUILT_IN / "models"
PHASES = 5
# What a step may rest on, and a profile may have measurements of or not: decodes alone, prefills alone, a
# prefill behind tokens that are in the cache already, a prefill beside decodes, and the exchange between GPUs.
REGIMES = ("decode", "prefill", "context", "mixed", "communication")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Source(_Strict):
    """Where the numbers come from."""

    project: str = Field(description="who published the tables")
    revision: str = Field(description="commit or release that they were taken from")
    files: list[str] = Field(description="names of the source tables")
    measured_with: str = Field(description="engine, precision and GPU of the measurement")
    licence: str = Field(description="SPDX name of the tables' licence")
    notice: str = Field(description="copyright and permission notice that must travel with them")


class Memory(_Strict):
    """GPU memory, and the KV blocks that vLLM gets out of it."""

    device_bytes: int = Field(gt=0, description="total memory as the driver reports it, bytes")
    utilization: float = Field(gt=0, le=1, description="vLLM's --gpu-memory-utilization")
    kv_blocks: int = Field(gt=0, description="blocks in the KV cache, all layers together")
    kv_blocks_from: Literal["recorded", "derived"] = Field(
        description="read from a run, or computed from memory"
    )
    kv_blocks_how: str = Field(description="which run, or which sum")


class Domain(_Strict):
    """What the tables cover; a step outside is extrapolated and counted."""

    max_tokens: int = Field(gt=0, description="tokens in a step (dense kernels)")
    max_sequences: int = Field(gt=0, description="requests in a step (output head and sampler)")
    max_decodes: int = Field(gt=0, description="decodes in a step without prefill")
    max_decodes_mixed: int = Field(ge=0, description="decodes beside a prefill; 0: mixed steps not measured")
    max_chunk: int = Field(gt=0, description="prefill tokens in a step")
    max_context: int = Field(gt=0, description="tokens of context, of a decode or before a prefill chunk")


class FivePhase(_Strict):
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


class Profile(_Strict):
    """One GPU with one model: step-time tables, memory, default engine flags and load factors."""

    name: str = Field(pattern=r"^[a-z0-9.+_-]+/[a-z0-9.+_-]+$", description="GPU/MODEL")
    gpu: str = Field(description="the GPU as a person calls it")
    device_names: list[str] = Field(description="names that the driver reports for it")
    model: str = Field(description="model whose shape lies under models/<last part of the name>")
    model_names: list[str] = Field(description="hub names with this shape")
    measured: bool = Field(description="true when the tables were timed on this GPU")
    not_measured: list[Literal["decode", "prefill", "context", "mixed", "communication"]] = Field(
        default_factory=list, description="regimes that are modelled because no measurement of them exists"
    )
    dtype: Literal["bfloat16", "float16"] = Field("bfloat16", description="weights and KV cache")
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

    tables_of: str | None = Field(
        None,
        description="built-in profile whose tables.json this one shares: the same GPU in another setting",
    )

    path: Path = Field(exclude=True)
    tables_path: Path = Field(exclude=True)
    sha256: str = Field(exclude=True, description="over both files, line ends normalised")

    @model_validator(mode="before")
    @classmethod
    def _comment_is_no_flag(cls, raw: dict[str, Any]) -> dict[str, Any]:
        tuned = raw.get("tuned")
        if isinstance(tuned, dict) and "comment" in tuned:
            flags = {k: v for k, v in tuned.items() if k != "comment"}
            return raw | {"tuned": flags, "tuned_comment": tuned["comment"]}
        return raw

    @property
    def built_in(self) -> bool:
        """Whether it is one of the project's own, found by name."""
        return self.path == BUILT_IN / self.name

    @property
    def kv_blocks(self) -> int:
        """Blocks in the KV cache."""
        return self.memory.kv_blocks

    @property
    def model_dir(self) -> Path:
        """Folder with the model's config.json (shape only, no weights)."""
        return model_dir(self.name.split("/", 1)[1])

    @cached_property
    def tables(self) -> Tables:
        """The step-time tables, checked on first use."""
        return Tables.load(self.tables_path)


def model_dir(name: str) -> Path:
    """Folder of a model's config.json; UserError when there is none."""
    folder = MODELS / name
    if not (folder / "config.json").is_file():
        known = ", ".join(sorted(p.parent.name for p in MODELS.glob("*/config.json")))
        raise UserError(f"no model shape {name!r}; known shapes are {known}: see docs/PROFILES.md to add one")
    return folder


def list_profiles() -> list[str]:
    """Names of the built-in profiles, sorted."""
    return sorted(str(p.parent.relative_to(BUILT_IN).as_posix()) for p in BUILT_IN.glob("*/*/profile.toml"))


def load_profile(name: str) -> Profile:
    """A built-in profile by its name (GPU/MODEL), or any folder with a profile.toml by its path.

    Raises UserError for an unknown name (with the nearest) and for a malformed file.
    """
    folder = BUILT_IN / name
    if name not in list_profiles():
        folder = Path(name)
        if not (folder / "profile.toml").is_file():
            near = difflib.get_close_matches(name, list_profiles(), n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"known profiles are {', '.join(list_profiles())}"
            raise UserError(f"no profile {name!r}; {hint}")
    return _read(folder)


def _read(folder: Path) -> Profile:
    toml = folder / "profile.toml"
    text = _bytes_of(toml)
    try:
        raw = tomllib.loads(text.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{toml}: not valid TOML: {error}") from None
    tables = _tables_folder(folder, toml, raw) / "tables.json"
    digest = hashlib.sha256(text + _bytes_of(tables))
    try:
        return Profile(**raw, path=folder, tables_path=tables, sha256=digest.hexdigest())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise UserError(f"{toml}: {where}: {first['msg']}; docs/PROFILES.md lists the fields") from None
    except TypeError as error:
        raise UserError(f"{toml}: {error}; path and sha256 are not fields of the file") from None


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes().replace(b"\r\n", b"\n")
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); a profile needs both files") from None


def _tables_folder(folder: Path, toml: Path, raw: dict[str, Any]) -> Path:
    """Its own folder, or that of the built-in profile whose tables it shares."""
    shared = raw.get("tables_of")
    if shared is None:
        return folder
    if shared not in list_profiles():
        raise UserError(f"{toml}: tables_of names no built-in profile: {shared!r}")
    return BUILT_IN / str(shared)


def read_model_config(name: str) -> dict[str, Any]:
    """The shape of a model as its config.json gives it."""
    loaded: dict[str, Any] = json.loads((model_dir(name) / "config.json").read_text(encoding="utf-8"))
    return loaded
