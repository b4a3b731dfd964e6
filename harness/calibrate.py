"""A profile fitted to a live run: what its engines' telemetry says of each step, as tables that the virtual engine reads.

Only regimes that the run went through are in it: what it never saw is counted as not measured. Every fifth step is
held out, and the error on those is the error of the very tables that are written.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness import step_fit
from harness.atomic import write_text
from harness.calibration_run import (
    BATCHES,
    MANIFEST,
    STEPS,
    Record,
    all_steps,
    between_steps_us,
    plan_and_model,
    read_records,
)
from harness.errors import RunFailed, UserError
from harness.link_speeds import measured_links
from harness.papers import Json
from harness.profiles import Profile, load_profile
from harness.profiles.shape import ModelShape
from harness.profiles.thin import dump, rounded
from harness.step_fit import KINDS, Fit, Kind, Steps
from harness.step_tables import HeldOut, domain_of, held_out, tables_of
from harness.toml_text import toml_text

# One step in so many is kept out of the fit.
HELD_OUT = 5


@dataclass(frozen=True, slots=True)
class Calibration:
    """A profile that was written, and how good it is.

    Attributes:
        fitted: steps that each regime was fitted to; a regime that is not in it was not seen often enough.
        held_out: by regime, and `all`.
        cpu_step_us: time between steps, us.
    """

    profile: Profile
    fitted: Mapping[str, int]
    held_out: Mapping[str, HeldOut]
    cpu_step_us: float
    records: int


def calibrate(run: Path, out: Path, arms: Sequence[str] = ()) -> Calibration:
    """Fit a profile to a live run and write it to `out`.

    Args:
        run: folder of a live run, or of one arm and seed of it.
        arms: only these; all by default.

    Raises:
        UserError: it is no live run, or has no such arm, or `out` cannot be written.
        RunFailed: its steps do not suffice.
    """
    records = read_records(run, arms)
    plan, model = plan_and_model(run, records[0])
    steps = all_steps(records)
    held = np.arange(len(steps)) % HELD_OUT == HELD_OUT - 1
    train = steps.where(~held)
    fits = step_fit.fit_all(train)
    if not {"decode", "prefill"} <= fits.keys():
        seen = ", ".join(f"{int(train.of(kind).sum())} {kind}" for kind in KINDS)
        raise RunFailed(
            f"{run}: too few steps to fit ({seen}; at least {step_fit.FEWEST} with decodes alone and as many with a "
            "prefill are needed); calibrate on a longer run"
        )
    cpu_step_us = rounded(between_steps_us(records))
    shape = ModelShape.from_config(json.loads(model.read_text(encoding="utf-8")), str(model))
    domain = domain_of(train, "mixed" in fits)
    tables = tables_of(fits, train, domain, shape.layers)
    raw = _profile(run, plan, records, fits, train, domain, shape, cpu_step_us)
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(model, out / "config.json")
    write_text(out / "tables.json", dump(tables))
    write_text(out / "profile.toml", toml_text(raw))
    errors = held_out(load_profile(str(out)), steps.where(held))
    raw["error"] = {
        "step_median_pct": errors["all"].median_pct,
        "step_p90_pct": errors["all"].p90_pct,
        "step_bias_pct": errors["all"].bias_pct,
        "rows": f"{errors['all'].rows} steps of the run that it was fitted to, one in {HELD_OUT}, held out",
    }
    if "mixed" in errors:
        raw["error"]["mixed_median_pct"] = errors["mixed"].median_pct
    write_text(out / "profile.toml", toml_text(raw))
    return Calibration(
        profile=load_profile(str(out)),
        fitted={str(kind): one.steps for kind, one in fits.items()},
        held_out=errors,
        cpu_step_us=cpu_step_us,
        records=len(records),
    )


def _profile(
    run: Path,
    plan: Json,
    records: Sequence[Record],
    fits: Mapping[Kind, Fit],
    steps: Steps,
    domain: Mapping[str, int],
    shape: ModelShape,
    cpu_step_us: float,
) -> dict[str, Any]:
    first = records[0].manifest
    host, machine = first["host"], plan.get("machine", {})
    served = str(plan.get("live", {}).get("model_name") or Path(plan["model_path"]).name)
    missing = [] if "mixed" in fits else ["mixed"]
    if fits["prefill"].steps < step_fit.FEWEST:
        missing.append("prefill")
    if not steps.deepest.any():
        missing.append("context")
    overlapped = records[0].overlapped
    flags = {r.manifest["base"]: r.manifest["engine_flags"] for r in records if not r.manifest.get("patches")}
    stock = dict(flags.get("stock") or flags.get("tuned") or first["engine_flags"])
    tuned = {k: v for k, v in (flags.get("tuned") or {}).items() if v != stock.get(k) and v is not None}
    stock = {k: v for k, v in stock.items() if v is not None} | {"async_scheduling": overlapped}
    tuned.pop("async_scheduling", None)
    kv_blocks = first["telemetry"].get("kv_blocks")
    if not isinstance(kv_blocks, int):
        raise UserError(f"{records[0].folder / MANIFEST}: telemetry.kv_blocks is missing; run this arm again")
    raw: dict[str, Any] = {
        "name": f"cpu/{_plain(served)}",
        "gpu": f"{host.get('cpu', 'CPU')}, {host.get('cores', '?')} cores",
        "device_names": [],
        "model": served,
        "model_names": [],
        "measured": True,
        "not_measured": missing,
        "dtype": "float32",
        "layers": shape.layers,
        "block_size": int(stock["block_size"]),
        "max_model_len": int(stock["max_model_len"]),
        "max_capture": 0,
        "cpu_step_us": cpu_step_us,
        "memory": {
            "device_bytes": int(host.get("memory_bytes", 1)),
            "utilization": 1.0,
            "kv_blocks": kv_blocks,
            "kv_blocks_from": "recorded",
            "kv_blocks_how": "what the run's engine said; the memory is the host's",
        },
        "domain": dict(domain),
        "transfers": measured_links(),
        "stock": stock,
        "source": {
            "project": "bench calibrate",
            "revision": str(plan.get("sha256", ""))[:12] or run.name,
            "files": [STEPS, BATCHES],
            "measured_with": f"vLLM {first.get('versions', {}).get('vllm', '?')}, float32, {len(records)} servers",
            "licence": "none",
            "notice": "Measured on this machine; nobody else's tables are in it.",
        },
    }
    if tuned:
        raw["tuned"] = {"comment": f"as in {run.name}", **tuned}
    if machine.get("five_phase", {}).get("comment"):
        raw["five_phase"] = machine["five_phase"]
    return raw


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.+_-]", "-", name.lower()) or "model"
