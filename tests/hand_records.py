"""Records made by hand: a few requests with exactly the times that a case names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.atomic import write_json
from harness.metrics.evaluate import evaluate
from harness.metrics.pool import pool_of
from harness.metrics.scope import Scope
from harness.records import ArmRecord, arm_dir, load_arm, write_arm
from harness.schema import TABLES
from harness.stats.bootstrap import Estimate, Weights

MS = 1_000_000
S = 1000 * MS


def request(intended_ms: float = 0.0, **values: Any) -> dict[str, Any]:
    """One row; times are given as `<what>_ms` from the run's start, `chunks` as (ms, tokens) pairs."""
    row: dict[str, Any] = {
        "tenant": "gold-a",
        "tier": "gold",
        "kind": "chat",
        "phase": 1,
        "short": True,
        "measured": True,
        "weight": 4,
        "slo_ttft_ms": 1000.0,
        "prompt_tokens": 100,
        "prompt_tokens_counted": 100,
        "cached_tokens": 0,
        "preemptions": 0,
        "recomputed_tokens": 0,
        "status": "ok",
        "reason": "",
        "intended_ns": round(intended_ms * MS),
        "sent_ns": round(intended_ms * MS),
    }
    chunks = values.pop("chunks", ())
    row["chunks"] = [(round(at * MS), tokens) for at, tokens in chunks]
    if chunks:
        row["scheduled_ns"] = row["intended_ns"]
        row["first_token_ns"] = row["first_output_ns"] = row["chunks"][0][0]
        row["last_token_ns"] = row["end_ns"] = row["chunks"][-1][0]
    for name, value in values.items():
        column = f"{name.removesuffix('_ms')}_ns"
        if name.endswith("_ms") and name != "slo_ttft_ms":
            row[column] = None if value is None else round(value * MS)
        else:
            row[name] = value
    return row


def tables_of(
    requests: Sequence[dict[str, Any]],
    steps: Sequence[dict[str, Any]] = (),
    events: Sequence[dict[str, Any]] = (),
) -> dict[str, pd.DataFrame]:
    """The four tables of these requests."""
    rows = []
    tokens = []
    for number, given in enumerate(requests):
        row = dict(given)
        chunks = row.pop("chunks")
        got = sum(count for _, count in chunks)
        row.setdefault("request_id", f"r{number}")
        row.setdefault("output_tokens", got)
        row.setdefault("output_tokens_planned", max(got, 1))
        row.setdefault("first_chunk_tokens", chunks[0][1] if chunks else 0)
        rows.append(row)
        times = [at for at, count in chunks for _ in range(count)]
        tokens += [{"request": number, "index": i, "t_ns": at} for i, at in enumerate(times)]
    given_rows = {"requests": rows, "tokens": tokens, "steps": list(steps), "events": list(events)}
    frames = {}
    for name, columns in TABLES.items():
        frame = pd.DataFrame(given_rows[name], columns=[c.name for c in columns])
        for column in columns:
            if name in ("steps", "events") and not column.nullable:
                blank: Any = "" if column.type == "string" else 0
                frame[column.name] = [blank if pd.isna(v) else v for v in frame[column.name]]
        frames[name] = frame
    return frames


def papers(arm: str = "stock", seed: int = 0, window_s: float = 60.0, **values: Any) -> tuple[Any, Any]:
    """Manifest and receipt; `phases`, `patches`, `hooks`, `metrics` and `plan_sha256` may be given."""
    patches = values.get("patches", [])
    phases = values.get("phases") or [(1, 0.0, window_s)]
    manifest = {
        "schema": 1,
        "arm": arm,
        "seed": seed,
        "workload": {
            "sha256": f"trace-{seed}",
            "tenants": [
                {"name": name, "tier": tier}
                for name, tier in (("gold-a", "gold"), ("silver-0", "silver"), ("bronze-0", "bronze"))
            ],
            "phases": [
                {"number": n, "name": "", "start_ns": round(a * S), "end_ns": round(b * S), "measured": True}
                for n, a, b in phases
            ],
        },
        "patches": patches,
        "knobs": {},
        "plan_sha256": "plan",
        "patch_plan_sha256": "plan",
        "schedule_digest": "00",
        "virtual_s": window_s,
        "validity": values.get("validity", {"valid": True, "reasons": []}),
        "run_facts": {"wall_s": 1.0, "host": "here", "started": "2026-01-01"},
    }
    receipt = {
        "schema": 1,
        "plan_sha256": values.get("plan_sha256", "plan"),
        "hooks": values.get("hooks", {patch: {"hits": 7} for patch in patches}),
        "metrics": values.get("metrics", {}),
    }
    return manifest, receipt


def record(
    folder: Path,
    requests: Sequence[dict[str, Any]],
    *,
    steps: Sequence[dict[str, Any]] = (),
    events: Sequence[dict[str, Any]] = (),
    **values: Any,
) -> ArmRecord:
    """Write one arm and seed under `folder` and read it back."""
    manifest, receipt = papers(**values)
    place = arm_dir(folder, manifest["arm"], manifest["seed"])
    write_arm(place, tables_of(requests, steps, events), manifest, receipt)
    return load_arm(place)


def plan(folder: Path, arms: dict[str, list[str]], seeds: Sequence[int] = (0,)) -> Path:
    """Write a plan that names these arms and their patches."""
    entries = [{"name": name, "base": "stock", "patches": p, "knobs": {}} for name, p in arms.items()]
    write_json(folder / "plan.json", {"schema": 1, "run": folder.name, "seeds": list(seeds), "arms": entries})
    return folder


def figures(one: ArmRecord, scope: Scope | None = None) -> dict[str, Estimate]:
    """All metrics of one record in a scope."""
    pool = pool_of([one])
    where = scope or Scope()
    return dict(evaluate(pool, Weights.of(pool.grid, 50), [where])[where])


def value(one: ArmRecord, metric: str, scope: Scope | None = None) -> float | None:
    """One metric's value."""
    return figures(one, scope)[metric].value
