"""What the report says of a live run: engine, conduct, the A/A pair, what failed and what is struck through."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness import failures
from harness.atomic import write_json
from harness.errors import UserError
from harness.metrics.scope import Scope
from harness.records import HTTP_PATH, load_run
from reports import html, markdown, terminal
from reports.evaluated import EvaluatedArm, evaluated
from reports.noise import cap
from reports.summary import build_summary
from reports.view import RunView, load_view
from tests import synthetic

AGAIN = "plain-again"
LIVE: dict[str, Any] = {
    "engine": "live",
    "live": {"model_name": "small"},
    "server": {"start_s": 21.4},
    "client": {"send_delay_ms_p99": 1.25, "read_delay_ms_p99": 2.5},
    "telemetry": {"overhead": 0.0012},
    "host": {
        "cpu": "a processor",
        "cores": 2,
        "memory_bytes": 2**33,
        "kernel": "6",
        "load_before": [0.4, 0.5, 0.6],
    },
    "gpu": {"absent": {"code": "no_library", "text": "no driver on this machine"}, "gpus": []},
}


@pytest.fixture(scope="module")
def live_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four arms, one of them tuned once more with its own noise."""
    run = synthetic.make_run(
        tmp_path_factory.mktemp("live") / "run",
        arms=("stock", "tuned", "qos+mlfq+slru", AGAIN),
        seeds=(0, 1),
        n=300,
        effects={AGAIN: synthetic.Effect(step=0.97, short_queue=0.31, long_queue=1.05, hit_rate=0.41)},
    )
    plan = json.loads((run / "plan.json").read_text())
    write_json(run / "plan.json", {**plan, "live": {"again": AGAIN, "again_of": "tuned"}})
    for path in run.glob("*/seed-*/manifest.json"):
        write_json(path, {**json.loads(path.read_text()), **LIVE})
    return run


@pytest.fixture(scope="module")
def summary(live_run: Path) -> dict[str, Any]:
    """Its summary."""
    return build_summary(live_run)


def test_arms_computed_on_unlike_cores_are_not_compared(live_run: Path, tmp_path: Path) -> None:
    unlike = tmp_path / "run"
    shutil.copytree(live_run, unlike)
    for path in unlike.glob("*/seed-*/manifest.json"):
        manifest = json.loads(path.read_text())
        cores = 2 if manifest["arm"] == "qos+mlfq+slru" else 1
        write_json(path, {**manifest, "server": {"start_s": 21.4, "compute_cores": cores}})
    (reason,) = build_summary(unlike)["reasons"]
    assert reason["code"] == "unlike_cores"
    assert f"stock: 1, tuned: 1, qos+mlfq+slru: 2, {AGAIN}: 1" in reason["text"]


def test_the_pair_is_noise_and_not_judged(live_run: Path, summary: dict[str, Any]) -> None:
    assert summary["valid"]
    assert {row["arm"] for row in summary["comparisons"]} == {"tuned", "qos+mlfq+slru"}
    noise = summary["live"]["noise"]
    assert (noise["again"], noise["of"]) == (AGAIN, "tuned")
    rows = {(row["metric"], row["scope"]): row for row in noise["rows"]}
    short = rows["short_ttft_ms_p90", "all"]
    low, high = short["ci95"]
    assert low < short["delta_pct"] < high and short["visible_pct"] == max(abs(low), abs(high))
    # two arms that are alike are no further apart than their interval says, in most figures
    inside = [row["ci95"][0] <= 0 <= row["ci95"][1] for row in noise["rows"] if "ttft" in row["metric"]]
    assert sum(inside) >= len(inside) // 2
    view = load_view(live_run, summary)
    assert [arm.name for arm in view.candidates] == ["qos+mlfq+slru"]
    assert {arm.name for arm in view.arms} == {"stock", "tuned", "qos+mlfq+slru", AGAIN}


def test_a_change_that_the_pair_shows_too_is_no_verdict(live_run: Path, summary: dict[str, Any]) -> None:
    won = next(
        row for row in summary["comparisons"] if row["verdict"] == "better" and row["delta_pct"] is not None
    )
    arms = [evaluated_arm(live_run, name) for name in ("stock", "tuned", AGAIN)]
    # with stock in the place of the repetition the pair differs by far more than any patch does
    small = {**won, "delta_pct": 0.01, "metric": "short_ttft_ms_p99", "scope": "all"}
    (capped,) = cap([small], arms, "stock", "tuned")
    assert (capped["verdict"], capped["data_verdict"]) == ("undetermined", "better")
    assert "two servers with the same flags (tuned, stock) differed by" in capped["reason"]
    assert cap([small], arms, "none", "tuned") == [small]
    large = {**small, "delta_pct": -99.9}
    assert cap([large], arms, AGAIN, "tuned") == [large]


def evaluated_arm(run_dir: Path, name: str) -> EvaluatedArm:
    run = load_run(run_dir)
    return evaluated(name, {"patches": []}, run.arms[name], scopes=[Scope()])


def texts(view: RunView) -> dict[str, str]:
    console = Console(file=io.StringIO(), width=400, color_system=None)
    terminal.show(view, console)
    assert isinstance(console.file, io.StringIO)
    return {
        "terminal": console.file.getvalue(),
        "markdown": markdown.render(view).replace("\\", ""),
        "html": html.render(view),
    }


