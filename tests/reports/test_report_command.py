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
from harness.errors import RunFailed, UserError
from reports.build import foremost
from reports.summary import current_summary
from tests.synthetic import make_run


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


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A results folder with one run that is summed up in no time."""
    make_run(tmp_path / "results/demo", arms=("stock", "qos"), seeds=(0,), n=60, phase_s=6)
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


def test_a_summary_is_kept_while_it_is_what_the_records_give(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied / "demo"
    path = run / "summary.json"
    blob = path.read_bytes()
    built: list[str] = []

    def build(run_dir: Path) -> dict[str, object]:
        built.append(run_dir.name)
        return {}

    monkeypatch.setattr("reports.summary.build_summary", build)

    def kept() -> bool:
        built.clear()
        known = current_summary(run)
        assert bool(built) == (known == {})
        return not built

    assert kept()
    os.utime(path, ns=(0, 0))  # its age does not matter
    assert kept()
    # the summary itself: damaged, empty, edited
    for bad in (b"{", b"{}\n", b"\xff", blob.replace(b'"valid": true', b'"valid": false', 1)):
        assert bad != blob
        path.write_bytes(bad)
        assert not kept()
    path.write_bytes(blob)
    assert kept()
    # the records: newer, gone, come back
    steps = run / "stock/seed-0/steps.parquet"
    then = steps.stat().st_mtime_ns
    os.utime(steps, ns=(then + 1, then + 1))
    assert not kept()
    os.utime(steps, ns=(then, then))
    assert kept()
    for gone in ("tuned/seed-1", "tuned"):
        (run / gone).rename(copied / "aside")
        assert not kept()
        (copied / "aside").rename(run / gone)
        assert kept()
    # the plan, and the sources
    plan = (run / "plan.json").read_bytes()
    (run / "plan.json").write_bytes(plan + b"\n")
    assert not kept()
    (run / "plan.json").write_bytes(plan)
    monkeypatch.setattr("reports.fingerprint._SOURCES", ("harness/metrics/*.py",))
    assert not kept()


def test_a_report_of_a_changed_run_is_of_what_is_there(small: Path) -> None:
    bench(small, "--no-html")
    shutil.rmtree(small / "demo/qos/seed-0")
    with pytest.raises(RunFailed, match="INVALID"):
        bench(small, "--no-html")
    summary = json.loads((small / "demo/summary.json").read_text())
    assert [arm["seeds"] for arm in summary["arms"]] == [[0], []]


def test_an_invalid_run_is_written_whole_and_then_said(small: Path, tmp_path: Path) -> None:
    path = small / "demo/stock/seed-0/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["validity"] = {"valid": False, "reasons": [{"code": "digest_mismatch", "text": "so it is"}]}
    path.write_text(json.dumps(manifest))
    with pytest.raises(RunFailed, match="run demo is INVALID: stock: seed 0: so it is"):
        bench(small, "--json", tmp_path / "o.json")
    for name in ("summary.json", "summary.md", "report.html"):
        assert (small / "demo" / name).is_file()
    assert not json.loads((tmp_path / "o.json").read_text())["runs"][0]["summary"]["valid"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("plan.json", {}, "schema: field required"),
        ("stock/seed-0/manifest.json", {}, "schema: field required"),
        ("stock/seed-0/receipt.json", {}, "schema: field required"),
        ("stock/seed-0/receipt.json", {"schema": 1, "plan_sha256": 3}, "plan_sha256"),
    ],
)
def test_one_damaged_run_does_not_hide_the_others(
    copied: Path, name: str, content: dict[str, object], says: str, tmp_path: Path
) -> None:
    bad = copied / "a-bad-one"
    shutil.copytree(copied / "demo", bad)
    (bad / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"1 of 2 runs could not be reported: {bad / name}, {says}"):
        bench(copied, "--no-html", "--json", tmp_path / "o.json")
    assert (copied / "demo/summary.md").is_file()
    assert not (bad / "summary.md").exists()
    written = json.loads((tmp_path / "o.json").read_text())
    assert [entry["run"] for entry in written["runs"]] == ["demo"]
    assert [str(bad / name) in fault for fault in written["faults"]] == [True]
    with pytest.raises(UserError, match=f"^{bad / name}, {says}"):
        bench(bad, "--no-html")


def test_a_damaged_summary_is_made_anew(small: Path) -> None:
    bench(small, "--no-html")
    path = small / "demo/summary.json"
    good = path.read_bytes()
    path.write_text('{"schema": 1, "arms": 3}')
    bench(small, "--no-html")
    assert path.read_bytes() == good


def test_paths_that_cannot_be_written_to_are_said_before_the_work(copied: Path) -> None:
    shutil.rmtree(copied / "demo/stock")  # which would be another error, met later
    file = copied / "file"
    file.write_text("")
    for option, path in (("--json", copied), ("--json", file / "x.json"), ("--out", file)):
        with pytest.raises(UserError, match="cannot write"):
            bench(copied, option, path)
