"""Guards that the virtual engine schedules exactly as an engine that really runs a model.

A trace is served by vLLM's own engine loop with the real CPU worker, each step timed. The virtual
engine then gets the same trace and those step times, and every scheduling pass must be equal: clock,
(request, tokens), prefix hits, KV blocks, preemptions; and every token that a client got.

Does not guard the step times themselves (bench validate does), host time between steps (a virtual run
charges `cpu_step_us` for it), Model Runner V2 and the asynchronous copies of the GPU worker (neither
runs without Triton or CUDA), and queue limits, which are decided before the engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.engines.flags import EngineFlags
from harness.engines.virtual import config
from harness.engines.virtual.engine import VirtualEngine, VirtualRun
from patches.seam.adapter import install
from patches.seam.plan import resolve
from tests.real.conftest import BLOCK_SIZE, MAX_MODEL_LEN
from tests.real.measured_engine import MeasuredRun, MeasuredStep, measured_engine
from tests.real.schedule_tap import Record, tap
from workloads.request import Phase, PlannedRequest, Tenant, Workload

REQUESTS = 36
NS = 1_000_000_000
TENANTS = tuple(
    Tenant(name, tier, "chat", weight, priority, 500.0, True)
    for name, tier, weight, priority in (("a", "gold", 4, 0), ("b", "silver", 2, 1), ("c", "bronze", 1, 2))
)


@dataclass(frozen=True)
class Case:
    """One way to run the trace; `v2` is whether the scheduler is told of Model Runner V2."""

    flags: dict[str, Any] = field(default_factory=dict)
    patches: str = ""
    blocks: int = 26
    v2: bool = True


CASES = {
    "plain": Case(),
    "few_seats": Case({"max_num_seqs": 3, "max_num_batched_tokens": 96}, blocks=17),
    "long_prefills_capped": Case({"long_prefill_token_threshold": 48}),
    "priority": Case({"scheduling_policy": "priority", "watermark": 0.03}),
    "patches": Case(patches="qos,mlfq,slru"),
    "runner_v1": Case(v2=False),
}


class Replayed:
    """A profile that answers with measured step times, in their order."""

    def __init__(self, steps: tuple[MeasuredStep, ...]) -> None:
        self._ns = [step.ns for step in steps]
        self.asked: list[tuple[int, int, int]] = []

    def step_us(
        self, prefills: list[tuple[int, int]], n_decode: int, sum_ctx_decode: int, n_sampled: int
    ) -> float:
        """Microseconds of the next step; a run that takes more steps repeats the last one."""
        number = len(self.asked)
        tokens = sum(new for new, _ in prefills) + n_decode
        context = sum(new + before for new, before in prefills) + sum_ctx_decode
        self.asked.append((n_sampled, tokens, context))
        return self._ns[min(number, len(self._ns) - 1)] / 1000


@dataclass(frozen=True)
class Replay:
    """What the virtual engine did; `hooks` is what the patches counted."""

    run: VirtualRun
    record: Record
    times: Replayed
    hooks: dict[str, Any]


def trace(step_ns: int, seed: int = 3) -> Workload:
    """Bursts, shared prefixes, prompts of many chunks, cancellations; in units of one step."""
    rng = np.random.default_rng(seed)
    shared = [rng.integers(3, 1000, n).astype(np.int32) for n in (96, 64, 64)]
    requests, at = [], 0.0
    for i in range(REQUESTS):
        at += float(rng.exponential(2.5)) if i % 9 else float(rng.exponential(14.0))
        own = rng.integers(3, 1000, int(rng.integers(4, 280))).astype(np.int32)
        requests.append(
            PlannedRequest(
                index=i,
                request_id=f"r{i:02d}",
                tenant=TENANTS[i % 3].name,
                phase=1,
                intended_ns=round(at * step_ns),
                prompt=np.concatenate([shared[(i // 2) % 3], own]),
                output=np.zeros(int(rng.integers(1, 44)), np.int32),
                segments=(),
                cancel_ns=round((at + rng.uniform(1, 40)) * step_ns) if i % 5 == 4 else None,
            )
        )
    return Workload("parity", seed, TENANTS, (Phase(1, "only", 0, 60 * NS, True),), tuple(requests), "", "")


@contextmanager
def in_force(case: Case) -> Iterator[Callable[[], dict[str, Any]]]:
    """The case's patches and runner, for engines built and run meanwhile; the value tells which hooks fired."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(config.PINNED, "VLLM_USE_V2_MODEL_RUNNER", str(int(case.v2)))
        installation = install(resolve(case.patches)) if case.patches else None
        try:
            yield lambda: installation.receipt()["hooks"] if installation is not None else {}
        finally:
            if installation is not None:
                installation.undo()


def flags(case: Case, async_scheduling: bool, over: Mapping[str, Any] | None = None) -> EngineFlags:
    """Engine flags that the small model and the small pool can bear; `over` is laid over the case's."""
    base: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 160,
        "block_size": BLOCK_SIZE,
        "async_scheduling": async_scheduling,
    }
    return EngineFlags(**{**base, **case.flags, **(over or {})})


