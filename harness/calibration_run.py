"""Reads of a live run what a profile can be fitted to: the steps of its engines, and what they were."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import UserError
from harness.papers import Json
from harness.step_fit import Steps, steps_of

BATCHES, STEPS, MANIFEST = "batches.parquet", "steps.parquet", "manifest.json"
# How telemetry calls it when a step is scheduled while the one before is computed.
_OVERLAPPED = "completion to completion"


@dataclass(frozen=True, slots=True)
class Record:
    """What one arm and seed of a live run left of its steps."""

    folder: Path
    manifest: Json
    steps: pa.Table
    batches: pa.Table

    @property
    def overlapped(self) -> bool:
        """Whether scheduling was asynchronous."""
        return self.manifest["telemetry"].get("step_time") == _OVERLAPPED


def read_records(run: Path, arms: Sequence[str]) -> list[Record]:
    """The records of a run, or the one in a folder; UserError where it is no live run, or has no such arm."""
    folders = (
        [run]
        if (run / BATCHES).is_file()
        else sorted(path.parent for path in run.glob(f"*/seed-*/{BATCHES}"))
    )
    if not folders:
        raise UserError(f"{run}: no {BATCHES} in it; give the folder of a run with --engine live")
    known = sorted({_manifest(folder)["arm"] for folder in folders})
    for name in arms:
        if name not in known:
            raise UserError(f"--arm {name}: the run has {', '.join(known)}")
    records = []
    for folder in folders:
        manifest = _manifest(folder)
        if not arms or manifest["arm"] in arms:
            tables = (pq.read_table(folder / name) for name in (STEPS, BATCHES))
            records.append(Record(folder, manifest, *tables))
    return records


def _manifest(folder: Path) -> Json:
    try:
        found: Json = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if not {"arm", "engine_flags", "telemetry", "host"} <= found.keys():
            raise ValueError("it is not of a live run")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{folder / MANIFEST}: not readable ({error}); run this arm again") from None
    return found


def plan_and_model(run: Path, record: Record) -> tuple[Json, Path]:
    """The run's plan, and the config.json of the model that it served."""
    path = next((p / "plan.json" for p in (run, *record.folder.parents) if (p / "plan.json").is_file()), None)
    if path is None:
        raise UserError(f"{run}: no plan.json beside its arms; give the whole folder of the run")
    plan: Json = json.loads(path.read_text(encoding="utf-8"))
    config = Path(str(plan.get("model_path", ""))) / "config.json"
    if "model_path" not in plan or not config.is_file():
        raise UserError(
            f"{path}: the model's folder ({plan.get('model_path', 'not named')}) is not there any more"
        )
    return plan, config


def all_steps(records: Sequence[Record]) -> Steps:
    """The steps of all of them, one record after the other."""
    parts = [steps_of(record.steps, record.batches) for record in records]
    return Steps(*(np.concatenate([getattr(part, name) for part in parts]) for name in Steps.__slots__))


def between_steps_us(records: Sequence[Record]) -> float:
    """Mean time between a step's end and the next one's scheduling, where the next followed at once, us.

    0 where steps overlap it: then it is in the steps' own times.
    """
    gaps = []
    for record in records:
        if record.overlapped:
            continue
        begin, took = record.steps["t_ns"].to_numpy() / 1000, record.batches["step_us"].to_numpy()
        gap = np.diff(begin) - took[:-1]
        # A longer pause is that of an engine without work.
        gaps.append(gap[(gap >= 0) & (gap < took[:-1]) & (record.steps["running"].to_numpy()[:-1] > 0)])
    every = np.concatenate(gaps) if gaps else np.zeros(0)
    return float(np.mean(every)) if len(every) else 0.0
