"""Guards the virtual engine: real EngineCore, virtual time, upstream's own admission and aborts.

Does not guard the step-time model (tests/profiles) or what the metrics make of the records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from harness.engines.flags import EngineFlags
from harness.engines.virtual import engine as engine_module
from harness.engines.virtual.engine import VirtualEngine, VirtualRun
from harness.errors import RunFailed
from harness.profiles import model_dir
from harness.schema import TABLES, arrow_schema
from patches.seam.adapter import install
from patches.seam.context import Context
from patches.seam.patch import Hooks, Knobs, Patch
from patches.seam.plan import Chosen, PatchPlan, resolve
from tests.engines.traffic import LONG, NS, SHORT, ConstantStep, request, workload
from workloads.request import Workload

Serve = Callable[..., VirtualRun]


def serve(work: Workload, blocks: int = 400, slowdown: float = 1.0, **flags: Any) -> VirtualRun:
    """Serve a workload on a fresh engine; the pool must be whole again afterwards."""
    engine = VirtualEngine(
        model_dir("llama-3.1-8b"),
        EngineFlags(**{"max_model_len": 4096, **flags}),
        ConstantStep(),
        blocks,
        slowdown=slowdown,
    )
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    try:
        run = engine.run(work)
    finally:
        engine.shutdown()
    assert pool.get_num_free_blocks() == free
    assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
    return run


def requests_of(run: VirtualRun) -> pd.DataFrame:
    """The requests table, by request id."""
    return run.tables["requests"].to_pandas().set_index("request_id")


MIXED = [
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


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_every_request_ends_and_equal_runs_are_equal(async_scheduling: bool) -> None:
    runs = [serve(workload(MIXED), blocks=300, async_scheduling=async_scheduling) for _ in range(2)]
    table = requests_of(runs[0])
    assert set(table.status) == {"ok", "cancelled"}
    done = table[table.status == "ok"]
    assert (done.output_tokens == done.output_tokens_planned).all()
    assert (done.prompt_tokens_counted == done.prompt_tokens).all()
    assert table.preemptions.sum() > 0
    assert runs[0].schedule_digest == runs[1].schedule_digest
    for name in TABLES:
        assert runs[0].tables[name].schema.equals(arrow_schema(name))
        assert runs[0].tables[name].equals(runs[1].tables[name]), name
    tokens = runs[0].tables["tokens"].to_pandas()
    assert len(tokens) == table.output_tokens.sum()
    assert (tokens.groupby("request")["index"].max() + 1 == tokens.groupby("request").size()).all()


def test_a_lone_request_takes_the_steps_that_it_needs() -> None:
    run = serve(workload([request(0, 1.0, prompt=100, output=5)]))
    row = requests_of(run).loc["r000"]
    # Prefill: 20 ms and 100 tokens of 0.1 ms; then four decodes of 20 ms.
    assert row.first_token_ns == round(1.03 * NS)
    assert row.last_token_ns == round(1.11 * NS)
    assert row.scheduled_ns == NS


def test_an_arrival_during_a_step_enters_at_the_next_schedule() -> None:
    run = serve(workload([request(0, 0.0, prompt=2000, output=2), request(1, 0.1, prompt=50, output=2)]))
    table = requests_of(run)
    first_end = run.tables["steps"].to_pandas().end_ns.iloc[0]
    assert first_end == round(0.22 * NS)
    assert table.loc["r001"].sent_ns == round(0.1 * NS)
    # Its first chance is the schedule after the first result (step 2 was scheduled before it came).
    assert table.loc["r001"].scheduled_ns == first_end


def test_a_cancelled_request_frees_its_place_at_once() -> None:
    run = serve(
        workload([request(0, 0.0, output=500, cancel_s=1.0), request(1, 0.1, output=4)]), max_num_seqs=1
    )
    table = requests_of(run)
    assert table.loc["r000"].status == "cancelled"
    assert table.loc["r000"].end_ns == NS
    # The step in flight ends first; the waiting one starts within two steps of the cancellation.
    assert NS <= table.loc["r001"].scheduled_ns <= round(1.05 * NS)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_victim_loses_all_that_it_had_computed(async_scheduling: bool) -> None:
    """Also when the last chunk of its prefill was a single token, as of any decode."""
    run = serve(
        workload(
            [request(0, 0.0, prompt=100, output=200), request(1, 0.1, prompt=160, output=200)], end_s=90.0
        ),
        blocks=30,
        max_model_len=448,
        max_num_seqs=8,
        max_num_batched_tokens=160,
        async_scheduling=async_scheduling,
    )
    steps = run.tables["steps"].to_pandas()
    assert list(steps.prefill_tokens[steps.prefill_tokens > 0][:2]) == [100, 159]
    events = run.tables["events"].to_pandas()
    victims = events[events.kind == "preempt"]
    tokens = run.tables["tokens"].to_pandas()
    for row, t_ns, lost in zip(victims.request, victims.t_ns, victims.value, strict=True):
        assert row == 1
        # Two steps of output may be under way.
        got = int(((tokens.request == row) & (tokens.t_ns <= t_ns)).sum())
        assert 160 + got - 1 <= lost <= 160 + got + 1
    assert len(victims) > 0


def test_upstreams_own_queue_limit_rejects() -> None:
    run = serve(workload([request(i, 0.0, output=20) for i in range(6)]), max_num_queued_reqs=4)
    table = requests_of(run)
    assert list(table.status) == ["ok"] * 4 + ["rejected"] * 2
    assert set(table[table.status == "rejected"].reason) == {"max_num_queued_reqs"}


def test_upstreams_own_token_limit_rejects() -> None:
    run = serve(workload([request(i, 0.0, prompt=100) for i in range(6)]), max_num_queued_tokens=250)
    assert list(requests_of(run).status) == ["ok"] * 3 + ["rejected"] * 3


@pytest.mark.parametrize(("opens_s", "ends"), [(1003.0, True), (None, False)])
def test_a_gate_that_refuses_everybody_does_not_stall_the_clock(
    opens_s: float | None, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens in time and all are served; or it never does, and that is an error, not a hang."""
    # Each millisecond of waiting is a turn of the loop; ten minutes of them would only take longer.
    monkeypatch.setattr(engine_module, "_NO_PROGRESS_NS", 20 * NS)
    plan = PatchPlan((Chosen(closed_until(opens_s), Knobs(), "test"),))
    installation = install(plan)
    try:
        work = workload([request(i, 0.1 * i) for i in range(3)])
        if not ends:
            with pytest.raises(RunFailed, match="a gate holds them for ever"):
                serve(work)
            return
        table = requests_of(serve(work))
        steps = serve(work).tables["steps"].to_pandas()
    finally:
        installation.undo()
    assert (table.status == "ok").all()
    # The clock starts at 1000 s, so the gate opens 3 s into the run.
    assert (table.scheduled_ns >= 3 * NS).all()
    assert (table.scheduled_ns < round(3.1 * NS)).all()
    assert steps.t_ns.iloc[0] >= 3 * NS


