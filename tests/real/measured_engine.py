"""vLLM's own engine loop with the real CPU worker, on a clock that moves by what each step took.

Nothing of the virtual engine runs here but its clock. The loop is upstream's `run_busy_loop`, fed
through its input and abort queues as its socket thread would; the model really runs, is timed, and
the clock then moves by that time. So the step times of a run are measured and yet the run has one
exact timeline, which another engine can be asked to repeat.

The runner's asynchronous mode needs CUDA streams. Under an asynchronous scheduler the worker here
computes a step at once, when it is submitted, and keeps its sampled tokens as the next step's input;
the scheduler is shown the result only when its turn comes, as it would be on a GPU.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from harness.engines.flags import EngineFlags
from harness.engines.virtual.clock import VirtualClock, vllm_reads
from harness.engines.virtual.config import pinned_environment
from tests.real.schedule_tap import Record, tap
from workloads.request import PlannedRequest, Workload

_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


@dataclass(frozen=True)
class MeasuredStep:
    """One step of the real worker: what it took, and (tokens, tokens before them) of each request in it."""

    ns: int
    rows: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MeasuredRun:
    """What the scheduler did, the steps in the order in which the worker ran them, and what patches counted."""

    record: Record
    steps: tuple[MeasuredStep, ...]
    hooks: dict[str, Any] = field(default_factory=dict)


class _TraceEnded(Exception):
    """No request is left and none will come."""


class _Inbox(queue.Queue[Any]):
    """Upstream waits on this queue when it has nothing to do; waiting moves the clock."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        while self.empty():
            upcoming = self._clock.next_event_ns
            if upcoming is None:
                raise _TraceEnded
            self._clock.advance_to(upcoming)
        return super().get(block=False)


class _Outbox(queue.Queue[Any]):
    """Where upstream puts outputs; the clients have read them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: set[str] = set()

    def put_nowait(self, item: Any) -> None:
        for output in item[1].outputs:
            if output.finish_reason is not None:
                self.ended.add(output.request_id)


class _Result(Future):  # type: ignore[type-arg]
    """A step's result, to be had when the device has ended the step."""

    def __init__(self, clock: VirtualClock, end_ns: int, output: Any) -> None:
        super().__init__()
        self._clock, self._end_ns = clock, end_ns
        self.set_result(output)

    def result(self, timeout: float | None = None) -> Any:
        self._clock.advance_to(self._end_ns)
        return super().result(timeout)


class MeasuredExecutor(UniProcExecutor):
    """The real worker; subclass it with a `clock` and `async_scheduling`."""

    clock: VirtualClock
    async_scheduling: bool
    measured: list[MeasuredStep]

    def _init_executor(self) -> None:
        # Only V1's runner works without Triton; the scheduler is told otherwise where a GPU would be.
        told = os.environ[_RUNNER]
        os.environ[_RUNNER] = "0"
        try:
            super()._init_executor()
        finally:
            os.environ[_RUNNER] = told
        # From here on it is the scheduler's: the runner was built synchronous.
        self.vllm_config.scheduler_config.async_scheduling = self.async_scheduling
        self._free_ns = 0
        self._seen: set[str] = set()

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        self._seen -= scheduler_output.finished_req_ids
        self._output = self._for_v1_runner(scheduler_output)
        began = time.perf_counter_ns()
        answer = self.driver_worker.execute_model(self._output)
        self._spent_ns = time.perf_counter_ns() - began
        if not scheduler_output.total_num_scheduled_tokens:
            assert answer.req_ids == EMPTY_MODEL_RUNNER_OUTPUT.req_ids
        future: Any = Future()
        future.set_result(answer)
        return future if non_block else answer

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        rows = self._rows()
        began = time.perf_counter_ns()
        answer = self.driver_worker.sample_tokens(grammar_output)
        took_ns = self._spent_ns + time.perf_counter_ns() - began
        self.measured.append(MeasuredStep(took_ns, rows))
        self._free_ns = max(self.clock.now_ns, self._free_ns) + took_ns
        future = _Result(self.clock, self._free_ns, answer)
        return future if non_block else future.result()

    def _rows(self) -> tuple[tuple[int, int], ...]:
        batch = self.driver_worker.model_runner.input_batch
        scheduled = self._output.num_scheduled_tokens
        rows = [
            (scheduled[rid], int(batch.num_computed_tokens_cpu[i])) for i, rid in enumerate(batch.req_ids)
        ]
        return tuple(sorted(rows))

    def _for_v1_runner(self, so: Any) -> Any:
        """The same step in V1's words: there a resumed request is a cached one, in V2's a new one."""
        resumed = [new for new in so.scheduled_new_reqs if new.req_id in self._seen]
        self._seen.update(new.req_id for new in so.scheduled_new_reqs)
        if not resumed:
            return so
        cached = so.scheduled_cached_reqs
        ids = [new.req_id for new in resumed]
        return replace(
            so,
            scheduled_new_reqs=[new for new in so.scheduled_new_reqs if new.req_id not in ids],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=[*cached.req_ids, *ids],
                resumed_req_ids={*cached.resumed_req_ids, *ids},
                new_token_ids=cached.new_token_ids,
                all_token_ids=cached.all_token_ids | {n.req_id: list(n.prefill_token_ids) for n in resumed},
                new_block_ids=[*cached.new_block_ids, *(n.block_ids for n in resumed)],
                num_computed_tokens=[*cached.num_computed_tokens, *(n.num_computed_tokens for n in resumed)],
                num_output_tokens=[
                    *cached.num_output_tokens,
                    *(len(n.prefill_token_ids) - len(n.prompt_token_ids) for n in resumed),
                ],
            ),
        )


