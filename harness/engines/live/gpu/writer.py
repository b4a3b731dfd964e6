"""Rows to disk as they come, and one Parquet file when all is done.

A Parquet file cannot be read before its footer is there, so rows stream into an Arrow stream under a hidden name,
readable up to its last whole batch whatever happens to the writer; the end turns it into the Parquet file in one move.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness.schema import arrow_schema

FLUSH_NS = 1_000_000_000


def partial_of(path: Path) -> Path:
    """Where the rows of `path` stream before it is there."""
    return path.with_name(f".{path.name}.partial")


class Writer:
    """Takes the rows of one `gpu.parquet`."""

    def __init__(self, path: Path, metadata: Mapping[bytes, bytes]) -> None:
        self._path = path
        self._schema = arrow_schema("gpu").with_metadata(dict(metadata))
        self._rows: list[dict[str, Any]] = []
        self._flushed_ns: int | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self._file = partial_of(path).open("wb")
        self._stream = pa.ipc.new_stream(self._file, self._schema)
        self._file.flush()

    def add(self, rows: list[dict[str, Any]], now_ns: int) -> None:
        """Take rows; once a second all that came go to the disk."""
        self._rows += rows
        if self._flushed_ns is None or now_ns - self._flushed_ns >= FLUSH_NS:
            self._flush()
            self._flushed_ns = now_ns

    def finish(self) -> None:
        """Write the Parquet file in one move and drop the stream."""
        self._flush()
        self._stream.close()
        self._file.close()
        salvage(self._path)

    def _flush(self) -> None:
        if self._rows:
            self._stream.write_batch(pa.RecordBatch.from_pylist(self._rows, schema=self._schema))
            self._file.flush()
            self._rows = []


def salvage(path: Path) -> int:
    """Turn the partial file of `path` into `path`, up to its last whole batch; the rows in it, 0 where there is none."""
    partial = partial_of(path)
    table = _readable(partial)
    if table is None:
        partial.unlink(missing_ok=True)
        return 0
    hidden = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with hidden.open("wb") as file:
            pq.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    partial.unlink()
    return int(table.num_rows)


def _readable(partial: Path) -> pa.Table | None:
    try:
        source = partial.open("rb")
    except FileNotFoundError:
        return None
    with source:
        try:
            stream = pa.ipc.open_stream(source)
        except (pa.ArrowException, OSError):
            return None
        batches = []
        while True:
            try:
                batches.append(stream.read_next_batch())
            except (StopIteration, pa.ArrowException, OSError):
                # its end, or a batch cut off
                break
        return pa.Table.from_batches(batches, schema=stream.schema) if batches else None
