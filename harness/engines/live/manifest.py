"""manifest.json of a live run's arm and seed."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from harness.cache_limits import limits_of
from harness.engines.live.client.report import ClientReport
from harness.engines.live.prometheus import Metrics
from harness.engines.live.verdict import Evidence
from harness.live_plan import Machine
from harness.plan import RunPlan
from harness.worker import describe_workload, profile_facts, versions
from workloads.request import Workload

# Counters whose growth over the run is kept.
_COUNTERS = (
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:num_preemptions",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
)


def manifest_of(
    plan: RunPlan,
    workload: Workload,
    run: Evidence,
    validity: Mapping[str, Any],
    command: Sequence[str],
    *,
    plan_sha256: str,
    server: Mapping[str, Any],
    host: Mapping[str, Any],
    gpu: Mapping[str, Any],
    emulation: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that is known of the run but its tables; wall time and start are the caller's to add."""
    assert plan.live is not None
    arm, profile = run.arm, plan.profile
    return {
        "schema": 1,
        "arm": arm.name,
        "base": arm.base,
        "seed": workload.seed,
        "engine": plan.engine,
        "versions": versions(),
        "profile": machine_facts(profile) if isinstance(profile, Machine) else profile_facts(profile),
        "workload": describe_workload(plan, workload),
        "plan_sha256": plan_sha256,
        "patch_plan_sha256": arm.plan.sha256() if arm.plan is not None else None,
        "patches": list(arm.patches),
        "knobs": arm.plan.knobs if arm.plan is not None else {},
        "engine_flags": arm.flags.model_dump(),
        "live": plan.live.to_json(),
        "server": dict(server),
        "client": client_facts(run.report),
        "telemetry": telemetry_facts(run),
        "prometheus": prometheus_facts(run.metrics),
        "gpu": dict(gpu),
        **emulation_facts(emulation),
        "host": dict(host),
        "steps": run.telemetry.steps.num_rows,
        **cache_bounds(run),
        "command": list(command),
        "validity": dict(validity),
        "run_facts": {"host": platform.node()},
    }


def cache_bounds(run: Evidence) -> dict[str, Any]:
    """How many hits were to be had; empty where the engine did not tell what it is of."""
    blocks = run.telemetry.engines[0].get("kv_blocks") if run.telemetry.engines else None
    if not blocks or not run.telemetry.steps.num_rows:
        return {}
    found = limits_of(
        run.workload,
        run.tables,
        admitted=None,
        block_tokens=run.arm.flags.block_size,
        # One of them stands for nothing.
        blocks=int(blocks) - 1,
        patches=run.arm.patches,
        tiered=run.arm.flags.offloads,
    )
    return {"cache_bounds": found}


def machine_facts(machine: Machine) -> dict[str, Any]:
    """What stands where a virtual run names its profile."""
    return {
        "name": machine.name,
        "sha256": machine.sha256,
        "gpu": machine.title,
        "calibration": dict(machine.measured),
    }


def emulation_facts(conduct: Mapping[str, Any]) -> dict[str, Any]:
    """How an emulated engine kept the time, and which of its step times rest on no measurement; empty for a real one."""
    if not conduct:
        return {}
    shares = {name: dict(conduct[name]) for name in ("extrapolated", "unmeasured")}
    return {**shares, "emulation": {k: v for k, v in conduct.items() if k not in shares}}


def client_facts(report: ClientReport) -> dict[str, Any]:
    """How late the client was, and what its processes cost."""
    late = {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in asdict(report.lateness).items()
    }
    return {
        **late,
        "client_stall": report.client_stall,
        "workers": [
            {
                name: round(value, 3) if isinstance(value, float) else value
                for name, value in asdict(use).items()
            }
            for use in report.workers
        ],
    }


def telemetry_facts(run: Evidence) -> dict[str, Any]:
    """What the engine's own notes cost, and how they were joined with the client's requests."""
    batches = run.telemetry.batches
    noted = batches["telemetry_us"].to_numpy()
    overhead = run.telemetry.overhead
    engine = run.telemetry.engines[0] if run.telemetry.engines else {}
    return {
        "overhead": None if np.isnan(overhead) else round(overhead, 6),
        "telemetry_us_p50": round(float(np.median(noted)), 2) if len(noted) else None,
        "step_time": engine.get("step_time", ""),
        "kv_blocks": engine.get("kv_blocks"),
        "engines": len(run.telemetry.engines),
        "unseen": len(run.joined.unseen),
        "repeated": len(run.joined.repeated),
        "strangers": len(run.joined.strangers),
        "faults": list(run.telemetry.faults),
    }


def prometheus_facts(metrics: Metrics) -> dict[str, Any]:
    """How far the server's own counters went, and what is wrong with them."""
    return {
        "scrapes": len(metrics.points),
        "errors": list(metrics.errors),
        "faults": [asdict(fault) for fault in metrics.faults],
        "increase": {name: metrics.increase(name) for name in _COUNTERS},
    }
