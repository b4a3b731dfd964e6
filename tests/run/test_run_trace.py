"""`bench run --trace`: a public trace through the real engine with every arm, its report, and what is refused first.

The runs are short but real. Does not guard the size of any effect.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.cli import _run

BENCH = [sys.executable, "-c", "from harness.cli import main; main()"]
MAP = """
[[tenant]]
name = "documents"
tier = "bronze"
weight = 1
priority = 2
slo_ttft_ms = 3000
short = false
min_input_tokens = 3000
[[tenant]]
name = "premium"
tier = "gold"
weight = 4
slo_ttft_ms = 250
share = 0.5
[[tenant]]
name = "standard"
tier = "silver"
weight = 2
priority = 1
"""


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [*BENCH, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONHASHSEED": "random"},
    )


def read(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def mooncake(path: Path, count: int = 60) -> Path:
    """A trace of that many requests in 12 s: every other prompt begins with the same two blocks."""
    with path.open("w", encoding="utf-8") as out:
        for i in range(count):
            blocks = 8 if i % 5 == 0 else 3
            shared = [0, 1] if i % 2 == 0 else [10_000 + i, 20_000 + i]
            row = {
                "timestamp": 200 * i,
                "input_length": 512 * blocks - 7 * (i % 9),
                "output_length": 10 + i % 30,
                "hash_ids": [*shared, *(100 * i + j for j in range(100, 98 + blocks))],
            }
            out.write(json.dumps(row) + "\n")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trace and a map."""
    folder = tmp_path_factory.mktemp("trace")
    mooncake(folder / "moon.jsonl")
    (folder / "map.toml").write_text(MAP)
    return folder


@pytest.fixture(scope="module")
def choice(folder: Path) -> list[str]:
    """The options of the run."""
    return [
        *("--trace", str(folder / "moon.jsonl"), "--tenants", str(folder / "map.toml")),
        *(
            "--trace-from",
            "1",
            "--trace-seconds",
            "10",
            "--rate-scale",
            "2",
            "--enable",
            "qos",
            "--jobs",
            "2",
        ),
    ]


@pytest.fixture(scope="module")
def finished(folder: Path, choice: list[str]) -> Path:
    """The folder of a run with all arms."""
    done = bench("run", *choice, "--out", str(folder / "run"))
    assert done.returncode == 0, done.stderr + done.stdout
    assert "trace: mooncake, 1 to 11 s of 12 s, replayed at 2 times its rate: 50 requests" in done.stdout
    assert "assumed: prompts are made up: equal ids give equal blocks of 512 tokens" in done.stdout
    return folder / "run"


def test_every_arm_replays_the_same_part_of_the_trace(finished: Path) -> None:
    summary = read(finished / "summary.json")
    assert summary["valid"] is True, summary["reasons"]
    assert [arm["name"] for arm in summary["arms"]] == ["stock", "tuned", "qos"]
    for arm in summary["arms"]:
        assert arm["metrics"]["offered"]["value"] == 50
        assert arm["metrics"]["prefix_hit_rate"]["value"] > 0.1
        assert set(arm["by_tenant"]) == {"documents", "premium", "standard"}
        assert set(arm["by_phase"]) == {"1"}
    manifests = [read(finished / arm / "seed-0" / "manifest.json") for arm in ("stock", "tuned", "qos")]
    assert len({m["workload"]["sha256"] for m in manifests}) == 1
    workload = manifests[0]["workload"]
    assert (workload["name"], workload["trace"]["file"], workload["requests"]) == ("trace", "moon.jsonl", 50)
    assert workload["phases"][0]["end_ns"] == 5_000_000_000
    assert any("answers are made up" in said for said in workload["assumed"])


def test_a_report_of_it_can_be_made(finished: Path) -> None:
    done = bench("report", str(finished))
    assert done.returncode == 0, done.stderr
    assert "documents" in (finished / "report.html").read_text(encoding="utf-8")


