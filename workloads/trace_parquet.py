"""A workload as one Parquet file, a row a request, and back without loss.

The file's metadata holds what is no request: tenants, phases, seed and the sha256 of the request
list, which is checked when the file is read.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import UserError
from workloads.digest import requests_sha256
from workloads.request import Phase, PlannedRequest, Segment, Tenant, TokenIds, Workload

METADATA_KEY = b"vllm_patchbench.workload"
FORMAT = 1
SCHEMA = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("tenant", pa.string(), nullable=False),
        pa.field("phase", pa.int64(), nullable=False),
        pa.field("intended_ns", pa.int64(), nullable=False),
        pa.field("cancel_ns", pa.int64()),
        pa.field("session", pa.string(), nullable=False),
        pa.field("prompt", pa.list_(pa.int32()), nullable=False),
        pa.field("output", pa.list_(pa.int32()), nullable=False),
        pa.field("segments", pa.string(), nullable=False),
    ]
)
_SCALARS = ("index", "request_id", "tenant", "phase", "intended_ns", "cancel_ns", "session")


def export(workload: Workload, path: Path) -> None:
    """Write the workload; a file that is there under its name is complete.

    Raises:
        UserError: if the path cannot be written.
    """
    requests = workload.requests
    columns: list[Any] = [[getattr(request, name) for request in requests] for name in _SCALARS]
    columns.append(_token_lists([request.prompt for request in requests]))
    columns.append(_token_lists([request.output for request in requests]))
    columns.append([_segments_json(request) for request in requests])
    header = {
        "format": FORMAT,
        "name": workload.name,
        "seed": workload.seed,
        "sha256": workload.sha256,
        "corpus_sha256": workload.corpus_sha256,
        "slo_factor": workload.slo_factor,
        "notes": list(workload.notes),
        "tenants": [asdict(tenant) for tenant in workload.tenants],
        "phases": [asdict(phase) for phase in workload.phases],
    }
    schema = SCHEMA.with_metadata({METADATA_KEY: json.dumps(header)})
    arrays = [pa.array(column, type=field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    partial = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        pq.write_table(pa.Table.from_arrays(arrays, schema=schema), partial, compression="zstd")
        partial.replace(path)
    except OSError as error:
        raise UserError(
            f"--export: cannot write {path} ({error.strerror or error}); name a file in a folder that exists"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path) -> Workload:
    """Read a workload that `export` wrote.

    Raises:
        UserError: if the file is missing, truncated, of another kind, or was changed.
    """
    try:
        table = pq.read_table(path, memory_map=False)
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(f"{path}: not a readable trace ({reason}); export it again") from error
    raw = (table.schema.metadata or {}).get(METADATA_KEY)
    if raw is None or not table.schema.equals(SCHEMA):
        raise UserError(f"{path}: not a trace of this project; write one with bench workload --export")
    header = json.loads(raw)
    if header["format"] != FORMAT:
        raise UserError(f"{path}: trace format {header['format']} is not {FORMAT}; export it again")
    requests = _requests(table)
    if requests_sha256(requests) != header["sha256"]:
        raise UserError(f"{path}: the requests do not match the sha256 beside them; export it again")
    return Workload(
        name=header["name"],
        seed=header["seed"],
        tenants=tuple(Tenant(**tenant) for tenant in header["tenants"]),
        phases=tuple(Phase(**phase) for phase in header["phases"]),
        requests=requests,
        sha256=header["sha256"],
        corpus_sha256=header["corpus_sha256"],
        slo_factor=header["slo_factor"],
        notes=tuple(header["notes"]),
    )


def _segments_json(request: PlannedRequest) -> str:
    parts = [[part.kind, part.name, part.tokens] for part in request.segments]
    return json.dumps(parts, separators=(",", ":"))


def _token_lists(arrays: list[TokenIds]) -> Any:
    """Token arrays as one Arrow list array, without a Python object a token."""
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    values = np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _token_arrays(column: Any) -> list[TokenIds]:
    """The inverse: views into one read-only array."""
    lists = column.combine_chunks()
    if isinstance(lists, pa.ChunkedArray):
        lists = pa.concat_arrays(lists.chunks) if lists.num_chunks else pa.array([], type=lists.type)
    values = np.array(lists.values, dtype=np.int32)
    values.setflags(write=False)
    bounds = np.asarray(lists.offsets).tolist()
    return [values[start:end] for start, end in pairwise(bounds)]


def _requests(table: Any) -> tuple[PlannedRequest, ...]:
    scalars = [table.column(name).to_pylist() for name in _SCALARS]
    rows = zip(
        *scalars,
        _token_arrays(table.column("prompt")),
        _token_arrays(table.column("output")),
        table.column("segments").to_pylist(),
        strict=True,
    )
    return tuple(
        PlannedRequest(
            **dict(zip(_SCALARS, fields, strict=True)),
            prompt=prompt,
            output=output,
            segments=tuple(Segment(*segment) for segment in json.loads(segments)),
        )
        for *fields, prompt, output, segments in rows
    )
