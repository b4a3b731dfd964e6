"""Record directories: written in one move, read back as DataFrames.

One directory holds one arm and one seed (see `harness.schema`). It is written under a hidden name
beside its final one and renamed when everything is on the disk, so a directory that exists under
its final name is complete; a killed run leaves only a hidden one, which the next write clears.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from harness.atomic import json_text
from harness.errors import RunFailed, UserError
from harness.papers import Json, Manifest, Plan, Receipt, arm_name_fault, checked
from harness.schema import EXTRA_TABLES, TABLES, arrow_schema

PLAN, MANIFEST, RECEIPT, SUMMARY = "plan.json", "manifest.json", "receipt.json", "summary.json"
REFERENCE = "reference"
# Beside the arms of an emulated run: what its way over HTTP costs (`harness.http_path`).
HTTP_PATH = "http-path.json"
_FILES = (*(f"{name}.parquet" for name in TABLES), MANIFEST, RECEIPT)
# Fixed, so that equal content gives equal bytes whatever pyarrow's defaults become.
_ROWS_PER_GROUP = 1 << 20


@dataclass(frozen=True, slots=True)
class ArmRecord:
    """What one arm and one seed left behind.

    Integer columns that may be null come as float64 with NaN: nanoseconds below 2**53 (104 days)
    are exact there.
    """

    path: Path
    arm: str
    seed: int
    requests: pd.DataFrame
    tokens: pd.DataFrame
    steps: pd.DataFrame
    events: pd.DataFrame
    manifest: Json
    receipt: Json

    @property
    def gauges(self) -> pd.DataFrame | None:
        """What the patches' gauges said over time, read anew each time; None where nothing recorded them."""
        path = self.path / "gauges.parquet"
        return _read_table(path, "gauges") if path.is_file() else None

    @property
    def cache(self) -> pd.DataFrame | None:
        """What `cachedash` counted, read anew each time; None where it was not on."""
        path = self.path / "cache.parquet"
        return _read_table(path, "cache") if path.is_file() else None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """All arms and seeds of one run that are complete, and those that the plan names but are not."""

    path: Path
    plan: Json
    arms: Mapping[str, tuple[ArmRecord, ...]]
    missing: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Frames:
    """The tables of one or several arms and seeds, with the columns `arm` and `seed` in front.

    `tokens.request` and `events.request` are row numbers within one arm and seed. `gauges` is of those that
    have some; None where none has.
    """

    requests: pd.DataFrame
    tokens: pd.DataFrame
    steps: pd.DataFrame
    events: pd.DataFrame
    gauges: pd.DataFrame | None = None


def arm_dir(run: Path, arm: str, seed: int) -> Path:
    """Where the records of an arm and a seed lie; UserError where the name cannot be a folder."""
    if fault := arm_name_fault(arm):
        raise UserError(fault)
    return run / arm / f"seed-{seed}"


def write_arm(
    directory: Path,
    tables: Mapping[str, pa.Table | pd.DataFrame],
    manifest: Json,
    receipt: Json,
    files: Mapping[str, Path] | None = None,
) -> None:
    """Write one arm and seed as a whole or not at all.

    Args:
        directory: final place, `<run>/<arm>/seed-<n>`; what is there is replaced.
        tables: one table for each name in `harness.schema.TABLES`, and what there is of `EXTRA_TABLES`.
        manifest: JSON-able facts about the run.
        receipt: JSON-able hook counts and mechanism metrics.
        files: what else to copy in, by its name there, as it is.

    Raises:
        RunFailed: the disk is full or cannot be written to; nothing is left behind.
        ValueError: a table is missing or does not fit the schema.
    """
    names = (*TABLES, *(name for name in EXTRA_TABLES if name in tables))
    blobs = {f"{name}.parquet": parquet_bytes(name, tables[name]) for name in names}
    blobs[MANIFEST] = json_text(manifest).encode()
    blobs[RECEIPT] = json_text(receipt).encode()
    hidden = directory.with_name(f".{directory.name}.tmp-{os.getpid()}")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        for stale in directory.parent.glob(f".{directory.name}.tmp-*"):
            shutil.rmtree(stale)
        hidden.mkdir()
        for name, blob in blobs.items():
            _write_synced(hidden / name, blob)
        for name, source in (files or {}).items():
            _write_synced(hidden / name, source.read_bytes())
        _sync_dir(hidden)
        if directory.exists():
            shutil.rmtree(directory)
        hidden.rename(directory)
        _sync_dir(directory.parent)
    except OSError as error:
        shutil.rmtree(hidden, ignore_errors=True)
        raise RunFailed(_disk_message(directory, error)) from error
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def is_complete(directory: Path) -> bool:
    """True if every file of an arm and seed is there."""
    return all((directory / name).is_file() for name in _FILES)


def load_arm(directory: Path) -> ArmRecord:
    """Read one arm and seed; UserError naming the file where one is absent or damaged."""
    missing = [name for name in _FILES if not (directory / name).is_file()]
    if missing:
        raise UserError(
            f"{directory} lacks {', '.join(missing)}: delete this folder and run the same command again"
        )
    manifest, receipt = read_manifest(directory), read_receipt(directory)
    frames = {name: _read_table(directory / f"{name}.parquet", name) for name in TABLES}
    listed = {tenant["name"] for tenant in manifest["workload"]["tenants"]}
    if strangers := sorted(set(map(str, frames["requests"]["tenant"])) - listed):
        raise UserError(
            f"{directory / MANIFEST}, workload.tenants: the records have a tenant {strangers[0]!r} that it does "
            f"not list; delete {directory} and run again"
        )
    return ArmRecord(
        path=directory,
        arm=manifest["arm"],
        seed=manifest["seed"],
        manifest=manifest,
        receipt=receipt,
        **frames,
    )


