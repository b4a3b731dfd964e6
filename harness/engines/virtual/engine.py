"""Runs a workload through vLLM's real EngineCore in virtual time."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from harness.engines.flags import EngineFlags
from harness.engines.virtual.account import ENGINE, FRONT_END, LOOP, RECORDING, Account, Spent
from harness.engines.virtual.clock import VirtualClock, vllm_reads
from harness.engines.virtual.config import engine_config, pinned_environment
from harness.engines.virtual.executor import DeviceState, StepTime, VirtualExecutor
from harness.engines.virtual.frontend import FrontEnd
from harness.engines.virtual.gauges import GaugeLog, patch_tables
from harness.engines.virtual.recorder import Recorder
from harness.engines.virtual.transfers import LinkSpeeds
from harness.errors import RunFailed
from patches.kv.tiers import disk_io
from patches.seam import adapter
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
    """What a run leaves behind; real times say nothing of the result.

    Attributes:
        admitted: rows of requests in the order in which they were first admitted.
        usable_blocks: KV blocks of the pool that can hold anything.
        starting_s: how long patches kept the engine from being ready, before its clock began.
        upstream_s: real time in vLLM's schedule and update_from_output, patches' hooks included.
        spent: where all of the real time went.
    """

    tables: dict[str, pa.Table]
    schedule_digest: str
    admitted: tuple[int, ...]
    usable_blocks: int
    steps: int
    virtual_s: float
    starting_s: float
    wall_s: float
    upstream_s: float
    spent: Spent


class VirtualEngine:
    """One engine for one run.

    Args:
        model_dir: folder with the model's config.json.
        flags: engine flags of the arm.
        step_time: step-time model of the profile.
        kv_blocks: KV blocks of the profile's GPU.
        cpu_step_us: CPU time that a step costs before the GPU may begin it.
        slowdown: multiplies every step time (for planted slowdowns and sensitivity).
        links: how fast KV blocks move below the GPU, where the flags let them.

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
        links: LinkSpeeds | None = None,
    ) -> None:
        self._flags = flags
        self.clock = VirtualClock()
        self.device = DeviceState(
            clock=self.clock,
            step_time=step_time,
            kv_blocks=kv_blocks,
            cpu_step_ns=round(cpu_step_us * 1000),
            slowdown=slowdown,
            links=links,
        )
        config = engine_config(model_dir, flags)
        from vllm.v1.engine.core import EngineCore

        bound = type("BoundVirtualExecutor", (VirtualExecutor,), {"device": self.device})
        with ExitStack() as stack:
            stack.enter_context(pinned_environment())
            stack.enter_context(vllm_reads(self.clock))
            # Whatever its executor plays is for this engine alone.
            stack.enter_context(disk_io.play(None))
            # What patches compute before the engine is ready is over when the clock starts.
            self.device.starting = True
            self.core = EngineCore(config, bound, log_stats=False)
            self.device.starting = False

    def run(self, workload: Workload, progress: Progress | None = None) -> VirtualRun:
        """Serve every request to its end, or raise RunFailed if some can never be served."""
        recorder = Recorder(workload, self.device.prefill_progress)
        recorder.watch(self.core.scheduler)
        recorder.gauges = GaugeLog.of(self.core.scheduler)
        recorder.extra_tables = lambda: patch_tables(self.core.scheduler)
        recorder.transfers = self.core.model_executor.transfers
        self.device.on_step = recorder.on_step
        account = self.device.account = Account()
        collecting = gc.isenabled()
        # vLLM frees its objects by reference count; a collection over millions of token ids buys nothing.
        gc.disable()
        try:
            with ExitStack() as stack:
                stack.enter_context(pinned_environment())
                stack.enter_context(vllm_reads(self.clock))
                stack.enter_context(account.watching(self.core.scheduler))
                if adapter.active() is not None:
                    stack.enter_context(account.sampling())
                account.enter(FRONT_END)
                front_end = FrontEnd(self.core, self.device, recorder, workload)
                account.enter(LOOP)
                self._loop(front_end, recorder, progress)
        finally:
            if collecting:
                gc.enable()
        account.enter(RECORDING)
        if recorder.gauges is not None:
            recorder.gauges.sample(self.clock.now_ns)
        tables, digest = recorder.tables(), recorder.schedule_digest()
        spent = account.spent()
        return VirtualRun(
            tables=tables,
            schedule_digest=digest,
            admitted=tuple(recorder.admitted),
            # All but the one that stands for nothing.
            usable_blocks=self.core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1,
            steps=recorder.steps,
            virtual_s=self.clock.now_ns / _NS,
            starting_s=self.device.starting_ns / _NS,
            wall_s=spent.wall_s,
            upstream_s=account.scheduler_and_patches_s,
            spent=spent,
        )

    def _loop(self, front_end: FrontEnd, recorder: Recorder, progress: Progress | None) -> None:
        core, clock = self.core, self.clock
        scheduler, step, enter = core.scheduler, core.step_fn, self.device.account.enter
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
            enter(ENGINE)
            outputs, executed = step()
            enter(RECORDING)
            front_end.receive(outputs)
            enter(LOOP)
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
