"""A GPU's file: its sheet, and kernel times measured on it (or scaled to it) from which profiles are composed.

One JSON file a GPU under `gpus/`. Its upper part (names, sheet, source) is written by a person; its numbers
are made by `scripts/make_gpu.py` and are microseconds of one kernel of one layer. null stands for a
cell that was not measured, or was kept back to test with (see `step_error`).
"""

from __future__ import annotations

import difflib
import hashlib
import json
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from harness.errors import UserError
from harness.profiles.schema import Regime, Source, Strict

BUILT_IN = Path(__file__).resolve().parent / "gpus"
ELEMENTWISE = ("norm", "rope", "act", "embedding", "final_norm", "sampler")


class GpuSpec(Strict):
    """The data sheet, and what the driver says."""

    device_bytes: int = Field(gt=0, description="total memory as the driver reports it, bytes")
    bandwidth_gb_s: float = Field(gt=0, description="memory bandwidth, 10^9 bytes a second")
    tflops: float = Field(gt=0, description="dense 16-bit matrix products, 10^12 operations a second")
    sms: int = Field(gt=0, description="streaming multiprocessors")
    capability: list[int] = Field(description="CUDA compute capability, as in [9, 0]")
    interconnect_gb_s: float = Field(
        gt=0, description="to the other GPUs, one direction, 10^9 bytes a second"
    )
    interconnect_latency_us: float = Field(ge=0, description="of one exchange between GPUs, us")
    origin: str = Field(description="where each of these numbers is from")


def _grid(us: list[Any], **axes: list[int]) -> None:
    for name, axis in axes.items():
        if not axis or axis[0] < 0 or any(b <= a for a, b in pairwise(axis)):
            raise ValueError(f"{name} must be ascending and not empty")
    if len(us) != prod(len(axis) for axis in axes.values()):
        raise ValueError(f"us has {len(us)} values, which {' x '.join(axes)} does not give")
    if not all(value is None or 0 < value < float("inf") for value in us):
        raise ValueError("us must be positive")


class GemmGrid(Strict):
    """Matrix products over output columns n, inner size k and tokens m; n outermost, m fastest."""

    n: list[int]
    k: list[int]
    m: list[int]
    us: list[float | None]

    @model_validator(mode="after")
    def _rectangular(self) -> GemmGrid:
        _grid(self.us, n=self.n, k=self.k, m=self.m)
        return self


class GemmCurve(Strict):
    """Matrix products of one shape over tokens m."""

    n: int = Field(gt=0)
    k: int = Field(gt=0)
    m: list[int]
    us: list[float]

    @model_validator(mode="after")
    def _rectangular(self) -> GemmCurve:
        _grid(self.us, m=self.m)
        return self


class Geometry(Strict):
    """Attention times for one number of heads and key-value heads (of 128 wide); the fastest axis comes last."""

    heads: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    us: list[float | None]


class Decode(Strict):
    """Attention of n decodes at context ctx."""

    n: list[int]
    ctx: list[int]
    geometries: list[Geometry] = Field(min_length=1)

    @model_validator(mode="after")
    def _rectangular(self) -> Decode:
        for geometry in self.geometries:
            _grid(geometry.us, n=self.n, ctx=self.ctx)
        return self


class Prefill(Strict):
    """Attention of one chunk behind kv tokens; kv is [0] where no prior tokens were measured."""

    chunk: list[int]
    kv: list[int]
    geometries: list[Geometry] = Field(min_length=1)

    @model_validator(mode="after")
    def _rectangular(self) -> Prefill:
        for geometry in self.geometries:
            _grid(geometry.us, chunk=self.chunk, kv=self.kv)
        return self


