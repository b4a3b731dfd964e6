"""What telemetry costs a step: `python -m harness.engines.live.telemetry.cost` prints it for some batch sizes.

The real EngineCore runs on the virtual executor, and the processor time of its thread is taken: in all that telemetry
does in a step, and in schedule() and update_from_output() as they are without it. That is all there is to it: no other
thread takes part, and no system call. Every live run says its own cost, too (`Telemetry.overhead`).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import vllm_env

# Steps of a small model on two CPU cores take 20 to 40 ms, of an 8B model on a current GPU about 10 ms.
SHORT_STEP_US = 10_000.0
BATCHES = (1, 32, 256)
_PROMPT, _OUTPUT = 64, 240


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one step, in us: medians, and the 99th percentile of telemetry."""

    batch: int
    scheduler_us: float
    telemetry_us: float
    telemetry_p99_us: float


def measure(batch: int) -> Cost:
    """The cost at a batch of so many decodes."""
    stock = _Spent()
    _serve(batch, stock)
    observed = _Spent()
    with tempfile.TemporaryDirectory() as folder:
        _serve(batch, observed, Path(folder))
    telemetry = sorted(observed.hooks_us())
    return Cost(
        batch,
        statistics.median(stock.calls_us()),
        statistics.median(telemetry),
        telemetry[len(telemetry) * 99 // 100],
    )


def _serve(batch: int, spent: _Spent, folder: Path | None = None) -> None:
    from harness.engines.flags import EngineFlags
    from harness.engines.live.telemetry import hooks
    from harness.engines.virtual.engine import VirtualEngine
    from harness.profiles import model_dir

    observation = None if folder is None else hooks.install(folder)
    try:
        flags = EngineFlags(max_model_len=4096, max_num_seqs=batch, async_scheduling=True)
        engine = VirtualEngine(model_dir("llama-3.1-8b"), flags, _OneStep(), 8192)
        spent.watch(engine.core.scheduler, observation.observers[0] if observation else None)
        engine.run(_workload(batch))
        engine.shutdown()
    finally:
        if observation is not None:
            observation.undo()


class _OneStep:
    def step_us(
        self, prefills: list[tuple[int, int]], n_decode: int, sum_ctx_decode: int, n_sampled: int
    ) -> float:
        """Any time will do: the clock is virtual."""
        return SHORT_STEP_US


class _Spent:
    """Processor time of this thread, from the begin of one scheduling pass to the next."""

    def __init__(self) -> None:
        self._calls_ns: list[int] = []
        self._hooks_ns: list[int] = []

    def watch(self, scheduler: Any, observer: Any) -> None:
        """Time the scheduler's two functions, and what the observer does in them."""
        scheduler.schedule = self._timed(scheduler.schedule, self._calls_ns, begins=True)
        scheduler.update_from_output = self._timed(scheduler.update_from_output, self._calls_ns)
        for name in ("scheduled", "output_ready", "updating", "updated") if observer is not None else ():
            method = self._timed(getattr(observer, name), self._hooks_ns, begins=name == "scheduled")
            setattr(observer, name, method)

    def calls_us(self) -> list[float]:
        """A step's time in the two functions, where everybody decodes."""
        return _middle_us(self._calls_ns)

    def hooks_us(self) -> list[float]:
        """A step's time in the observer, where everybody decodes."""
        return _middle_us(self._hooks_ns)

    @staticmethod
    def _timed(call: Callable[..., Any], steps_ns: list[int], begins: bool = False) -> Callable[..., Any]:
        now = time.thread_time_ns

        def timed(*args: Any) -> Any:
            if begins:
                steps_ns.append(0)
            start = now()
            try:
                return call(*args)
            finally:
                steps_ns[-1] += now() - start

        return timed


def _middle_us(steps_ns: list[int]) -> list[float]:
    return [ns / 1000 for ns in steps_ns[_OUTPUT // 4 : -_OUTPUT // 4]]


def _workload(batch: int) -> Any:
    import numpy as np

    from workloads.request import Phase, PlannedRequest, Tenant, Workload

    tenant = Tenant("one", "gold", "chat", 1, 0, 1000.0, True)
    requests = tuple(
        PlannedRequest(
            index=number,
            request_id=f"r{number}",
            tenant=tenant.name,
            phase=1,
            intended_ns=0,
            prompt=np.arange(number, number + _PROMPT, dtype=np.int32),
            output=np.arange(_OUTPUT, dtype=np.int32),
            segments=(),
            cancel_ns=None,
        )
        for number in range(batch)
    )
    phase = Phase(1, "only", 0, 60_000_000_000, True)
    return Workload("cost", 0, (tenant,), (phase,), requests, sha256="", corpus_sha256="")


def main() -> None:
    """Print a line for each batch size."""
    vllm_env.prepare()
    print("         us a step                                      share of a step of")
    print("decodes  schedule + update  telemetry  telemetry p99       10 ms      30 ms")
    for batch in BATCHES:
        cost = measure(batch)
        shares = "  ".join(f"{cost.telemetry_us / us:9.2%}" for us in (SHORT_STEP_US, 3 * SHORT_STEP_US))
        print(
            f"{batch:7}  {cost.scheduler_us:17.1f}  {cost.telemetry_us:9.1f}  {cost.telemetry_p99_us:13.1f}   {shares}"
        )


if __name__ == "__main__":
    main()
