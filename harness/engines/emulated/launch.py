"""What a live run passes to `harness.engines.live.server.launch` so that the server's device is an emulated one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from harness.assumptions import BASE, Assumptions
from harness.engines.emulated.outputs import write_outputs
from harness.engines.emulated.settings import EMULATION_ENV, Emulation
from harness.profiles import Profile
from workloads.request import Workload

MODULE = "harness.engines.emulated.serve"
EXECUTOR = "harness.engines.emulated.executor.EmulatedExecutor"
# As the virtual engine has it (`harness.engines.virtual.config`); the model's folder holds no more than a config.json.
WORDS = (
    f"--distributed-executor-backend={EXECUTOR}",
    "--skip-tokenizer-init",
    "--load-format=dummy",
    "--dtype=bfloat16",
)
_CONDUCT = "emulation-conduct.json"


class LaunchArguments(TypedDict):
    """Arguments of `launch` beside the arm, its folders and its port."""

    model_dir: Path
    module: str
    env: dict[str, str]
    engine_extra: tuple[str, ...]


def server_for(
    profile: Profile, workload: Workload, scratch: Path, assumed: Assumptions = BASE
) -> LaunchArguments:
    """Write what the engine's process will read, and say how it is started; the same for every arm.

    Args:
        profile: its step times, KV blocks and the shape of its model.
        workload: its requests produce their true outputs; others get a fixed sequence.
        scratch: folder that lives as long as the server.
        assumed: its `cpu_step_us` means nothing here: that time is spent for real.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    outputs, told = scratch / "outputs.arrow", scratch / "emulation.json"
    write_outputs(workload.requests, outputs)
    Emulation(
        profile_ref=profile.ref.to_json(),
        profile_sha256=profile.sha256,
        kv_blocks=profile.kv_blocks if assumed.kv_blocks is None else assumed.kv_blocks,
        outputs=str(outputs.resolve()),
        conduct=str((scratch / _CONDUCT).resolve()),
        slowdown=1 / assumed.efficiency,
        mixed_penalty=assumed.mixed_penalty,
    ).write(told)
    return {
        "model_dir": profile.model_dir,
        "module": MODULE,
        "env": {EMULATION_ENV: str(told.resolve())},
        "engine_extra": WORDS,
    }


def conduct(scratch: Path) -> Mapping[str, Any]:
    """How well the engine kept the time, as it said at its end; empty where it was killed before.

    Keys: `steps`, `late_ms` (how much later than due it took a step's output: p50, p99, max), `unknown_requests`,
    and `extrapolated` and `unmeasured`, the shares of steps as in a virtual run's manifest.
    """
    try:
        said: dict[str, Any] = json.loads((scratch / _CONDUCT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return said
