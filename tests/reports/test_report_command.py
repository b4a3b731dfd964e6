"""`bench report`: which runs it takes, what it writes, and what it says of bad input."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from harness.commands.report_cmd import register
from harness.errors import UserError
from reports.build import current_summary, foremost


def bench(*arguments: str | Path) -> str:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    result = CliRunner().invoke(app, ["report", *map(str, arguments)], env={"COLUMNS": "80"})
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture
def copied(results: Path, tmp_path: Path) -> Path:
    """A results folder of one's own, timestamps kept."""
    shutil.copytree(results, tmp_path / "results")
    return tmp_path / "results"


def test_it_writes_three_files_and_prints_the_table(copied: Path, tmp_path: Path) -> None:
    reference = copied / "reference"
    shutil.copytree(copied / "demo", reference)
    json_path = tmp_path / "out.json"
    said = bench(copied, "--json", json_path)
    for name in ("summary.json", "summary.md", "report.html"):
        assert (copied / "demo" / name).is_file()
        assert name in said
    assert "short TTFT p99" in said
    assert not (reference / "report.html").exists()
    (entry,) = json.loads(json_path.read_text())["runs"]
    assert entry["run"] == "demo"
    assert entry["summary"] == json.loads((copied / "demo" / "summary.json").read_text())


def test_out_and_no_html(copied: Path, tmp_path: Path) -> None:
    bench(copied / "demo", "--out", tmp_path / "there", "--no-html")
    assert sorted(p.name for p in (tmp_path / "there").iterdir()) == ["summary.json", "summary.md"]


def test_several_runs_get_a_folder_each(copied: Path, tmp_path: Path) -> None:
    shutil.copytree(copied / "demo", copied / "other")
    bench(copied, "--out", tmp_path / "there", "--no-html")
    assert sorted(str(p.relative_to(tmp_path / "there")) for p in (tmp_path / "there").glob("*/*.md")) == [
        "demo/summary.md",
        "other/summary.md",
    ]


def test_the_most_complete_run_is_the_one_printed(copied: Path) -> None:
    part = copied / "part"
    shutil.copytree(copied / "demo", part)
    shutil.rmtree(part / "tuned" / "seed-1")
    os.utime(part / "stock" / "seed-0" / "manifest.json")  # newer, but less complete
    assert foremost([part, copied / "demo"]) == copied / "demo"


def test_a_folder_without_runs_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="bench run"):
        bench(tmp_path)
    with pytest.raises(UserError, match="bench run"):
        bench(tmp_path / "absent")


@pytest.mark.parametrize("table", ["requests", "tokens"])
def test_a_truncated_record_is_named(copied: Path, table: str) -> None:
    path = copied / "demo" / "stock" / "seed-1" / f"{table}.parquet"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(UserError, match=f"{table}.parquet.*truncated"):
        bench(copied)
    assert not (copied / "demo" / "report.html").exists()


def test_a_fresh_summary_is_kept_and_a_stale_or_broken_one_is_not(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied / "demo"
    path = run / "summary.json"
    built: list[Path] = []

    def build(run_dir: Path) -> dict[str, object]:
        built.append(run_dir)
        return {"schema": 1}

    monkeypatch.setattr("reports.build.build_summary", build)
    current_summary(run)
    assert built == []
    path.write_text("{")
    current_summary(run)
    assert len(built) == 1
    path.write_text("{}")
    newer = path.stat().st_mtime_ns + 1
    os.utime(run / "stock" / "seed-0" / "steps.parquet", ns=(newer, newer))
    current_summary(run)
    assert len(built) == 2
    path.unlink()
    current_summary(run)
    assert len(built) == 3
