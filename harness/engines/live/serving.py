"""How a run's server is started: with the model that the user named, or with the profile's device emulated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.engines.emulated import launch as emulated
from harness.plan import RunPlan
from workloads.request import Workload

_EMULATION = "emulation"


def launch_arguments(plan: RunPlan, workload: Workload, scratch: Path) -> dict[str, Any]:
    """Arguments of `server.launch` beside the arm and its folders; `env` is always among them.

    Args:
        scratch: folder that lives as long as the server.
    """
    live = plan.live
    assert live is not None
    if live.emulated:
        return {**emulated.server_for(plan.step_profile, workload, scratch / _EMULATION, plan.assumptions)}
    return {
        "model_dir": live.model,
        "engine_extra": live.engine_extra,
        "kv_cache_bytes": live.kv_cache_bytes,
        "env": {},
    }


def conduct_of(scratch: Path) -> Mapping[str, Any]:
    """How well an emulated engine that has ended kept the time (`emulated.launch.conduct`)."""
    return emulated.conduct(scratch / _EMULATION)
