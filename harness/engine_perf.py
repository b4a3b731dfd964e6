"""Where the real time of the virtual engine goes, on a fixed overload that keeps every seat taken.

Requests of three tenants, with a prefix for each, arrive at once and wait for seats; so the engine runs
full until the queue is empty. Counts are fixed and the trace is seeded: two calls do the same work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.arms import Arm
from harness.engines.virtual.account import Spent
from harness.engines.virtual.engine import Progress, VirtualEngine
from harness.engines.virtual.executor import StepTime
from harness.profiles import Profile, StepTimeModel
from workloads.request import Phase, PlannedRequest, Tenant, Workload

_TENANTS = (
    Tenant("gold-a", "gold", "chat", 4, 0, 200.0, True),
    Tenant("silver-0", "silver", "chat", 2, 1, 500.0, True),
    Tenant("bronze-0", "bronze", "rag", 1, 2, 3000.0, False),
)
_PREFIX_TOKENS = 128
_PROMPT_TOKENS = (64, 512)
_OUTPUT_TOKENS = (32, 256)
_REQUESTS_A_SEAT = 5
_LOOK_UPS = 2000

Batch = tuple[list[tuple[int, int]], int, int, int]


@dataclass(frozen=True, slots=True)
class EnginePerf:
    """One arm on the fixed overload.

    Attributes:
        steps: engine steps.
        running: running requests, averaged over the steps.
        virtual_s: virtual time that passed.
        look_up_us: the profile's answer for one step, median over steps with a full batch.
        spent: real time by who spent it.
    """

    arm: str
    steps: int
    running: float
    virtual_s: float
    look_up_us: float
    spent: Spent

    @property
    def ratio(self) -> float:
        """All real time over that of vLLM's own schedule and update."""
        return self.spent.wall_s / self.spent.scheduler_s

    @property
    def own_share(self) -> float:
        """Share of the real time that is neither vLLM's nor the patches'."""
        return self.spent.own_s / self.spent.wall_s

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return {
            "arm": self.arm,
            "steps": self.steps,
            "running": self.running,
            "virtual_s": self.virtual_s,
            "look_up_us": self.look_up_us,
            "ratio": self.ratio,
            "own_share": self.own_share,
            "spent": self.spent.to_json(),
        }


class _Noted:
    """A profile that remembers what it was asked."""

    def __init__(self, model: StepTime) -> None:
        self._model = model
        self.batches: list[Batch] = []

    def step_us(
        self, prefills: list[tuple[int, int]], n_decode: int, sum_ctx_decode: int, n_sampled: int
    ) -> float:
        self.batches.append((prefills, n_decode, sum_ctx_decode, n_sampled))
        return self._model.step_us(prefills, n_decode, sum_ctx_decode, n_sampled)


def overload(running: int, seed: int = 0) -> Workload:
    """Enough requests to keep `running` seats taken for several hundred steps."""
    rng = np.random.default_rng(seed)
    prefixes = [rng.integers(0, 30_000, _PREFIX_TOKENS).astype(np.int32) for _ in _TENANTS]

    def request(i: int) -> PlannedRequest:
        own = rng.integers(0, 30_000, int(rng.integers(*_PROMPT_TOKENS))).astype(np.int32)
        return PlannedRequest(
            index=i,
            request_id=f"perf-{i}",
            tenant=_TENANTS[i % len(_TENANTS)].name,
            phase=1,
            intended_ns=1000 * i,
            prompt=np.concatenate([prefixes[i % len(_TENANTS)], own]),
            output=rng.integers(0, 30_000, int(rng.integers(*_OUTPUT_TOKENS))).astype(np.int32),
            segments=(),
        )

    requests = tuple(request(i) for i in range(_REQUESTS_A_SEAT * running))
    phases = (Phase(1, "overload", 0, 1_000_000_000, True),)
    return Workload("perf", seed, _TENANTS, phases, requests, "", "")


def measure(arm: Arm, profile: Profile, running: int, progress: Progress | None = None) -> EnginePerf:
    """Run the overload under this arm; its `max_num_seqs` is the number of seats."""
    model = StepTimeModel(profile, arm.flags.max_num_seqs, arm.flags.max_num_batched_tokens)
    noted = _Noted(model)
    with ExitStack() as stack:
        if arm.plan is not None:
            from patches.seam.adapter import install

            stack.callback(install(arm.plan).undo)
        engine = VirtualEngine(
            profile.model_dir, arm.flags, noted, profile.kv_blocks, cpu_step_us=profile.cpu_step_us
        )
        stack.callback(engine.shutdown)
        run = engine.run(overload(running), progress)
    seats = run.tables["steps"].column("running").to_numpy()
    full = [batch for batch in noted.batches if batch[3] >= 0.9 * max(b[3] for b in noted.batches)]
    return EnginePerf(
        arm=arm.name,
        steps=run.steps,
        running=float(seats.mean()),
        virtual_s=run.virtual_s,
        look_up_us=_look_up_us(model.step_us, full[:_LOOK_UPS]),
        spent=run.spent,
    )


def _look_up_us(step_us: Callable[..., float], batches: list[Batch]) -> float:
    times_ns = []
    for batch in batches:
        began = time.perf_counter_ns()
        step_us(*batch)
        times_ns.append(time.perf_counter_ns() - began)
    return statistics.median(times_ns) / 1000
