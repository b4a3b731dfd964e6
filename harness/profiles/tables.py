"""The numbers of a profile: kernel times on rectangular grids, checked when loaded.

Times are microseconds. `dense` and the attention grids are for one transformer layer; `once_us` and
`per_sequence` are for the whole step. Grids are flat lists in row-major order of the axes as declared.
"""

from __future__ import annotations

import json
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.errors import UserError


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _check_axis(name: str, axis: list[int]) -> None:
    if not axis or any(b <= a for a, b in pairwise(axis)) or axis[0] < 0:
        raise ValueError(f"{name} must be ascending and not empty")


def _check_grid(axes: dict[str, list[int]], us: list[float]) -> None:
    for name, axis in axes.items():
        _check_axis(name, axis)
    size = prod(len(axis) for axis in axes.values())
    if len(us) != size:
        raise ValueError(f"us has {len(us)} values where {' x '.join(axes)} needs {size}")
    if not all(0 < value < float("inf") for value in us):
        raise ValueError("us must be positive")


class Dense(_Strict):
    """Everything of a layer but attention, and what runs once a step, by tokens in the step."""

    tokens: list[int]
    layer_us: list[float] = Field(description="norms, projections, rotary embedding and MLP of one layer")
    once_us: list[float] = Field(description="embedding and final norm")

    @model_validator(mode="after")
    def _rectangular(self) -> Dense:
        _check_grid({"tokens": self.tokens}, self.layer_us)
        _check_grid({"tokens": self.tokens}, self.once_us)
        return self


class PerSequence(_Strict):
    """Output head and sampler, by requests in the step."""

    sequences: list[int]
    us: list[float]

    @model_validator(mode="after")
    def _rectangular(self) -> PerSequence:
        _check_grid({"sequences": self.sequences}, self.us)
        return self


class Prefill(_Strict):
    """Attention of one layer, prefill only: by tokens in the chunk and tokens before it."""

    chunk: list[int]
    kv: list[int]
    us: list[float]

    @model_validator(mode="after")
    def _rectangular(self) -> Prefill:
        _check_grid({"chunk": self.chunk, "kv": self.kv}, self.us)
        return self


class Decode(_Strict):
    """Attention of one layer, decodes only: by their number and their mean context."""

    n: list[int]
    ctx: list[int]
    us: list[float]

    @model_validator(mode="after")
    def _rectangular(self) -> Decode:
        _check_grid({"n": self.n, "ctx": self.ctx}, self.us)
        return self


class Mixed(_Strict):
    """Attention of one layer, a prefill chunk beside decodes: not the sum of the two."""

    chunk: list[int]
    kv: list[int]
    n: list[int]
    ctx: list[int]
    us: list[float]

    @model_validator(mode="after")
    def _rectangular(self) -> Mixed:
        _check_grid({"chunk": self.chunk, "kv": self.kv, "n": self.n, "ctx": self.ctx}, self.us)
        return self


class Tables(_Strict):
    """All tables of a profile. Without `mixed`, mixed steps are summed and counted as not measured."""

    source: str = Field(description="project and revision, licence and copyright line")
    dense: Dense
    per_sequence: PerSequence
    prefill: Prefill
    decode: Decode
    mixed: Mixed | None = None

    @classmethod
    def load(cls, file: Path) -> Tables:
        """Read and check a tables.json; UserError says what is wrong with it."""
        try:
            raw: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return cls(**raw)
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror})") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "file"
            raise UserError(
                f"{file}: {where}: {first['msg']}; make it again with scripts/make_profile.py"
            ) from None
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{file}: not a table file ({error}); make it with scripts/make_profile.py"
            ) from None