class _Loop(EngineCoreProc):
    """Upstream's engine process without its process and sockets."""

    def __init__(self, config: Any, executor: type[MeasuredExecutor], clock: VirtualClock) -> None:
        self.input_queue, self.output_queue = _Inbox(clock), _Outbox()
        self.engine_index = 0
        self.engines_running = self.publish_dp_lb_stats = self.enable_fault_tolerance = False
        self.process_input_queue_block = True
        self.shutdown_state = EngineShutdownState.RUNNING
        EngineCore.__init__(self, config, executor, log_stats=False)


class MeasuredEngine:
    """A real engine for one run."""

    def __init__(self, core: _Loop, clock: VirtualClock, measured: list[MeasuredStep]) -> None:
        self._core, self._clock, self._measured = core, clock, measured

    def run(self, workload: Workload) -> MeasuredRun:
        """Serve the trace to its end."""
        record = tap(self._core.scheduler, lambda: self._clock.now_ns)
        for planned in workload.requests:
            self._clock.at(planned.intended_ns, self._sender(planned, workload))
            if planned.cancel_ns is not None:
                self._clock.at(planned.cancel_ns, self._canceller(planned.request_id))
        try:
            self._core.run_busy_loop()
        except _TraceEnded:
            return MeasuredRun(record, tuple(self._measured))
        raise AssertionError("upstream's loop ended by itself")

    def _sender(self, planned: PlannedRequest, workload: Workload) -> Callable[[], None]:
        tenant = workload.tenant(planned.tenant)

        def send() -> None:
            request = EngineCoreRequest(
                request_id=planned.request_id,
                prompt_token_ids=planned.prompt.tolist(),
                mm_features=None,
                sampling_params=SamplingParams(
                    max_tokens=len(planned.output),
                    ignore_eos=True,
                    temperature=0.0,
                    extra_args={"tenant": tenant.name, "tier": tenant.tier, "weight": tenant.weight},
                ),
                pooling_params=None,
                arrival_time=self._clock.seconds(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
                priority=tenant.priority,
            )
            ready = self._core.preprocess_add_request(request)
            self._core.input_queue.put_nowait((EngineCoreRequestType.ADD, ready))

        return send

    def _canceller(self, request_id: str) -> Callable[[], None]:
        def cancel() -> None:
            if request_id not in self._core.output_queue.ended:
                self._core.aborts_queue.put_nowait([request_id])
                self._core.input_queue.put_nowait((EngineCoreRequestType.ABORT, [request_id]))

        return cancel


@contextmanager
def measured_engine(model: Path, flags: EngineFlags, blocks: int) -> Iterator[MeasuredEngine]:
    """A real engine under these flags with a KV cache of `blocks`."""
    from vllm import envs

    values = flags.model_dump()
    async_scheduling = values.pop("async_scheduling")
    envs.disable_envs_cache()
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        num_gpu_blocks_override=blocks,
        # No profiling of the host memory: it depends on what else runs.
        kv_cache_memory_bytes=64 * 2**20,
        **values,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = False
    clock = VirtualClock()
    measured: list[MeasuredStep] = []
    executor = type(
        "Bound",
        (MeasuredExecutor,),
        {"clock": clock, "async_scheduling": async_scheduling, "measured": measured},
    )
    with ExitStack() as stack:
        stack.enter_context(pinned_environment())
        stack.enter_context(vllm_reads(clock))
        core = _Loop(config, executor, clock)
        stack.callback(core.shutdown)
        yield MeasuredEngine(core, clock, measured)
