"""Guards that the engine's own telemetry says of each step and request what the virtual engine's recorder says of it.

The two know nothing of each other: one hangs on the scheduler, the other on the executor and the front end. Both
watch the same engine, on its clock. Does not guard the real clock and the processes of a server (test_telemetry_process).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from harness.engines.flags import EngineFlags
from harness.engines.live.telemetry import hooks
from harness.engines.live.telemetry.collect import Telemetry, collect
from harness.engines.live.telemetry.join import join
from harness.engines.live.telemetry.observer import OBSERVER_ATTR, _drafts
from harness.engines.virtual.engine import VirtualEngine, VirtualRun
from harness.profiles import model_dir
from patches.seam.adapter import install as install_plan
from patches.seam.plan import resolve
from tests.engines.traffic import LONG, SHORT, ConstantStep, request, workload
from workloads.request import Workload

MIXED = workload(
    [
        request(
            i,
            0.05 * i,
            prompt=900 if i % 5 == 0 else 200,
            output=40 if i % 5 == 0 else 12,
            tenant=LONG if i % 5 == 0 else SHORT,
            cancel_s=0.05 * i + 0.3 if i % 7 == 3 else None,
            shared=64,
        )
        for i in range(60)
    ]
)


@contextmanager
def observed(folder: Path, clock: Callable[[], int]) -> Iterator[hooks.Observation]:
    observation = hooks.install(folder, clock=clock)
    try:
        yield observation
    finally:
        observation.undo()


def serve(folder: Path, work: Workload, blocks: int = 150, **flags: Any) -> tuple[VirtualRun, Telemetry]:
    """One run, seen by both."""
    now = SimpleNamespace(clock=None)
    with observed(folder, lambda: now.clock.now_ns if now.clock else 0):
        engine = VirtualEngine(
            model_dir("llama-3.1-8b"), EngineFlags(**{"max_model_len": 2048, **flags}), ConstantStep(), blocks
        )
        now.clock = engine.clock
        try:
            run = engine.run(work)
        finally:
            engine.shutdown()
    return run, collect(folder)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_steps_are_those_of_the_recorder(tmp_path: Path, async_scheduling: bool) -> None:
    run, telemetry = serve(tmp_path, MIXED, async_scheduling=async_scheduling)
    theirs, ours = run.tables["steps"].to_pandas(), telemetry.steps.to_pandas()
    # Otherwise equality would say little.
    assert (theirs[["waiting", "preempted", "evicted", "prefill_tokens", "decode_tokens"]].max() > 0).all()
    pd.testing.assert_frame_equal(ours, theirs)
    assert telemetry.faults == ()
    (header,) = telemetry.engines
    assert header["step_time"] == ("completion to completion" if async_scheduling else "execution")


def test_requests_and_events_are_those_of_the_recorder(tmp_path: Path) -> None:
    run, telemetry = serve(tmp_path, MIXED, async_scheduling=True)
    theirs = run.tables["requests"].to_pandas()
    joined = join(telemetry, list(theirs.request_id))
    assert (joined.unseen, joined.repeated, joined.strangers) == ((), (), ())
    ours = joined.requests.to_pandas()
    assert (
        theirs.preemptions.sum() > 0 and theirs.recomputed_tokens.sum() > 0 and theirs.cached_tokens.max() > 0
    )
    # The engine counts a prompt when it gets it, the recorder when it is scheduled.
    ours.loc[ours.scheduled_ns.isna(), "prompt_tokens_counted"] = None
    for name in (
        "scheduled_ns",
        "prompt_tokens_counted",
        "cached_tokens",
        "preemptions",
        "recomputed_tokens",
    ):
        pd.testing.assert_series_equal(ours[name], theirs[name], check_dtype=False)
    done = theirs.status == "ok"
    assert set(ours.finish_reason[done]) == {"length"} and set(ours.finish_reason[~done]) == {"abort"}
    assert (ours.output_tokens[done] == theirs.output_tokens[done]).all()
    assert (ours.first_token_ns[done] == theirs.first_token_ns[done]).all()
    assert (ours.end_ns[done] == theirs.end_ns[done]).all()
    kinds = ("preempt", "resume")
    events = [
        sorted(
            (e["t_ns"], e["kind"], e["request"], e["value"]) for e in table.to_pylist() if e["kind"] in kinds
        )
        for table in (joined.events, run.tables["events"])
    ]
    assert events[0] == events[1] and {kind for _, kind, *_ in events[0]} == set(kinds)


def test_batches_add_up(tmp_path: Path) -> None:
    _, telemetry = serve(tmp_path, MIXED, async_scheduling=True)
    steps, batches = telemetry.steps.to_pandas(), telemetry.batches.to_pandas()
    assert (batches.chunk_tokens.map(sum) == steps.prefill_tokens).all()
    assert (batches.chunk_tokens.map(len) + steps.decode_tokens == steps.scheduled).all()
    assert (batches.chunk_tokens.map(len) == batches.chunk_before.map(len)).all()
    assert (batches.step_us * 1000 == steps.end_ns - steps.start_ns).all()
    assert batches.hit_tokens.sum() == telemetry.requests.to_pandas().cached_tokens.sum()
    # Between one and the largest context for each decode.
    decoding = steps.decode_tokens > 0
    mean = batches.context_tokens[decoding] / steps.decode_tokens[decoding]
    assert ((mean > 200) & (mean <= 940)).all()
    assert (batches.context_tokens[~decoding] == 0).all()
    assert (batches.telemetry_us > 0).all() and telemetry.overhead > 0


def test_a_window_keeps_what_belongs_to_it(tmp_path: Path) -> None:
    _, telemetry = serve(tmp_path, MIXED, async_scheduling=True)
    begin, end = 500_000_000, 6_000_000_000
    part = telemetry.window(begin, end)
    assert part.steps["t_ns"].to_pylist() == [
        t for t in telemetry.steps["t_ns"].to_pylist() if begin <= t < end
    ]
    assert part.batches.num_rows == part.steps.num_rows > 0
    names = telemetry.requests["engine_id"].to_pylist()
    kept = part.requests["engine_id"].to_pylist()
    assert 0 < len(kept) < len(names)

    def named(one: Telemetry, rows: list[str]) -> list[tuple[int, str, str]]:
        return [(e["t_ns"], e["kind"], rows[e["request"]]) for e in one.events.to_pylist()]

    expected = [e for e in named(telemetry, names) if begin <= e[0] < end and e[2] in kept]
    assert named(part, kept) == expected and expected
    whole = telemetry.window(-1, 1 << 62)
    assert whole.steps.equals(telemetry.steps) and whole.events.equals(telemetry.events)
    assert math.isnan(telemetry.window(0, 0).overhead)


def test_what_a_patch_does_is_seen_and_who_it_holds(tmp_path: Path) -> None:
    held = replace(LONG, name="held")
    requests = [request(i, 0.01 * i, output=40, tenant=held if i % 3 else SHORT) for i in range(12)]
    work = replace(workload(requests), tenants=(SHORT, held))
    installation = install_plan(resolve("tests.seam.toys.hold"))
    try:
        run, telemetry = serve(tmp_path, work, async_scheduling=True)
    finally:
        installation.undo()
    theirs = run.tables["steps"].to_pandas()
    assert theirs.held.max() > 0
    pd.testing.assert_frame_equal(telemetry.steps.to_pandas(), theirs)


def test_undo_leaves_vllm_as_it_was(tmp_path: Path) -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    owners = (Scheduler, BlockPool, EngineCore)
    before = [dict(vars(owner)) for owner in owners]
    with observed(tmp_path, lambda: 0):
        changed = [
            {k for k, v in vars(o).items() if was[k] is not v} for o, was in zip(owners, before, strict=True)
        ]
        assert all(changed)
        with pytest.raises(hooks.ObservationError, match="already"):
            hooks.install(tmp_path)
    assert [dict(vars(owner)) for owner in owners] == before
    assert hooks.active() is None
    assert list(tmp_path.iterdir()) == []


def test_a_fault_stops_the_observer_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.engines.live.telemetry import observer

    split, calls = observer._split, []

    def broken(*args: Any) -> Any:
        calls.append(0)
        if len(calls) == 20:
            raise OSError("no space left")
        return split(*args)

    monkeypatch.setattr(observer, "_split", broken)
    run, telemetry = serve(tmp_path, MIXED, async_scheduling=True)
    assert set(run.tables["requests"]["status"].to_pylist()) == {"ok", "cancelled"}
    (fault,) = telemetry.faults
    assert "no space left" in fault
    assert 0 < telemetry.steps.num_rows < 20 < run.steps


def test_a_scheduler_that_was_there_before_is_not_observed(tmp_path: Path) -> None:
    engine = VirtualEngine(model_dir("llama-3.1-8b"), EngineFlags(max_model_len=4096), ConstantStep(), 300)
    with observed(tmp_path, lambda: 0):
        engine.run(workload([request(0, 0.0)]))
    engine.shutdown()
    assert OBSERVER_ATTR not in engine.core.scheduler.__dict__
    assert list(tmp_path.iterdir()) == []


def test_drafts_are_counted_as_upstream_counts_them() -> None:
    output = SimpleNamespace(
        scheduled_spec_decode_tokens={"a": [1, 2, 3], "b": [1, 2], "c": [-1, -1, -1], "d": [1]},
        num_invalid_spec_tokens={"b": 1},
    )
    # a: two of three accepted and a token of the model's own; b: none of the one that is valid; c: preempted, no
    # output; d: not in the answer at all
    answer = SimpleNamespace(req_id_to_index={"a": 0, "b": 1, "c": 2}, sampled_token_ids=[[1, 2, 9], [8], []])
    assert _drafts(output, answer) == (4, 2)