class Bench:
    """The small model, and what the real engine did with it; each real run is made once."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._runs: dict[tuple[str, bool], MeasuredRun] = {}
        work = trace(1_000_000)
        warm = self._really(CASES["plain"], False, replace(work, requests=work.requests[:6]))
        # The trace is laid out in what a step takes here, so that it is as dense on any machine.
        self.work = trace(round(statistics.median(step.ns for step in warm.steps[3:])))

    def real(self, name: str, async_scheduling: bool) -> MeasuredRun:
        """The trace served by the real engine."""
        key = name, async_scheduling
        if key not in self._runs:
            self._runs[key] = self._really(CASES[name], async_scheduling, self.work)
        return self._runs[key]

    def _really(self, case: Case, async_scheduling: bool, work: Workload) -> MeasuredRun:
        chosen = flags(case, async_scheduling)
        with in_force(case) as hooks, measured_engine(self._model, chosen, case.blocks) as engine:
            return replace(engine.run(work), hooks=hooks())

    def virtual(self, case: Case, chosen: EngineFlags, measured: MeasuredRun) -> Replay:
        """The trace served by the virtual engine, with the step times and outputs that were measured."""
        requests = []
        for planned in self.work.requests:
            known = measured.record.outputs.get(planned.request_id, [])
            true = np.asarray(known + [0] * (len(planned.output) - len(known)), np.int32)
            requests.append(replace(planned, output=true))
        times = Replayed(measured.steps)
        with in_force(case) as hooks:
            engine = VirtualEngine(self._model, chosen, times, case.blocks)
            record = tap(engine.core.scheduler, lambda: engine.clock.now_ns)
            try:
                run = engine.run(replace(self.work, requests=tuple(requests)))
            finally:
                engine.shutdown()
            return Replay(run, record, times, hooks())


@pytest.fixture(scope="module")
def bench(small_model: Path) -> Bench:
    """Shared by all tests of this module."""
    return Bench(small_model)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", CASES)
def test_every_step_is_scheduled_as_by_a_real_engine(bench: Bench, name: str, async_scheduling: bool) -> None:
    case, measured = CASES[name], bench.real(name, async_scheduling)
    replay = bench.virtual(case, flags(case, async_scheduling), measured)
    run, times = replay.run, replay.times
    assert replay.record.difference(measured.record) is None

    # The records say the same as the real scheduler did.
    table = run.tables["requests"].to_pandas().set_index("request_id")
    preemptions, hits = measured.record.preemptions(), measured.record.first_hits()
    assert table.preemptions.to_dict() == {rid: preemptions[rid] for rid in table.index}
    assert table.cached_tokens.dropna().astype(int).to_dict() == hits
    assert run.schedule_digest == measured.record.digest()
    assert {rid: n for rid, n in table.output_tokens.items() if n} == {
        rid: len(tokens) for rid, tokens in measured.record.outputs.items() if tokens
    }

    # The profile was asked about the batches that the worker really ran.
    assert times.asked == [
        (len(step.rows), sum(n for n, _ in step.rows), sum(n + before for n, before in step.rows))
        for step in measured.steps
    ]

    # The patches did the same, and something, on both sides.
    assert replay.hooks == measured.hooks
    assert len(measured.hooks) == len(case.patches.split(",") if case.patches else ())
    assert all(counts["hits"] for counts in measured.hooks.values())

    # The trace is one that could tell.
    assert sum(preemptions.values()) > 0
    assert sum(hits.values()) > 0
    assert {"cancelled", "ok"} == set(table.status)
    assert any(step.finished for step in measured.record.steps)


def test_what_the_real_engine_generates_does_not_depend_on_the_schedule(bench: Bench) -> None:
    """Were the worker fed a wrong token under the asynchronous scheduler, its outputs would differ."""
    first = bench.real("plain", False).record
    assert len({tuple(tokens) for tokens in first.outputs.values()}) > REQUESTS // 2
    for name, async_scheduling in (("plain", True), ("few_seats", True), ("runner_v1", True)):
        other = bench.real(name, async_scheduling).record
        assert other.digest() != first.digest(), "the schedules are the same: nothing was compared"
        for rid in sorted(first.outputs.keys() & other.outputs.keys()):
            # A cancelled request may have got further in one of the two.
            pairs = zip(first.outputs[rid], other.outputs[rid], strict=False)
            assert all(a == b for a, b in pairs), (name, rid)


def _slow_step(measured: MeasuredRun, work: Workload) -> MeasuredRun:
    """The second step lasts until all requests have arrived."""
    first, second, *others = measured.steps
    return replace(measured, steps=(first, replace(second, ns=work.requests[-1].intended_ns), *others))


def _wrong_token(measured: MeasuredRun, _: Workload) -> MeasuredRun:
    outputs = {rid: list(tokens) for rid, tokens in measured.record.outputs.items()}
    rid = max(outputs, key=lambda r: len(outputs[r]))
    outputs[rid][-1] += 1
    return replace(measured, record=replace(measured.record, outputs=outputs))


@pytest.mark.parametrize(
    ("change", "over", "same_schedule"),
    [
        (None, {"max_num_batched_tokens": 159}, False),
        (None, {"async_scheduling": False}, False),
        (_slow_step, {}, False),
        (_wrong_token, {}, True),
    ],
    ids=["a token less in a step", "async off", "one slow step", "one wrong token"],
)
def test_a_difference_is_found(
    bench: Bench,
    change: Callable[[MeasuredRun, Workload], MeasuredRun] | None,
    over: dict[str, Any],
    same_schedule: bool,
) -> None:
    case, measured = CASES["plain"], bench.real("plain", True)
    told = measured if change is None else change(measured, bench.work)
    replay = bench.virtual(case, flags(case, True, over), told)
    assert replay.record.difference(measured.record) is not None
    assert (replay.run.schedule_digest == measured.record.digest()) is same_schedule
