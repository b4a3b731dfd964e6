"""How requests reach a worker process and what it saw comes back: Parquet files in a folder of the run's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from harness.engines.live.client.observed import Observed
from harness.engines.live.client.sends import Send
from harness.engines.live.client.watch import LoopSamples

_SENDS = pa.schema(
    [
        pa.field("request_id", pa.string()),
        pa.field("intended_ns", pa.int64()),
        pa.field("prompt", pa.list_(pa.int32())),
        pa.field("max_tokens", pa.int64()),
        pa.field("cancel_ns", pa.int64()),
        pa.field("session", pa.string()),
        # JSON: its values are of several types
        pa.field("identity", pa.binary()),
        pa.field("priority", pa.int64()),
    ]
)
_TYPES = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
_LISTS: dict[str, np.dtype[Any]] = {
    "chunk_ns": np.dtype(np.int64),
    "chunk_tokens": np.dtype(np.int32),
    "token_ids": np.dtype(np.int32),
}


@dataclass(frozen=True, slots=True)
class Folder:
    """Names of the files of one worker."""

    path: Path
    worker: int

    @property
    def sends(self) -> Path:
        """What it is to send."""
        return self.path / f"sends-{self.worker}.parquet"

    @property
    def observed(self) -> Path:
        """What it saw."""
        return self.path / f"observed-{self.worker}.parquet"

    @property
    def loop(self) -> Path:
        """Its event loop's samples."""
        return self.path / f"loop-{self.worker}.parquet"

    @property
    def end(self) -> Path:
        """Its times and pauses, written last."""
        return self.path / f"end-{self.worker}.json"

    @property
    def log(self) -> Path:
        """Its standard error."""
        return self.path / f"log-{self.worker}.txt"


def write_sends(path: Path, sends: Sequence[Send]) -> None:
    """One row a request."""
    columns: dict[str, Any] = {name: [getattr(send, name) for send in sends] for name in _SENDS.names}
    columns["prompt"] = _lists(columns["prompt"], np.dtype(np.int32))
    columns["identity"] = [msgspec.json.encode(identity) for identity in columns["identity"]]
    pq.write_table(pa.table({name: columns[name] for name in _SENDS.names}, schema=_SENDS), path)


def read_sends(path: Path) -> tuple[Send, ...]:
    """What `write_sends` wrote."""
    table = pq.read_table(path, memory_map=False)
    prompts = _arrays(table["prompt"], np.dtype(np.int32))
    rows = table.drop_columns(["prompt"]).to_pylist()
    return tuple(
        Send(prompt=prompt, **row | {"identity": msgspec.json.decode(row["identity"])})
        for prompt, row in zip(prompts, rows, strict=True)
    )


def write_observed(path: Path, observed: Sequence[Observed]) -> None:
    """One row a request."""
    columns: dict[str, Any] = {}
    for field in fields(Observed):
        values = [getattr(one, field.name) for one in observed]
        if field.name in _LISTS:
            columns[field.name] = _lists(values, _LISTS[field.name])
        else:
            # `from __future__ import annotations` keeps the type as its text
            columns[field.name] = pa.array(values, _TYPES[str(field.type).removesuffix(" | None")])
    pq.write_table(pa.table(columns), path)


def read_observed(path: Path) -> tuple[Observed, ...]:
    """What `write_observed` wrote."""
    table = pq.read_table(path, memory_map=False)
    lists = {name: _arrays(table[name], dtype) for name, dtype in _LISTS.items()}
    rows = table.drop_columns(list(_LISTS)).to_pylist()
    return tuple(Observed(**row, **{name: lists[name][i] for name in _LISTS}) for i, row in enumerate(rows))


def write_loop(path: Path, loop: LoopSamples) -> None:
    """The samples; the few pauses travel in the end file."""
    pq.write_table(pa.table({"due_ns": loop.due_ns, "woke_ns": loop.woke_ns}), path)


def read_loop(path: Path, pauses_ns: Sequence[int]) -> LoopSamples:
    """What `write_loop` wrote, with the pauses."""
    table = pq.read_table(path, memory_map=False)
    due, woke = (table[name].to_numpy().astype(np.int64) for name in ("due_ns", "woke_ns"))
    return LoopSamples(due, woke, np.array(pauses_ns, dtype=np.int64))


def _lists(values: Sequence[npt.NDArray[Any] | None], dtype: np.dtype[Any]) -> pa.Array:
    """A list column without a Python object a token."""
    lengths = [0 if value is None else len(value) for value in values]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    flat = np.concatenate([np.zeros(0, dtype), *(v for v in values if v is not None)]).astype(dtype)
    missing = pa.array([value is None for value in values])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), mask=missing)


def _arrays(column: pa.ChunkedArray, dtype: np.dtype[Any]) -> list[Any]:
    whole = column.combine_chunks()
    flat = whole.values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    offsets = whole.offsets.to_numpy()
    present = whole.is_valid().to_numpy(zero_copy_only=False)
    return [
        flat[begin:end] if there else None
        for begin, end, there in zip(offsets[:-1], offsets[1:], present, strict=True)
    ]