def load_run(run: Path) -> RunRecord:
    """Read a run: its plan and every arm and seed that the plan names and that is complete."""
    plan = read_plan(run)
    arms: dict[str, tuple[ArmRecord, ...]] = {}
    missing: list[tuple[str, int]] = []
    for arm in plan["arms"]:
        found: list[ArmRecord] = []
        for seed in plan["seeds"]:
            place = arm_dir(run, arm["name"], seed)
            if place.is_dir():
                found.append(load_arm(place))
            else:
                missing.append((arm["name"], seed))
        arms[arm["name"]] = tuple(found)
    return RunRecord(run, plan, arms, tuple(missing))


def find_runs(results: Path) -> list[Path]:
    """The runs in a results folder (or the folder itself if it is a run), without the reference.

    Raises:
        UserError: the folder does not exist or holds no run.
    """
    if not results.is_dir():
        raise UserError(f"no folder {results}: name a results folder or a run, or start with `bench run`")
    if (results / PLAN).is_file():
        return [results]
    runs = sorted(p.parent for p in results.glob(f"*/{PLAN}") if p.is_file() and p.parent.name != REFERENCE)
    if not runs:
        raise UserError(
            f"{results} holds no run (no */{PLAN}): make one with `bench run --enable qos,mlfq,slru --phase all`"
        )
    return runs


def load(path: str | Path) -> Frames:
    """DataFrames of an arm's folder, a run, or all runs of a results folder."""
    place = Path(path)
    if (place / MANIFEST).is_file():
        records = [load_arm(place)]
    else:
        records = [r for run in find_runs(place) for arm in load_run(run).arms.values() for r in arm]
    if not records:
        raise UserError(f"{place} holds no finished arm yet: run the same `bench run` command again")
    frames = {name: pd.concat([_labelled(r, getattr(r, name)) for r in records]) for name in TABLES}
    gauges = [_labelled(r, found) for r in records if (found := r.gauges) is not None]
    return Frames(**frames, gauges=pd.concat(gauges) if gauges else None)


def parquet_bytes(name: str, table: pa.Table | pd.DataFrame) -> bytes:
    """One table as Parquet bytes; equal content gives equal bytes.

    Raises:
        ValueError: columns are missing, unknown or of a type that does not fit, or a null stands in
            a column that allows none.
    """
    schema = arrow_schema(name)
    columns = set(table.columns) if isinstance(table, pd.DataFrame) else set(table.column_names)
    if columns != set(schema.names):
        odd = sorted(columns ^ set(schema.names))
        raise ValueError(f"table {name}: columns missing or not in the schema: {', '.join(odd)}")
    if isinstance(table, pd.DataFrame):
        arrays = [pa.array(table[f.name], type=f.type, from_pandas=True) for f in schema]
        table = pa.table(arrays, schema=schema)
    else:
        table = table.select(schema.names).cast(schema).combine_chunks()
    for field in schema:
        if not field.nullable and table[field.name].null_count:
            raise ValueError(f"table {name}: column {field.name} holds nulls and allows none")
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        row_group_size=_ROWS_PER_GROUP,
        compression="zstd",
        compression_level=3,
        version="2.6",
        data_page_version="1.0",
        write_statistics=True,
    )
    blob: bytes = sink.getvalue().to_pybytes()
    return blob


def read_json(path: Path) -> Json:
    """A JSON object from a file; UserError where it is absent, damaged or no object."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: name a run's folder, or run `bench run` first") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): delete its folder and run again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object: delete its folder and run again")
    return value


def read_plan(run: Path) -> Json:
    """plan.json of a run; UserError naming the field that is missing or of a wrong type."""
    path = run / PLAN
    return checked(Plan, read_json(path), path, f"delete the folder {run} and run `bench run` again")


def read_manifest(directory: Path) -> Json:
    """manifest.json of an arm and a seed; UserError as `read_plan`."""
    path = directory / MANIFEST
    return checked(Manifest, read_json(path), path, f"delete {directory} and run again")


def read_receipt(directory: Path) -> Json:
    """receipt.json of an arm and a seed; UserError as `read_plan`."""
    path = directory / RECEIPT
    return checked(Receipt, read_json(path), path, f"delete {directory} and run again")


def _read_table(path: Path, name: str) -> pd.DataFrame:
    try:
        table = pq.read_table(path, memory_map=False)
    except (OSError, pa.ArrowException) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{path} is truncated or no Parquet file ({first}): delete {path.parent} and run again"
        ) from None
    schema = arrow_schema(name)
    wanted = schema.names
    for field in schema:
        if field.nullable and field.name not in table.column_names:
            # Written before there was such a column.
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    lacking = [column for column in wanted if column not in table.column_names]
    if lacking:
        raise UserError(
            f"{path} lacks the column {', '.join(lacking)} (written by another version?): "
            f"delete {path.parent} and run again"
        )
    frame: pd.DataFrame = table.select(wanted).to_pandas()
    return frame


def _labelled(record: ArmRecord, table: pd.DataFrame) -> pd.DataFrame:
    frame = table.copy()
    frame.insert(0, "arm", record.arm)
    frame.insert(1, "seed", record.seed)
    return frame


def _write_synced(path: Path, blob: bytes) -> None:
    with path.open("wb") as file:
        file.write(blob)
        file.flush()
        os.fsync(file.fileno())


def _sync_dir(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _disk_message(path: Path, error: OSError) -> str:
    why = (error.strerror or str(error)).lower()
    return f"could not write {path}: {why}; nothing was left there: free some space and run again"
