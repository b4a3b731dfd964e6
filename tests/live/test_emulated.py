"""Guards the emulated engine: vLLM's whole server with the profile's step times, beside the virtual engine.

One server is started. Does not guard latencies to the millisecond, which are this machine's, nor patches in a server
(test_server_live has them).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from harness.arms import Arm
from harness.engines.emulated.clock import WallClock
from harness.engines.emulated.compare import Comparison, compare
from harness.engines.emulated.executor import late_ms
from harness.engines.emulated.launch import server_for
from harness.engines.emulated.outputs import PlannedOutputs, write_outputs
from harness.engines.emulated.run import EmulatedRun, emulate
from harness.engines.emulated.settings import EMULATION_ENV, Emulation, from_environment
from harness.engines.flags import EngineFlags
from harness.engines.live.telemetry.tables import ENGINE_REQUESTS
from harness.engines.virtual.engine import VirtualEngine, VirtualRun
from harness.errors import RunFailed
from harness.profiles import load_profile
from harness.profiles.model import StepTimeModel
from harness.schema import TABLES, arrow_schema
from tests.live.served_model import alone
from tests.live.small_workload import ask, workload
from workloads import five_phase

# Steps of 17 ms and more: this machine's own share of them is small.
PROFILE = load_profile("rtx4090-24g")
WORK = five_phase.build(
    0,
    rates=five_phase.RatePlan(tuple(PROFILE.five_phase.rate_scale)),
    rate_scale=1.5,
    time_scale=0.03,
    length_scale=0.4,
)


@pytest.fixture(scope="module")
def virtual() -> VirtualRun:
    flags = EngineFlags(**PROFILE.stock)
    step_time = StepTimeModel(PROFILE, flags.max_num_seqs, flags.max_num_batched_tokens)
    engine = VirtualEngine(PROFILE.model_dir, flags, step_time, PROFILE.kv_blocks)
    try:
        return engine.run(WORK)
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> EmulatedRun:
    arm = Arm("stock", "stock", EngineFlags(**PROFILE.stock))
    with alone():
        return emulate(PROFILE, arm, WORK, tmp_path_factory.mktemp("emulated"))


@pytest.mark.slow
@pytest.mark.live
class TestOneServer:
    """The same small trace on both engines."""

    def test_it_is_the_same_engine(self, virtual: VirtualRun, emulated: EmulatedRun) -> None:
        (engine,) = emulated.telemetry.engines
        assert engine["kv_blocks"] == PROFILE.kv_blocks and engine["block_size"] == 16
        # Asynchronous scheduling, which vLLM turns off on a CPU, was in force to the end.
        assert engine["step_time"] == "completion to completion"
        assert emulated.telemetry.faults == () and emulated.ended.clean
        for name in TABLES:
            assert emulated.tables[name].schema.equals(arrow_schema(name))
        steps = [tables["steps"].to_pandas() for tables in (virtual.tables, emulated.tables)]
        # Each request took the steps that it takes; requests that come a little later share other steps.
        assert len(steps[1]) == pytest.approx(len(steps[0]), rel=0.1)
        assert steps[1].decode_tokens.sum() == pytest.approx(steps[0].decode_tokens.sum(), rel=0.02)

    def test_requests_end_as_in_the_virtual_engine(self, virtual: VirtualRun, emulated: EmulatedRun) -> None:
        tables = [run.tables["requests"].to_pandas() for run in (virtual, emulated)]
        ok = [table.status == "ok" for table in tables]
        # One that is given up within a few milliseconds of its end may end either way.
        assert (ok[0] != ok[1]).sum() <= 2 and ok[1].sum() > 20
        served = tables[1][ok[1]]
        assert (served.output_tokens == served.output_tokens_planned).all()
        assert (served.prompt_tokens_counted == served.prompt_tokens).all()
        assert emulated.report.requests[0].tokens_exact

    def test_steps_take_the_profiles_time(self, emulated: EmulatedRun) -> None:
        model = StepTimeModel(PROFILE)
        steps, batches = emulated.tables["steps"].to_pandas(), emulated.telemetry.batches.to_pandas()
        said = np.array(
            [
                model.step_us(
                    list(zip(b.chunk_tokens, b.chunk_before, strict=True)), decodes, b.context_tokens, n
                )
                for b, decodes, n in zip(
                    batches.itertuples(), steps.decode_tokens, steps.scheduled, strict=True
                )
            ]
        )
        ran = said > 0
        ratio = batches.step_us.to_numpy()[ran] / said[ran]
        assert np.median(ratio) == pytest.approx(1.0, abs=0.01)
        assert emulated.conduct["steps"] >= ran.sum()
        assert emulated.conduct["late_ms"]["p50"] < 5.0

    def test_what_the_way_there_and_back_costs(self, virtual: VirtualRun, emulated: EmulatedRun) -> None:
        found = compare(virtual.tables, emulated.tables, emulated.engine)
        print("\n".join(found.lines()))
        print(f"steps late by, ms: {emulated.conduct['late_ms']}")
        # Loose: the machine is shared. TTFT is short here, so that a few milliseconds of HTTP are much of it.
        assert abs(found.figure("tpot_ms").ratio) < 0.15
        assert abs(found.figure("e2e_ms").ratio) < 0.15
        ttft = found.figure("ttft_ms").difference_ms
        assert sum(row.difference_ms for row in found.ways[:5]) == pytest.approx(ttft, abs=1e-6)
        assert sum(row.difference_ms for row in found.ways) == pytest.approx(
            found.figure("e2e_ms").difference_ms, abs=1e-6
        )
        # No way takes less than no time.
        assert all(found.ways[part].emulated_ms > 0 for part in (0, 1, 4))


# parts


def test_outputs_are_the_planned_ones(tmp_path: Path) -> None:
    requests = workload(ask("a", tokens=3), ask("b", tokens=5)).requests
    write_outputs(requests, tmp_path / "outputs.arrow")
    outputs = PlannedOutputs(tmp_path / "outputs.arrow")
    assert outputs.tokens("b", 5) == [0, 1, 2, 3, 4]
    # A request that wants more gets its last token again.
    assert outputs.tokens("a", 5) == [0, 1, 2, 2, 2]
    assert outputs.unknown == 0
    assert outputs.tokens(None, 300) == outputs.tokens("c", 300) and len(outputs.tokens("c", 300)) >= 300
    assert outputs.unknown == 3


def test_the_engine_is_told_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = server_for(PROFILE, WORK, tmp_path / "scratch")
    monkeypatch.setenv(EMULATION_ENV, arguments["env"][EMULATION_ENV])
    told = from_environment()
    assert told.profile().sha256 == PROFILE.sha256 and told.kv_blocks == PROFILE.kv_blocks
    assert (
        PlannedOutputs(Path(told.outputs)).tokens(WORK.requests[3].request_id, 1)
        == WORK.requests[3].output.tolist()
    )
    other = Emulation(
        **{**json.loads((tmp_path / "scratch" / "emulation.json").read_text()), "profile_sha256": "0"}
    )
    with pytest.raises(RunFailed, match="has changed"):
        other.profile()
    monkeypatch.delenv(EMULATION_ENV)
    with pytest.raises(RunFailed, match="is not set"):
        from_environment()


def test_the_clock_waits_and_says_how_late_it_was() -> None:
    clock = WallClock()
    due_ns = clock.now_ns + 5_000_000
    clock.advance_to(due_ns)
    assert clock.now_ns >= due_ns
    clock.advance_to(due_ns - 10_000_000)
    assert clock.late_ns[0] >= 0 and clock.late_ns[1] >= 10_000_000
    assert late_ms(clock)["max"] >= 10
    assert late_ms(WallClock()) == {}


def test_a_comparison_adds_up_by_hand() -> None:
    """Two requests: one served 8 ms later than in the virtual engine, one that only one engine served."""

    def requests(first_ms: float, last_ms: float, status: str) -> pa.Table:
        def ns(value: float) -> int:
            return round(value * 1e6)

        base = {
            field.name: ("" if pa.types.is_string(field.type) else 0) for field in arrow_schema("requests")
        }
        one = {
            **base,
            "request_id": "a",
            "status": "ok",
            "sent_ns": ns(1),
            "scheduled_ns": ns(2),
            "first_token_ns": ns(first_ms),
            "last_token_ns": ns(last_ms),
            "end_ns": ns(last_ms),
            "first_chunk_tokens": 1,
            "output_tokens": 11,
        }
        both = [one, {**one, "request_id": "b", "status": status}]
        return pa.Table.from_pylist(
            [{**row, "measured": True, "short": True} for row in both], schema=arrow_schema("requests")
        )

    tokens = pa.table({"request": [0], "index": [0], "t_ns": [0]}).cast(arrow_schema("tokens"))
    found: Comparison = compare(
        {"requests": requests(20, 120, "ok"), "tokens": tokens},
        {"requests": requests(28, 130, "failed"), "tokens": tokens},
        pa.Table.from_pylist(
            [
                {
                    "received_ns": 5_000_000,
                    "scheduled_ns": 6_000_000,
                    "first_token_ns": 24_000_000,
                    "end_ns": 125_000_000,
                }
            ]
            * 2,
            schema=pa.schema([f.with_nullable(True) for f in ENGINE_REQUESTS]),
        ),
    )
    assert found.requests == 1
    assert [row.difference_ms for row in found.figures] == pytest.approx([8, 0.2, 10])
    assert found.figure("tpot_ms").virtual_ms == pytest.approx(10)
    assert [row.emulated_ms for row in found.ways] == pytest.approx([1, 4, 1, 18, 4, 101, 1])
    assert [row.virtual_ms for row in found.ways] == pytest.approx([0, 0, 2, 18, 0, 100, 0])