def test_it_is_resumed_and_refused_when_the_trace_has_changed(
    finished: Path, folder: Path, choice: list[str]
) -> None:
    again = bench("run", *choice, "--out", str(finished))
    assert again.returncode == 0, again.stderr
    assert "3 of 3 runs are already there" in again.stdout
    # The same bytes elsewhere are the same trace, and another file is not.
    mooncake(folder / "elsewhere.jsonl", 59)
    moved = [str(folder / "elsewhere.jsonl") if "moon" in part else part for part in choice]
    other = bench("run", *moved, "--out", str(finished))
    assert other.returncode == 2
    assert "holds another run" in other.stderr


def test_twenty_seconds_of_azure_for_one_tenant(shared_dir: Path, tmp_path: Path) -> None:
    path = shared_dir / "data" / "traces" / "azure2023_conv.csv"
    arguments = ["--trace", str(path), "--trace-seconds", "20", "--only-arms", "stock"]
    done = bench("run", *arguments, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr + done.stdout
    summary = read(tmp_path / "run" / "summary.json")
    metrics = summary["arms"][0]["metrics"]
    assert metrics["offered"]["value"] == 31
    assert metrics["prefix_hit_rate"]["value"] == 0
    assert summary["arms"][0]["seeds"] == [0]
    assert bench("report", str(tmp_path / "run")).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--trace {tmp}/none.csv", "none.csv: no such file"),
        ("--trace {tmp}/moon.jsonl --phase 3", "--phase is of the five phases"),
        ("--trace {tmp}/moon.jsonl --time-scale 2", "--time-scale is of the five phases"),
        ("--trace {tmp}/moon.jsonl --mode pd", "--mode: pd is planned"),
        ("--trace {tmp}/moon.jsonl --tenants {tmp}/none.toml", "none.toml: no such file"),
        ("--trace {tmp}/moon.jsonl --tenants {tmp}/odd.toml", "sharee"),
        ("--trace {tmp}/moon.jsonl --tenants {tmp}/column.toml", "matches on 'Model'"),
        ("--trace {tmp}/moon.jsonl --tenants {tmp}/few.toml", "no tenant of few.toml takes this row"),
        ("--trace {tmp}/moon.jsonl --trace-from 99", "no request between 99 s and 399 s"),
        ("--trace {tmp}/moon.jsonl --trace-from nan", "--trace-from"),
        ("--trace {tmp}/moon.jsonl --trace-format azure-2023", "not in the format azure-2023"),
        ("--trace {tmp}/broken.jsonl", "broken.jsonl: line 7: not JSON"),
        ("--trace {tmp}/long.jsonl", "1 of 7 requests of the window are longer than the 32,768 tokens"),
        ("--tenants {tmp}/odd.toml", "--tenants goes with --trace"),
        ("--trace-seconds 0", "--trace-seconds goes with --trace"),
        ("--trace-from 5", "--trace-from goes with --trace"),
        ("--trace-skip-long", "--trace-skip-long goes with --trace"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    text = mooncake(tmp_path / "moon.jsonl", 6).read_text()
    (tmp_path / "broken.jsonl").write_text(text + '{"timestamp": 12')
    long = {"timestamp": 900, "input_length": 40_000, "output_length": 9, "hash_ids": list(range(79))}
    (tmp_path / "long.jsonl").write_text(text + json.dumps(long))
    (tmp_path / "odd.toml").write_text('[[tenant]]\nname = "a"\nsharee = 0.5\n')
    (tmp_path / "column.toml").write_text('[[tenant]]\nname = "a"\nmatch = { Model = "GPT-4" }\n')
    (tmp_path / "few.toml").write_text('[[tenant]]\nname = "a"\nmax_input_tokens = 2000\n')
    before = sorted(tmp_path.rglob("*"))
    code = _run(["run", *arguments.format(tmp=tmp_path).split()])
    shown = capsys.readouterr()
    assert code == 2, shown.err
    assert len(shown.err.strip().splitlines()) == 1, shown.err
    assert says in shown.err
    assert sorted(tmp_path.rglob("*")) == before
