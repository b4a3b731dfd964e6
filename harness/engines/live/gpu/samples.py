"""The samples of a run, GPU by GPU: `gpu.parquet` as arrays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from harness.engines.live.gpu.facts import Gpu
from harness.errors import UserError
from harness.schema import arrow_schema

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
GPUS_KEY = b"gpus"


@dataclass(frozen=True, slots=True)
class Track:
    """The samples of one GPU, by time.

    Attributes:
        t_ns: ns of the run's clock, ascending; shape (n,).
        errors: why the GPU did not answer, empty where it did; n texts.
        columns: the other columns that are numbers, NaN for null; shape (n,) each.
    """

    t_ns: Ints
    errors: tuple[str, ...]
    columns: dict[str, Floats] = field(default_factory=dict)

    def column(self, name: str) -> Floats:
        """A column; NaN throughout where the samples do not have it."""
        values = self.columns.get(name)
        return np.full(len(self.t_ns), np.nan) if values is None else values


_EMPTY = Track(np.zeros(0, dtype=np.int64), ())


@dataclass(frozen=True, slots=True)
class GpuSamples:
    """All GPUs of a run: those that it was given, and the samples of those that answered."""

    gpus: tuple[Gpu, ...]
    tracks: dict[str, Track]

    def track(self, uuid: str) -> Track:
        """The samples of a GPU; an empty track where it gave none."""
        return self.tracks.get(uuid, _EMPTY)

    @staticmethod
    def of(table: pa.Table, gpus: Sequence[Gpu]) -> GpuSamples:
        """From a table with the columns of `harness.schema.GPU`, rows in any order."""
        tracks = {}
        uuids = np.asarray(table["uuid"].to_pylist(), dtype=object)
        numbers = {
            name: table[name].cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            for name in table.column_names
            if name not in ("t_ns", "uuid", "error", "throttle")
        }
        times = table["t_ns"].to_numpy()
        errors = table["error"].to_pylist()
        for uuid in dict.fromkeys(uuids):
            rows = np.flatnonzero(uuids == uuid)
            rows = rows[np.argsort(times[rows], kind="stable")]
            tracks[str(uuid)] = Track(
                t_ns=times[rows],
                errors=tuple(errors[row] for row in rows),
                columns={name: values[rows] for name, values in numbers.items()},
            )
        return GpuSamples(tuple(gpus), tracks)


def load(path: Path) -> GpuSamples:
    """Read `gpu.parquet`; UserError where it is absent, damaged or of another version."""
    try:
        table = pq.read_table(path, memory_map=False)
        gpus = [Gpu.from_json(one) for one in json.loads((table.schema.metadata or {})[GPUS_KEY])]
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: name the gpu.parquet of a live run on a GPU") from None
    except (OSError, pa.ArrowException) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is truncated or no Parquet file ({first}): run that arm again") from None
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path} does not say which GPUs it is of: run that arm again") from None
    lacking = [name for name in arrow_schema("gpu").names if name not in table.column_names]
    if lacking:
        raise UserError(f"{path} lacks the column {', '.join(lacking)}: run that arm again")
    return GpuSamples.of(table, gpus)
