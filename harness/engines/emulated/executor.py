"""The virtual engine's executor on the real clock: a step's output is there when its time is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from harness.atomic import write_json
from harness.engines.emulated.clock import WallClock
from harness.engines.emulated.gpu_config import keep_async_scheduling, pin_engine
from harness.engines.emulated.outputs import PlannedOutputs
from harness.engines.emulated.settings import from_environment
from harness.engines.live.telemetry.join import client_id
from harness.engines.virtual.executor import DeviceState, VirtualExecutor
from harness.profiles.model import StepTimeModel, outside_shares, unmeasured_shares


class EmulatedExecutor(VirtualExecutor):
    """Named to vLLM as `--distributed-executor-backend`; built in the engine's process, told by the environment.

    The processor time between steps is spent for real here, so the profile's `cpu_step_us` is not added.
    """

    def _init_executor(self) -> None:
        keep_async_scheduling()
        pin_engine()
        told = from_environment()
        scheduler, profile = self.vllm_config.scheduler_config, told.profile()
        self._step_time = StepTimeModel(
            profile,
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            mixed_penalty=told.mixed_penalty,
        )
        self._wall = WallClock()
        self._outputs = PlannedOutputs(Path(told.outputs))
        self._conduct = Path(told.conduct)
        self.device = DeviceState(
            clock=self._wall,
            step_time=self._step_time,
            kv_blocks=told.kv_blocks,
            slowdown=told.slowdown,
            links=profile.transfers,
        )
        super()._init_executor()

    def _true_output(self, new: Any) -> list[int]:
        return self._outputs.tokens(client_id(new.req_id), new.sampling_params.max_tokens)

    def shutdown(self) -> None:
        """Say how well the time was kept."""
        super().shutdown()
        write_json(
            self._conduct,
            {
                "steps": self._step_time.steps,
                "late_ms": late_ms(self._wall),
                "unknown_requests": self._outputs.unknown,
                "extrapolated": dict(outside_shares(self._step_time)),
                "unmeasured": dict(unmeasured_shares(self._step_time)),
            },
        )


def late_ms(clock: WallClock) -> dict[str, float]:
    """How much later than due the engine took its steps' outputs: percentiles, ms; empty without a step."""
    late = np.asarray(clock.late_ns, np.float64) / 1e6
    if not len(late):
        return {}
    p50, p99 = np.percentile(late, (50, 99))
    return {"p50": round(float(p50), 4), "p99": round(float(p99), 4), "max": round(float(late.max()), 4)}
