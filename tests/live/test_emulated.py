"""Guards the emulated engine: vLLM's whole server with the profile's step times, beside the virtual engine.

One server is started, as `bench run --engine emulated` does. Does not guard latencies to the millisecond, which are
this machine's, nor patches in a server (test_server_live has them).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from harness import http_path, live_run
from harness.arms import Arm
from harness.engines.emulated.clock import WallClock
from harness.engines.emulated.compare import Comparison, compare
from harness.engines.emulated.executor import late_ms
from harness.engines.emulated.launch import server_for
from harness.engines.emulated.outputs import PlannedOutputs, write_outputs
from harness.engines.emulated.settings import EMULATION_ENV, Emulation, from_environment
from harness.engines.flags import EngineFlags
from harness.engines.live.telemetry.tables import ENGINE_REQUESTS
from harness.errors import RunFailed
from harness.live_setup import LiveRequest, settle_emulated
from harness.plan import RunPlan, WorkloadChoice
from harness.profiles import load_profile
from harness.profiles.model import StepTimeModel
from harness.records import HTTP_PATH, ArmRecord, load_arm
from harness.schema import arrow_schema
from harness.worker import build_workload
from reports.build import render_run
from reports.summary import write_summary
from tests.live.served_model import alone
from tests.live.small_workload import ask, workload

# Steps of 17 ms and more: this machine's own share of them is small.
PROFILE = load_profile("rtx4090-24g")
ARM = Arm("stock", "stock", EngineFlags(**PROFILE.stock))
PLAN = RunPlan(
    WorkloadChoice(rate_scale=1.5, time_scale=0.03, length_scale=0.4),
    PROFILE,
    (0,),
    (ARM,),
    live=settle_emulated(PROFILE, LiveRequest(warmup_s=1.0)),
)


@dataclass(frozen=True)
class Ran:
    """A finished run and what its virtual twin left."""

    folder: Path
    emulated: ArmRecord
    virtual: ArmRecord


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder, console = tmp_path_factory.mktemp("emulated") / "run", Console(quiet=True)
    with alone():
        assert live_run.execute(PLAN, folder, ["bench", "run"], console) == []
    http_path.measure(PLAN, folder, ["bench", "run"], console)
    return Ran(folder, *(load_arm(run / "stock" / "seed-0") for run in (folder, folder / http_path.TWIN)))


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.smoke
class TestOneServer:
    """The same small trace on both engines."""

    def test_it_is_the_same_engine_under_the_same_traffic(self, ran: Ran) -> None:
        manifest = ran.emulated.manifest
        assert manifest["engine"] == "emulated" and manifest["telemetry"]["kv_blocks"] == PROFILE.kv_blocks
        assert manifest["workload"]["sha256"] == ran.virtual.manifest["workload"]["sha256"]
        # Asynchronous scheduling, which vLLM turns off on a CPU, was in force to the end.
        assert manifest["telemetry"]["step_time"] == "completion to completion"
        assert manifest["telemetry"]["faults"] == [] and manifest["server"]["ended"]["clean"]
        assert manifest["unmeasured"]["any"] == ran.virtual.manifest["unmeasured"]["any"] == 0
        # Each request took the steps that it takes; requests that come a little later share other steps.
        steps = [run.steps for run in (ran.virtual, ran.emulated)]
        assert len(steps[1]) == pytest.approx(len(steps[0]), rel=0.1)
        assert steps[1].decode_tokens.sum() == pytest.approx(steps[0].decode_tokens.sum(), rel=0.02)

    def test_requests_end_as_in_the_virtual_engine(self, ran: Ran) -> None:
        tables = [run.requests for run in (ran.virtual, ran.emulated)]
        ok = [table.status == "ok" for table in tables]
        # One that is given up within a few milliseconds of its end may end either way.
        assert (ok[0] != ok[1]).sum() <= 2 and ok[1].sum() > 20
        served = tables[1][ok[1]]
        assert (served.output_tokens == served.output_tokens_planned).all()
        assert (served.prompt_tokens_counted == served.prompt_tokens).all()

    def test_steps_take_the_profiles_time(self, ran: Ran) -> None:
        model = StepTimeModel(PROFILE)
        steps = ran.emulated.steps.to_dict("records")
        batches = pq.read_table(ran.emulated.path / "batches.parquet").to_pylist()
        said = np.array(
            [
                model.step_us(
                    list(zip(batch["chunk_tokens"], batch["chunk_before"], strict=True)),
                    step["decode_tokens"],
                    batch["context_tokens"],
                    step["scheduled"],
                )
                for batch, step in zip(batches, steps, strict=True)
            ]
        )
        took = said > 0
        ratio = np.array([batch["step_us"] for batch in batches])[took] / said[took]
        assert np.median(ratio) == pytest.approx(1.0, abs=0.01)
        conduct = ran.emulated.manifest["emulation"]
        assert conduct["steps"] >= took.sum() and conduct["late_ms"]["p50"] < 5.0

    def test_what_the_way_there_and_back_costs(self, ran: Ran) -> None:
        (found,) = json.loads((ran.folder / HTTP_PATH).read_text())["entries"]
        more = {row["name"]: row["emulated_ms"] - row["virtual_ms"] for row in found["figures"]}
        ratio = {row["name"]: row["emulated_ms"] / row["virtual_ms"] - 1 for row in found["figures"]}
        # Loose: the machine is shared. TTFT is short here, so that a few milliseconds of HTTP are much of it.
        assert abs(ratio["TPOT"]) < 0.15 and abs(ratio["E2E"]) < 0.15
        ways = [row["emulated_ms"] - row["virtual_ms"] for row in found["ways"]]
        assert sum(ways[:5]) == pytest.approx(more["TTFT"], abs=1e-3)
        assert sum(ways) == pytest.approx(more["E2E"], abs=1e-3)
        # No way takes less than no time.
        assert all(found["ways"][part]["emulated_ms"] > 0 for part in (0, 1, 4))

    def test_the_report_shows_it(self, ran: Ran) -> None:
        write_summary(ran.folder)
        render_run(ran.folder)
        page = (ran.folder / "report.html").read_text(encoding="utf-8")
        assert "without a model, its steps as long as the profile" in page
        assert "over HTTP, stock seed 0" in page and "tables from" in page
        assert "HTTP, tokenizer and network: zero" not in page


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
    work = build_workload(PLAN, 0)
    arguments = server_for(PROFILE, work, tmp_path / "scratch")
    monkeypatch.setenv(EMULATION_ENV, arguments["env"][EMULATION_ENV])
    told = from_environment()
    assert told.profile().sha256 == PROFILE.sha256 and told.kv_blocks == PROFILE.kv_blocks
    assert (
        PlannedOutputs(Path(told.outputs)).tokens(work.requests[3].request_id, 1)
        == work.requests[3].output.tolist()
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