def closed_until(opens_s: float | None) -> Patch:
    """A patch whose gate holds every request until a time of the engine's clock."""

    def build(knobs: Knobs, context: Context) -> Hooks:
        return Hooks(waiting_gate=lambda r, now: "closed" if opens_s is None or now < opens_s else None)

    return Patch(
        name="closed",
        number="",
        area="scheduling",
        knobs=Knobs,
        build=build,
        seams=("waiting_gate",),
        ranks={"waiting_gate": 1},
        summary="holds every request until a time",
        why="a test",
        how="a test",
        baseline="a test",
        mechanism="a test",
        removable_when="a test",
    )


def test_a_slower_device_is_slower() -> None:
    runs = [serve(workload([request(0, 0.0)]), slowdown=s) for s in (1.0, 1.1)]
    spans = [requests_of(run).loc["r000"].last_token_ns for run in runs]
    assert spans[1] == pytest.approx(1.1 * spans[0], rel=1e-6)


def test_the_callers_hash_seed_does_not_reach_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM derives block hashes from PYTHONHASHSEED, and slru remembers blocks by their hashes."""
    digests = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        installation = install(resolve("slru"))
        try:
            engine = VirtualEngine(
                model_dir("llama-3.1-8b"), EngineFlags(max_model_len=1024), ConstantStep(), 80
            )
            hashes: list[bytes] = []
            pool = engine.core.scheduler.kv_cache_manager.block_pool
            pool._insert_block_hash = _noted(pool._insert_block_hash, hashes)
            digests.append((engine.run(workload(MIXED)).schedule_digest, hashes))
            engine.shutdown()
        finally:
            installation.undo()
    assert digests[0] == digests[1]
    assert digests[0][1], "no block was ever cached"


def _noted(insert: Callable[..., Any], hashes: list[bytes]) -> Callable[..., Any]:
    def noting(block_hash: bytes, *args: Any, **kwargs: Any) -> Any:
        hashes.append(bytes(block_hash))
        return insert(block_hash, *args, **kwargs)

    return noting
