"""Guards the journey of a user: `bench run` and `bench report` as commands, resumed, killed and repeated.

The runs are short (a tenth of phases 1 to 4) but real: real EngineCore, all three patches. Does not
guard the size of any effect: see docs and results/reference for those.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

BENCH = [sys.executable, "-c", "from harness.cli import main; main()"]
CHOICE = ["--enable", "qos,mlfq,slru", "--phase", "1,4", "--seeds", "1", "--time-scale", "0.1"]
ARMS = ("stock", "tuned", "qos+mlfq+slru")
TABLES = ("requests", "tokens", "steps", "events")


def bench(*arguments: str, hash_seed: str = "random") -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [*BENCH, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    done = bench("run", *CHOICE, "--jobs", "2", "--out", str(folder), hash_seed="1")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every table, and the manifests and receipts less what may differ."""
    found: dict[str, bytes] = {}
    for arm in ARMS:
        for table in TABLES:
            found[f"{arm}/{table}"] = (folder / arm / "seed-0" / f"{table}.parquet").read_bytes()
        manifest = read(folder / arm / "seed-0" / "manifest.json")
        for free in ("run_facts", "command"):
            manifest.pop(free)
        found[f"{arm}/manifest"] = json.dumps(manifest, sort_keys=True).encode()
        found[f"{arm}/receipt"] = (folder / arm / "seed-0" / "receipt.json").read_bytes()
    return found


def read(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_run_leaves_every_record_and_a_summary_of_schema_1(finished: Path) -> None:
    summary = read(finished / "summary.json")
    assert summary["schema"] == 1
    assert summary["valid"] is True, summary["reasons"]
    assert [arm["name"] for arm in summary["arms"]] == list(ARMS)
    patched = summary["arms"][2]
    assert patched["patches"] == ["qos", "mlfq", "slru"]
    assert all(patched["hooks"][patch]["hits"] > 0 for patch in ("qos", "mlfq"))
    assert len(patched["schedule_digest"]["0"]) == 64
    assert patched["schedule_digest"] != summary["arms"][1]["schedule_digest"]
    for arm in summary["arms"]:
        assert arm["metrics"]["offered"]["value"] > 0
        assert set(arm["by_phase"]) >= {"1", "4"}
        assert set(arm["by_tenant"]) == {
            "gold-a",
            "gold-b",
            "silver-0",
            "silver-1",
            "silver-2",
            "bronze-0",
            "bronze-1",
        }
    assert {c["verdict"] for c in summary["comparisons"]} <= {"better", "worse", "same", "undetermined"}
    offered = {arm["metrics"]["offered"]["value"] for arm in summary["arms"]}
    assert len(offered) == 1, "the arms of a seed must be offered the same trace"


def test_the_same_command_again_runs_nothing_and_says_the_same(finished: Path) -> None:
    before = read(finished / "summary.json")
    stamps = {p: p.stat().st_mtime_ns for p in finished.rglob("*.parquet")}
    again = bench("run", *CHOICE, "--jobs", "1", "--out", str(finished))
    assert again.returncode == 0, again.stderr
    assert "3 of 3 runs are already there" in again.stdout
    assert {p: p.stat().st_mtime_ns for p in finished.rglob("*.parquet")} == stamps
    after = read(finished / "summary.json")
    for summary in (before, after):
        summary.pop("run_facts")
    assert after == before


def test_another_plan_in_the_same_folder_is_refused(finished: Path) -> None:
    other = bench("run", *CHOICE[:-1], "0.2", "--out", str(finished))
    assert other.returncode == 2
    assert "holds another run" in other.stderr


def test_killed_half_way_and_resumed_equals_uninterrupted_to_the_byte(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    command = [*BENCH, "run", *CHOICE, "--jobs", "1", "--out", str(folder)]
    # Another hash seed and another number of jobs than the uninterrupted run had.
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONHASHSEED": "77"},
    )
    first = folder / ARMS[0] / "seed-0"
    deadline = time.monotonic() + 300
    while not first.is_dir() and time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert first.is_dir()
    time.sleep(1.0)
    complete = {arm for arm in ARMS if (folder / arm / "seed-0").is_dir()}
    assert len(complete) < len(ARMS), "it was killed too late to show anything"
    assert not (folder / "summary.json").exists()
    resumed = bench("run", *CHOICE, "--jobs", "1", "--out", str(folder), hash_seed="77")
    assert resumed.returncode == 0, resumed.stderr
    assert f"{len(complete)} of 3 runs are already there" in resumed.stdout
    assert contents(folder) == contents(finished)
    leftovers = [p.name for arm in ARMS for p in (folder / arm).iterdir() if p.name != "seed-0"]
    assert leftovers == []


def test_interrupted_by_the_user_is_one_line_and_exit_code_130(tmp_path: Path) -> None:
    folder = tmp_path / "interrupted"
    process = subprocess.Popen(
        [*BENCH, "run", *CHOICE, "--jobs", "1", "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the suite in the background has it ignore Ctrl-C, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "started" in line:
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip().splitlines() == [
        "bench: interrupted; what was finished is kept, the same command goes on from there"
    ]
    assert not list(folder.rglob("*.parquet"))


def test_a_report_of_the_run_can_be_made(finished: Path) -> None:
    done = bench("report", str(finished.parent))
    assert done.returncode == 0, done.stderr
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert "qos+mlfq+slru" in page
    assert (finished / "summary.md").is_file()
    assert str(finished / "report.html") in done.stdout.replace("\n", "")


def test_an_arm_compared_with_itself_passes_its_gate_and_a_slower_one_does_not(
    finished: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate.toml"
    gate.write_text('[[gate]]\nmetric = "output_tok_per_s"\nscope = "all"\nmargin_pct = 5.0\n')
    same = bench("compare", str(finished), str(finished), "--gate", str(gate))
    assert same.returncode == 0, same.stderr + same.stdout
    worse = read(finished / "summary.json")
    for arm in worse["arms"]:
        metric = arm["metrics"]["output_tok_per_s"]
        metric["value"] *= 0.5
        if metric["ci95"] is not None:
            metric["ci95"] = [bound * 0.5 for bound in metric["ci95"]]
    (tmp_path / "worse.json").write_text(json.dumps(worse))
    slower = bench("compare", str(finished), str(tmp_path / "worse.json"), "--gate", str(gate))
    assert slower.returncode == 3, slower.stderr + slower.stdout