class Mixed(Strict):
    """Attention of a chunk behind kv tokens beside n decodes at context ctx, for one geometry."""

    chunk: list[int]
    kv: list[int]
    n: list[int]
    ctx: list[int]
    heads: int
    kv_heads: int
    us: list[float]

    @model_validator(mode="after")
    def _rectangular(self) -> Mixed:
        _grid(self.us, chunk=self.chunk, kv=self.kv, n=self.n, ctx=self.ctx)
        return self


class Bytes(Strict):
    """A kernel whose time follows the bytes that it reads and writes."""

    bytes: list[int]
    us: list[float]

    @model_validator(mode="after")
    def _rectangular(self) -> Bytes:
        _grid(self.us, bytes=self.bytes)
        return self


class Numbers(Strict):
    """What `scripts/make_gpu.py` makes."""

    gemm_grid: GemmGrid | None = None
    gemm_curves: list[GemmCurve] = Field(default_factory=list)
    decode: Decode
    prefill: Prefill
    mixed: Mixed | None = None
    elementwise: dict[str, Bytes] = Field(description=f"kernels {', '.join(ELEMENTWISE)}")

    @model_validator(mode="after")
    def _complete(self) -> Numbers:
        if (self.gemm_grid is None) == (not self.gemm_curves):
            raise ValueError("one of gemm_grid and gemm_curves is needed")
        if lacking := [kernel for kernel in ELEMENTWISE if kernel not in self.elementwise]:
            raise ValueError(f"elementwise lacks {', '.join(lacking)}")
        if self.mixed is not None and len(self.prefill.kv) == 1:
            raise ValueError("mixed goes with a prefill table that has prior tokens")
        return self


class Gpu(Strict):
    """One GPU: who it is, its sheet, and kernel times."""

    name: str = Field(pattern=r"^[a-z0-9.+_-]+$", description="short name, with its memory")
    title: str = Field(description="the GPU as a person calls it")
    device_names: list[str] = Field(min_length=1, description="names that the driver reports for it")
    dtype: Literal["bfloat16", "float16"] = Field("bfloat16", description="weights and KV cache")
    measured: bool = Field(description="true when the times were taken on this GPU")
    not_measured: list[Regime] = Field(description="regimes of one GPU that no row of the tables covers")
    note: str = Field("", description="what a reader of results should know")
    attention_kernel: Literal["fa2", "fa3"] = Field(
        description="FlashAttention generation that vLLM runs on it"
    )
    spec: GpuSpec
    source: Source
    numbers: Numbers

    path: Path = Field(exclude=True)
    sha256: str = Field(exclude=True, description="over the file, line ends normalised")


def list_gpus() -> list[str]:
    """Names of the built-in GPUs, sorted."""
    return sorted(file.stem for file in BUILT_IN.glob("*.json"))


_read: dict[tuple[Path, int, int], Gpu] = {}


def load_gpu(name: str) -> Gpu:
    """A built-in GPU by its name, or any file in the same form by its path ending in .json.

    Raises UserError for an unknown name (with the nearest) and for a malformed file (with the field).
    """
    path = BUILT_IN / f"{name}.json"
    if name not in list_gpus():
        path = Path(name)
        if path.suffix != ".json" or not path.is_file():
            near = difflib.get_close_matches(name, list_gpus(), n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"known GPUs are {', '.join(list_gpus())}"
            raise UserError(f"no GPU {name!r}; {hint} docs/PROFILES.md says how to add one")
    try:
        stat = path.stat()
        key = (path.resolve(), stat.st_mtime_ns, stat.st_size)
        if key not in _read:
            _read[key] = _parse(path, path.read_bytes().replace(b"\r\n", b"\n"))
        return _read[key]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _parse(path: Path, raw: bytes) -> Gpu:
    try:
        content: dict[str, Any] = json.loads(raw)
        return Gpu(**content, path=path, sha256=hashlib.sha256(raw).hexdigest())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise UserError(f"{path}: {where}: {first['msg']}; scripts/make_gpu.py makes the numbers") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: not a GPU file ({error}); docs/PROFILES.md describes it") from None