def test_all_outputs_say_that_it_was_live(live_run: Path, summary: dict[str, Any]) -> None:
    for name, text in texts(load_view(live_run, summary)).items():
        assert "a real server of vLLM 0.32.0 with small on a processor, 2 cores" in text, name
        assert "Live figures vary from run to run" in text, name
        assert "p99 of the send delay 1.2 ms" in text and "0.12% of step time" in text, name
        assert "no GPU telemetry, so no energy: no driver on this machine" in text, name
        assert f"A/A, {AGAIN} against tuned (same flags): short TTFT p90" in text, name
        assert "by the A/A pair, smaller changes than these could not be told from noise" in text, name
        assert "virtual clock, without a GPU" not in text and "bench sensitivity" not in text, name


def altered(live_run: Path, folder: Path, change: Callable[[Path], None]) -> dict[str, Any]:
    """The summary of a copy that was changed."""
    run = folder / "run"
    shutil.copytree(live_run, run)
    change(run)
    return build_summary(run)


def test_what_failed_is_said_with_its_reason(live_run: Path, tmp_path: Path) -> None:
    def crash(run: Path) -> None:
        shutil.rmtree(run / "tuned" / "seed-1")
        failures.write(run, "tuned", 1, failures.Failure("server_crashed", "its EngineCore (pid 7) ended"))

    summary = altered(live_run, tmp_path, crash)
    tuned = next(arm for arm in summary["arms"] if arm["name"] == "tuned")
    assert not summary["valid"] and not tuned["valid"]
    assert tuned["reasons"][0] == {
        "code": "server_crashed",
        "text": "seed 1 failed: its EngineCore (pid 7) ended",
    }
    assert summary["live"]["noise"]["rows"] == []


def test_fatal_findings_strike_the_figures_and_notes_do_not(live_run: Path, tmp_path: Path) -> None:
    def find(run: Path) -> None:
        for arm, fatal in (("tuned", False), ("stock", True)):
            path = run / arm / "seed-0" / "manifest.json"
            reason = {"code": "no_metrics" if not fatal else "throttled", "text": "so it was", "fatal": fatal}
            validity = {"valid": not fatal, "reasons": [reason]}
            write_json(path, {**json.loads(path.read_text()), "validity": validity})

    summary = altered(live_run, tmp_path, find)
    valid = {arm["name"]: arm["valid"] for arm in summary["arms"]}
    assert valid == {"stock": False, "tuned": True, "qos+mlfq+slru": True, AGAIN: True}
    codes = {arm["name"]: [reason["code"] for reason in arm["reasons"]] for arm in summary["arms"]}
    assert "throttled" in codes["stock"] and "no_metrics" in codes["tuned"]
    view = load_view(tmp_path / "run", summary)
    assert "~~" in markdown.render(view)


def test_a_live_manifest_that_lacks_a_part_is_refused(live_run: Path, tmp_path: Path) -> None:
    def cut(run: Path) -> None:
        path = run / "stock" / "seed-0" / "manifest.json"
        write_json(path, {key: value for key, value in json.loads(path.read_text()).items() if key != "host"})

    with pytest.raises(
        UserError, match="a live run names its model, server, client, telemetry, host and gpu"
    ):
        altered(live_run, tmp_path, cut)


def test_without_a_pair_its_absence_is_said(live_run: Path, tmp_path: Path) -> None:
    def alone(run: Path) -> None:
        plan = json.loads((run / "plan.json").read_text())
        plan["arms"] = [arm for arm in plan["arms"] if arm["name"] != AGAIN]
        write_json(run / "plan.json", {**plan, "live": {"again": "", "again_of": ""}})

    summary = altered(live_run, tmp_path, alone)
    assert summary["live"]["noise"] is None
    assert "no A/A pair was run" in markdown.render(load_view(tmp_path / "run", summary))


def test_an_emulated_run_says_what_it_is_and_what_http_costs(live_run: Path, tmp_path: Path) -> None:
    def emulate(run: Path) -> None:
        for path in run.glob("*/seed-*/manifest.json"):
            manifest = json.loads(path.read_text())
            manifest |= {
                "engine": "emulated",
                "emulation": {"late_ms": {"p50": 0.2, "p99": 4.25, "max": 9.0}},
            }
            write_json(path, {**manifest, "live": {**manifest["live"], "emulated": True}})
        ways = [
            {"name": "due to sent: the client", "virtual_ms": 0.0, "emulated_ms": 0.5},
            {"name": "queue", "virtual_ms": 40.0, "emulated_ms": 52.5},
        ]
        figures = [
            {"name": "TTFT", "virtual_ms": 100.0, "emulated_ms": 113.0},
            {"name": "TPOT", "virtual_ms": 0.0, "emulated_ms": 0.0},
        ]
        entry = {"arm": "tuned", "seed": 0, "requests": 250, "figures": figures, "ways": ways}
        write_json(run / HTTP_PATH, {"schema": 1, "entries": [entry]})

    before = altered(live_run, tmp_path / "before", lambda run: None)
    summary = altered(live_run, tmp_path, emulate)
    assert summary["live"]["emulated"] and not before["live"]["emulated"]
    for name, text in texts(load_view(tmp_path / "run", summary)).items():
        assert "without a model, its steps as long as the profile's" in text.replace("&#39;", "'"), name
        assert "emulated steps ended late by 4.2 ms at most" in text, name
        assert "over HTTP, tuned seed 0 (means of 250 requests, virtual to emulated)" in text, name
        assert "TTFT 100.0 to 113.0 ms (+13.0%)" in text and "most of it: queue +12.5 ms" in text, name
        assert "no GPU telemetry, so no energy" not in text, name
