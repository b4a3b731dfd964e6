"""Guards what a live run decides without a server: order, bound on hits, verdict, rates, plan, refusals.

Does not guard that a server is driven as planned; test_live_run has that.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from harness import failures, live_setup
from harness import plan as plans
from harness.arms import Arm, baseline, patched
from harness.engines.flags import EngineFlags
from harness.engines.live import loads, receipts, verdict, warmup
from harness.engines.live.client.lateness import Lateness
from harness.engines.live.client.observed import Observed
from harness.engines.live.client.report import ClientReport
from harness.engines.live.order import interleaved
from harness.engines.live.pace import Pace
from harness.engines.live.prefix_bound import excess
from harness.engines.live.prometheus import Metrics, Scrape
from harness.engines.live.served import served_model
from harness.engines.live.tables import record_tables
from harness.engines.live.telemetry.collect import Telemetry
from harness.engines.live.telemetry.reconcile import Disagreement
from harness.engines.live.telemetry.tables import BATCHES, ENGINE_REQUESTS, events_from
from harness.errors import UserError
from harness.live_plan import LiveSettings, Machine
from harness.live_setup import with_again
from harness.plan import RunPlan, WorkloadChoice
from harness.profiles.profile import FivePhase
from harness.schema import arrow_schema
from patches.seam.plan import resolve
from tests.live.small_workload import MS, ask, workload
from workloads.request import PlannedRequest, Workload

BLOCK = 32
FLAGS = {"max_model_len": 2048, "block_size": BLOCK, "max_num_batched_tokens": 512, "max_num_seqs": 64}
MACHINE = Machine(
    name="cpu/small",
    title="a processor, 2 cores",
    stock=FLAGS,
    tuned={"max_num_batched_tokens": 256, "max_num_seqs": 16, "scheduling_policy": "priority"},
    five_phase=FivePhase(rate_scale=[0.01] * 5, slo_factor=4.0, comment="by hand"),
    max_model_len=2048,
)
SETTINGS = LiveSettings("somewhere/small", "small", "ab" * 32, 512, 2**28)


# order


def test_arms_take_turns_and_every_second_seed_goes_back() -> None:
    arms = ["a", "b", "c", "d"]
    order = interleaved(arms, [0, 1, 2, 3], "key")
    by_seed = [[arm for arm, seed in order if seed == n] for n in range(4)]
    assert all(sorted(part) == arms for part in by_seed)
    assert by_seed[1] == by_seed[0][::-1] and by_seed[3] == by_seed[2][::-1]
    assert [seed for _, seed in order] == sorted(seed for _, seed in order)
    assert order == interleaved(arms, [0, 1, 2, 3], "key")
    orders = {tuple(interleaved(arms, [0], str(key))) for key in range(40)}
    assert len(orders) > 10


# the bound on hits


def prompts(*parts: list[int]) -> list[PlannedRequest]:
    return [
        replace(ask(f"r{i}"), index=i, prompt=np.array(ids, np.int32), output=np.array([7] * 40, np.int32))
        for i, ids in enumerate(parts)
    ]


def test_hits_are_bounded_by_what_was_served_before() -> None:
    system = list(range(64))
    requests = prompts(system + [100] * 40, system + [200] * 40, [300] * 100)
    cold = excess(requests, [10, 20, 30], [0, 64, 0], BLOCK)
    assert (cold.tokens, cold.first, cold.hits, cold.possible) == (0, None, 64, 64)
    # the second was given tokens first: then it is the first that may hit, and not it
    assert excess(requests, [20, 10, 30], [64, 0, 0], BLOCK).tokens == 0
    assert excess(requests, [20, 10, 30], [0, 64, 0], BLOCK).tokens == 64
    # in one step each may have the other's blocks, but none its own
    assert excess(requests, [10, 10, 30], [64, 64, 0], BLOCK).tokens == 0
    assert excess(requests, [10, None, 30], [64, None, 0], BLOCK).tokens == 64


def test_a_warm_server_is_caught() -> None:
    """Case 8: the same seed again, with everything in the cache."""
    requests = prompts(list(range(100)), list(range(1000, 1100)))
    found = excess(requests, [10, 20], [96, 96], BLOCK)
    assert (found.tokens, found.requests, found.first, found.found, found.bound) == (192, 2, 0, 96, 0)


def test_an_answer_may_be_hit_by_the_next_turn() -> None:
    first = list(range(60))
    requests = prompts(first, first + [7] * 40 + [9] * 10)
    assert excess(requests, [10, 20], [0, 96], BLOCK).tokens == 0


# the verdict


def observed(request: PlannedRequest, **changes: Any) -> Observed:
    sent, count = request.intended_ns + MS, len(request.output)
    base = Observed(
        request_id=request.request_id,
        intended_ns=request.intended_ns,
        sent_ns=sent,
        headers_ns=sent,
        first_token_ns=sent + MS,
        first_output_token_ns=sent + MS,
        last_token_ns=sent + 2 * MS,
        end_ns=sent + 2 * MS,
        status="ok",
        http_status=200,
        reason="",
        retry_after_s=None,
        prompt_tokens_counted=len(request.prompt),
        cached_tokens=0,
        output_tokens=count,
        output_tokens_said=count,
        tokens_exact=True,
        finish_reason="length",
        server_request_id=None,
        chunk_ns=np.array([sent + MS, sent + 2 * MS], np.int64),
        chunk_tokens=np.array([1, count - 1], np.int32),
        token_ids=None,
    )
    return replace(base, **changes)


def lateness(p99_ms: float = 1.0) -> Lateness:
    return Lateness(24, 0.1, p99_ms, p99_ms, 0.2, 0.1, 0.3, 0, 0.0, 0.0)


def engine_rows(load: Workload, cached: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "engine": 0,
            "engine_id": f"cmpl-{r.request_id}-0-0123abcd",
            "received_ns": r.intended_ns + MS,
            "queued_ns": r.intended_ns + MS,
            "scheduled_ns": r.intended_ns + MS,
            "first_token_ns": r.intended_ns + 2 * MS,
            "end_ns": r.intended_ns + 3 * MS,
            "prompt_tokens_counted": len(r.prompt),
            "cached_tokens": cached,
            "output_tokens": len(r.output),
            "preemptions": 0,
            "recomputed_tokens": 0,
            "finish_reason": "length",
        }
        for r in load.requests
    ]


def telemetry(
    rows: list[dict[str, Any]], pids: tuple[int, ...] = (1,), faults: tuple[str, ...] = ()
) -> Telemetry:
    return Telemetry(
        arrow_schema("steps").empty_table(),
        BATCHES.empty_table(),
        pa.Table.from_pylist(rows, schema=ENGINE_REQUESTS),
        events_from([]),
        tuple({"pid": pid} for pid in pids),
        faults,
    )


LOAD = workload(*(ask(f"r{i}", at_ms=10.0 * i, prompt=40 + i) for i in range(24)))


def evidence(
    load: Workload = LOAD,
    *,
    seen: tuple[Observed, ...] | None = None,
    rows: list[dict[str, Any]] | None = None,
    arm: Arm | None = None,
    p99_ms: float = 1.0,
    **more: Any,
) -> verdict.Evidence:
    report = ClientReport(0, seen or tuple(map(observed, load.requests)), lateness(p99_ms), ())
    notes = more.pop("telemetry", None) or telemetry(rows if rows is not None else engine_rows(load))
    tables, joined = record_tables(load, report, notes)
    metrics = more.pop("metrics", None) or Metrics([])
    return verdict.Evidence(
        arm or baseline(MACHINE, "tuned"), load, report, tables, joined, notes, metrics, **more
    )


def codes(run: verdict.Evidence) -> list[str]:
    return [("!" if one.fatal else "") + one.code for one in verdict.findings(run)]


def test_a_good_run_has_no_findings() -> None:
    run = evidence()
    assert codes(run) == [] == codes(evidence(emulation={"late_ms": {"p50": 1.0, "p99": 9.5, "max": 30.0}}))
    assert verdict.validity(verdict.findings(run)) == {"valid": True, "reasons": []}
    assert run.tables["requests"]["scheduled_ns"].to_pylist()[0] == MS
    assert run.tables["requests"]["cached_tokens"].to_pylist() == [0] * 24


def with_seen(**changes: Any) -> tuple[Observed, ...]:
    """All as it should be but for the sixth."""
    return tuple(
        observed(request, **changes) if request.index == 5 else observed(request) for request in LOAD.requests
    )


def test_each_fault_has_its_code() -> None:
    cases: list[tuple[str, verdict.Evidence]] = [
        ("!client_stall", evidence(p99_ms=10.5)),
        ("!token_mismatch", evidence(seen=with_seen(prompt_tokens_counted=44))),
        (
            "!token_mismatch",
            evidence(seen=with_seen(output_tokens=2, chunk_tokens=np.array([1, 1], np.int32))),
        ),
        ("!token_mismatch", evidence(seen=with_seen(tokens_exact=False))),
        ("!token_mismatch", evidence(disagreements=[Disagreement("output_tokens", "r1: 3, 4")])),
        ("!witnesses_disagree", evidence(disagreements=[Disagreement("prefix_hits", "64, 0")])),
        ("no_metrics", evidence(disagreements=[Disagreement("metrics", "no answer")])),
        ("!server_restart", evidence(telemetry=telemetry(engine_rows(LOAD), pids=(1, 2)))),
        ("!no_telemetry", evidence(telemetry=telemetry(engine_rows(LOAD), faults=("disk full",)))),
        ("!prefix_contamination", evidence(rows=engine_rows(LOAD, cached=64))),
        ("!patch_not_loaded", evidence(receipt_faults=["EngineCore (pid 1) left no receipt"])),
        ("!warmup_short", evidence(warm_up="warmed up for 1 s of 5 s")),
        ("!throttled", evidence(throttled=["hw_thermal in 3.0% of the samples"])),
        ("!engine_late", evidence(emulation={"late_ms": {"p50": 1.0, "p99": 10.5, "max": 30.0}})),
        ("!engine_late", evidence(emulation={})),
        ("!too_few_samples", evidence(workload(*(ask(f"r{i}", at_ms=10.0 * i) for i in range(5))))),
    ]
    for code, run in cases:
        assert codes(run) == [code], code
        assert verdict.validity(verdict.findings(run))["valid"] == (not code.startswith("!"))


def test_a_stranger_and_a_retry_are_seen() -> None:
    rows = engine_rows(LOAD)
    stranger = {**rows[0], "engine_id": "cmpl-else-0-0123abcd"}
    assert codes(evidence(rows=[*rows, stranger])) == ["!witnesses_disagree"]
    assert codes(evidence(rows=[*rows, {**rows[0], "engine_id": "cmpl-r0-0-aaaaaaaa"}])) == [
        "!witnesses_disagree"
    ]


def test_counters_that_fall_spoil_a_run() -> None:
    text = "# TYPE vllm:prompt_tokens_total counter\nvllm:prompt_tokens_total {}\n"
    fell = Metrics([Scrape(0, 1.0, text.format(50)), Scrape(10**9, 1.0, text.format(20))])
    assert codes(evidence(metrics=fell)) == ["!counter_reset"]
    anew = "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {}\n" + text
    restarted = Metrics([Scrape(0, 1.0, anew.format(1, 5)), Scrape(10**9, 1.0, anew.format(2, 6))])
    assert codes(evidence(metrics=restarted)) == ["!server_restart"]


def test_a_patch_that_no_request_reached() -> None:
    arm = patched(MACHINE, ["qos"], {}, base="tuned")
    fired = {"hooks": {"qos": {"hits": 3, "by_hook": {"request_key": 3}}}}
    assert codes(evidence(arm=arm, receipt=fired)) == []
    assert codes(evidence(arm=arm, receipt={"hooks": {"qos": {"hits": 0}}})) == ["never_fired"]


def test_warm_up_ends_settled_or_says_so() -> None:
    assert warmup.settled([2.0, 1.0, 0.95]) and not warmup.settled([2.0, 1.0]) and not warmup.settled([1.0])
    assert "still got faster" in warmup.WarmUp(5.0, 20.0, (4.0, 2.0), 0).short
    assert "2.0 s of 5 s" in warmup.WarmUp(5.0, 2.0, (1.0, 1.0), 0).short
    assert warmup.WarmUp(5.0, 6.0, (1.0, 1.0), 0).short == ""


def test_one_receipt_of_several_processes() -> None:
    plan = resolve("qos")
    parts = {
        pid: {
            "plan_sha256": plan.sha256(),
            "hooks": {"qos": {"hits": hits, "by_hook": {"request_key": hits}}},
            "metrics": {"qos": {"share": float(hits)}},
        }
        for pid, hits in ((1, 0), (2, 7))
    }
    found = receipts.merged(plan, parts)
    assert found["hooks"]["qos"] == {"hits": 7, "by_hook": {"request_key": 7}}
    assert found["metrics"]["qos"] == {"share": 7.0} and found["plan_sha256"] == plan.sha256()
    parts[1]["plan_sha256"] = "other"
    assert receipts.merged(plan, parts)["plan_sha256"] is None
    assert receipts.merged(None, {}) == receipts.EMPTY


# rates


def test_rates_load_the_machine_as_the_phases_mean_it() -> None:
    pace = Pace(40_000.0, 1_000.0, 1_500.0, 3.0, 5.0)
    engine = loads.Engine(32, BLOCK, 20_000)
    found = loads.five_phases(pace, engine, 0.15, 4096)
    assert found == loads.five_phases(pace, engine, 0.15, 4096)
    slower = loads.five_phases(Pace(80_000.0, 2_000.0, 3_000.0, 6.0, 10.0), engine, 0.15, 4096)
    for fast, slow in zip(found.rate_scale, slower.rate_scale, strict=True):
        assert slow == pytest.approx(fast / 2, rel=0.01)
    assert slower.slo_factor > found.slo_factor >= 1
    # phase 5 offers 1.7 / 0.6 of phase 1's load, of a mix that costs more a request
    assert found.rate_scale[4] < found.rate_scale[0] * 1.7 / 0.6


def test_a_models_folder_says_which_ids_are_ordinary(tmp_path: Path) -> None:
    config = {"vocab_size": 1000, "max_position_embeddings": 512, "num_attention_heads": 4, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [{"id": 0}, {"id": 990}, {"id": 991}]})
    )
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    found = served_model(tmp_path)
    assert (found.vocab_size, found.max_tokens, found.kv_token_bytes) == (990, 512, 2 * 64 * 2 * 4)
    (tmp_path / "model.safetensors").write_bytes(b"others!")
    assert served_model(tmp_path).sha256 != found.sha256
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="does not tell vocab_size"):
        served_model(tmp_path)


# the plan


def live_plan(**changes: Any) -> RunPlan:
    arms = tuple(baseline(MACHINE, name) for name in ("stock", "tuned"))
    return replace(RunPlan(WorkloadChoice(), MACHINE, (0,), arms, live=SETTINGS), **changes)


def test_a_live_plan_survives_its_file(tmp_path: Path) -> None:
    plan = live_plan()
    text = json.dumps(plan.to_json())
    read = plans.from_json(json.loads(text))
    assert read.sha256 == plan.sha256 and read.profile == MACHINE and read.engine == "live"
    assert read.live is not None and Path(read.live.model) == Path(SETTINGS.model).resolve()
    assert plan.run_name.startswith("live-")
    # where the model lies is no part of what decides the results; what it is, is
    moved = live_plan(live=replace(SETTINGS, model="elsewhere/small"))
    other = live_plan(live=replace(SETTINGS, model_sha256="cd" * 32))
    assert moved.sha256 == plan.sha256 != other.sha256
    assert "engine" not in replace(plan, live=None).to_json()
    with pytest.raises(UserError, match="has no step times"):
        _ = plan.step_profile


def test_a_baseline_is_measured_twice() -> None:
    plan = live_plan()
    settings, arms = with_again(SETTINGS, plan.arms, wanted=True)
    assert [arm.name for arm in arms] == ["stock", "tuned", "tuned-again"]
    assert arms[2].flags == arms[1].flags and (settings.again, settings.again_of) == ("tuned-again", "tuned")
    assert with_again(SETTINGS, plan.arms, wanted=False) == (SETTINGS, plan.arms)
    settings, arms = with_again(SETTINGS, plan.arms[:1], wanted=True)
    assert settings.again == "stock-again"
    alone = (Arm("mine", "tuned", EngineFlags()),)
    assert with_again(SETTINGS, alone, wanted=True) == (SETTINGS, alone)


def test_why_a_task_failed_is_kept_until_it_runs(tmp_path: Path) -> None:
    failures.write(tmp_path, "tuned", 1, failures.Failure("server_crashed", "it is gone"))
    assert failures.read(tmp_path, "tuned", 1) == failures.Failure("server_crashed", "it is gone")
    assert failures.read(tmp_path, "tuned", 0) is None
    failures.clear(tmp_path, "tuned", 1)
    assert failures.read(tmp_path, "tuned", 1) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "lively"], "--engine lively: it is one of virtual, emulated, live"),
        (["--engine", "live", "--jobs", "2"], "one server at a time"),
        (["--engine", "live", "--sensitivity"], "--sensitivity recomputes verdicts of the virtual engine"),
        (["--recalibrate"], "--recalibrate goes with --engine live"),
        (["--no-aa"], "--no-aa goes with --engine live"),
        (["--engine", "live", "--model", "no/such/folder"], "there is no such folder"),
        (["--engine", "live", "--model", "some/hub-name"], "hf download some/hub-name"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(root: Path, words: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from harness.cli import main; main()", "run", *words],
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_a_hub_name_is_looked_up_in_this_machines_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout is the hub library's own: `models--<owner>--<name>/refs/main` names a folder of `snapshots`."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    assert Path(live_setup.folder_of("some/model")) == folder
    assert live_setup.folder_of(str(tmp_path)) == str(tmp_path)
    with pytest.raises(UserError, match="hf download other/model"):
        live_setup.folder_of("other/model")
