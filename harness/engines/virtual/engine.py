"""Runs a workload through vLLM's real EngineCore in virtual time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from harness.engines.flags import EngineFlags
from harness.engines.virtual.clock import VirtualClock, vllm_reads
from harness.engines.virtual.config import engine_config, pinned_environment
from harness.engines.virtual.executor import DeviceState, StepTime, VirtualExecutor
from harness.engines.virtual.frontend import FrontEnd
from harness.engines.virtual.recorder import Recorder
from harness.errors import RunFailed
from workloads.request import Workload

_NS = 1_000_000_000
# Upstream's busy loop sleeps this long when a step scheduled nothing although requests wait.
_IDLE_SLEEP_NS = 1_000_000
# With no arrival left and nothing scheduled for this long, no request will ever be served again.
_NO_PROGRESS_NS = 600 * _NS
_PROGRESS_EVERY_STEPS = 200

Progress = Callable[[float, int], None]


@dataclass(frozen=True, slots=True)
class VirtualRun:
    """What a run leaves behind."""

    tables: dict[str, pa.Table]
    schedule_digest: str
    steps: int
    virtual_s: float
    wall_s: float
    upstream_s: float


class VirtualEngine:
    """One engine for one run.

    Args:
        model_dir: folder with the model's config.json.
        flags: engine flags of the arm.
        step_time: step-time model of the profile.
        kv_blocks: KV blocks of the profile's GPU.
        cpu_step_us: CPU time that a step costs before the GPU may begin it.
        slowdown: multiplies every step time (for planted slowdowns and sensitivity).

    Patches are installed by the caller, before the engine is built.
    """

    def __init__(
        self,
        model_dir: Path,
        flags: EngineFlags,
        step_time: StepTime,
        kv_blocks: int,
        cpu_step_us: float = 0.0,
        slowdown: float = 1.0,
    ) -> None:
        self._flags = flags
        self.clock = VirtualClock()
        self.device = DeviceState(
            clock=self.clock,
            step_time=step_time,
            kv_blocks=kv_blocks,
            cpu_step_ns=round(cpu_step_us * 1000),
            slowdown=slowdown,
        )
        config = engine_config(model_dir, flags)
        from vllm.v1.engine.core import EngineCore

        bound = type("BoundVirtualExecutor", (VirtualExecutor,), {"device": self.device})
        with ExitStack() as stack:
            stack.enter_context(pinned_environment())
            stack.enter_context(vllm_reads(self.clock))
            self.core = EngineCore(config, bound, log_stats=False)

    def run(self, workload: Workload, progress: Progress | None = None) -> VirtualRun:
        """Serve every request to its end, or raise RunFailed if some can never be served."""
        recorder = Recorder(workload, self.device.prefill_progress)
        recorder.watch(self.core.scheduler)
        self.device.on_step = recorder.on_step
        upstream = Stopwatch(self.core.scheduler)
        began = time.perf_counter()
        collecting = gc.isenabled()
        # vLLM frees its objects by reference count; a collection over millions of token ids buys nothing.
        gc.disable()
        try:
            with pinned_environment(), vllm_reads(self.clock):
                front_end = FrontEnd(self.core, self.device, recorder, workload)
                self._loop(front_end, recorder, progress)
        finally:
            if collecting:
                gc.enable()
            upstream.detach()
        return VirtualRun(
            tables=recorder.tables(),
            schedule_digest=recorder.schedule_digest(),
            steps=recorder.steps,
            virtual_s=self.clock.now_ns / _NS,
            wall_s=time.perf_counter() - began,
            upstream_s=upstream.seconds,
        )

    def _loop(self, front_end: FrontEnd, recorder: Recorder, progress: Progress | None) -> None:
        core, clock = self.core, self.clock
        scheduler, step = core.scheduler, core.step_fn
        idle_since_ns: int | None = None
        turns = 0
        while True:
            front_end.deliver()
            if not (core.batch_queue or scheduler.has_requests()):
                upcoming = clock.next_event_ns
                if upcoming is None:
                    return
                clock.advance_to(upcoming)
                continue
            outputs, executed = step()
            front_end.receive(outputs)
            core.post_step(executed)
            if executed:
                idle_since_ns = None
            elif scheduler.has_requests():
                if idle_since_ns is None:
                    idle_since_ns = clock.now_ns
                self._wait(idle_since_ns)
            turns += 1
            if progress is not None and turns % _PROGRESS_EVERY_STEPS == 0:
                progress(clock.now_ns / _NS, recorder.ended)

    def _wait(self, idle_since_ns: int) -> None:
        """Nothing could be scheduled: let time pass as upstream does, unless it is for ever."""
        clock = self.clock
        clock.advance_to(clock.now_ns + _IDLE_SLEEP_NS)
        if clock.next_event_ns is None and clock.now_ns - idle_since_ns > _NO_PROGRESS_NS:
            waiting = len(self.core.scheduler.waiting)
            raise RunFailed(
                f"the scheduler gave no request any tokens for {_NO_PROGRESS_NS // _NS} s of virtual time "
                f"while {waiting} wait; a gate holds them for ever, or one is larger than the KV cache"
            )

    def shutdown(self) -> None:
        """Release the engine."""
        self.core.shutdown()


class Stopwatch:
    """Real time spent inside the scheduler's schedule and update_from_output."""

    def __init__(self, scheduler: Any) -> None:
        self.seconds = 0.0
        self._scheduler = scheduler
        scheduler.schedule = self._timed(scheduler.schedule)
        scheduler.update_from_output = self._timed(scheduler.update_from_output)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        now = time.perf_counter

        def timed(*args: Any) -> Any:
            start = now()
            try:
                return call(*args)
            finally:
                self.seconds += now() - start

        return timed

    def detach(self) -> None:
        del self._scheduler.schedule, self._scheduler.update_from_output
