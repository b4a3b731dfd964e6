"""`bench run --sensitivity` and `bench sensitivity` as commands: real runs, short ones, under three assumptions.

The arm is one that no assumption can save: two requests at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

BENCH = [sys.executable, "-c", "from harness.cli import main; main()"]
ARM_FILE = '[[arm]]\nname = "narrow"\nengine_flags = { max_num_seqs = 2 }\n'
TRIED = ("efficiency-15", "cpu-2ms", "kv-20")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [*BENCH, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "COLUMNS": "200"},
    )


def read(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    (folder / "arms.toml").write_text(ARM_FILE)
    done = bench(
        "run", "--arms", str(folder / "arms.toml"), "--only-arms", "tuned,narrow", "--phase", "1", "--seeds", "1",
        "--time-scale", "0.1", "--sensitivity", "--assume", "kv-20%,cpu-2ms,efficiency-15", "--jobs", "2",
        "--out", str(folder / "demo"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Under 3 other assumptions on seed 0: " in done.stdout
    return folder / "demo"


def test_each_assumption_is_a_run_of_its_own_and_was_made(run: Path) -> None:
    assert sorted(path.name for path in (run / "sensitivity").iterdir()) == sorted(TRIED)
    blocks = read(run / "tuned/seed-0/manifest.json")["profile"]["kv_blocks"]
    assumed = {name: read(run / "sensitivity" / name / "narrow/seed-0/manifest.json") for name in TRIED}
    assert assumed["kv-20"]["assumptions"]["kv_blocks"] == round(0.8 * blocks)
    assert "assumptions" not in read(run / "narrow/seed-0/manifest.json")
    base, slow, cpu, kv = (
        pd.read_parquet(place / "narrow/seed-0/steps.parquet")
        for place in (run, *(run / "sensitivity" / name for name in TRIED))
    )
    shortest = [(steps.end_ns - steps.start_ns)[steps.scheduled > 0].min() for steps in (base, slow, cpu)]
    assert shortest[1] / shortest[0] == pytest.approx(1 / 0.85, rel=0.01)
    assert shortest[2] == shortest[0]
    assert (cpu.start_ns - cpu.t_ns)[cpu.scheduled > 0].min() >= 2_000_000
    assert kv.kv_usage.max() / base.kv_usage.max() == pytest.approx(1.25, rel=0.01)


def test_every_decisive_verdict_says_how_it_fared(run: Path) -> None:
    summary = read(run / "summary.json")
    assert summary["valid"] is True
    assert [arm["name"] for arm in summary["arms"]] == ["tuned", "narrow"]
    assert [one["name"] for one in summary["sensitivity"]["assumptions"]] == list(TRIED)
    rows = [row for row in summary["comparisons"] if "sensitivity" in row]
    assert len(rows) == summary["sensitivity"]["verdicts"] > 10
    for row in rows:
        for cell in row["sensitivity"]:
            # one seed was run, so the whole run and its first seed are the same
            assert cell["base_pct"] == row["delta_pct"]
            assert (
                row["verdict"] == "undetermined"
                if cell["flips"]
                else cell["base_pct"] * cell["delta_pct"] >= 0
            )
    ttft = next(row for row in rows if (row["metric"], row["scope"]) == ("ttft_ms_p50", "all"))
    assert ttft["verdict"] == "worse"
    assert all(cell["delta_pct"] > 0 for cell in ttft["sensitivity"])


def test_the_same_again_runs_nothing_and_says_the_same(run: Path) -> None:
    before = read(run / "summary.json")
    stamps = {path: path.stat().st_mtime_ns for path in run.rglob("*.parquet")}
    again = bench("sensitivity", str(run), "--assume", "kv-20")
    assert again.returncode == 0, again.stderr
    assert "2 of 2 runs are already there" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*.parquet")} == stamps
    assert read(run / "summary.json") == before


def test_the_report_lists_one_run(run: Path, tmp_path: Path) -> None:
    done = bench("report", str(run.parent), "--out", str(tmp_path), "--json", str(tmp_path / "all.json"))
    assert done.returncode == 0, done.stderr
    assert len(read(tmp_path / "all.json")["runs"]) == 1
    assert "KV blocks −20%" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_bad_choice_is_one_line(run: Path) -> None:
    done = bench("sensitivity", str(run), "--assume", "kv-30")
    assert done.returncode == 2
    assert done.stderr.startswith("bench: --assume kv-30: it is one of efficiency-15, ")
    assert len(done.stderr.splitlines()) == 1
