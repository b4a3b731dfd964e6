"""Record directories: whole or absent, equal bytes for equal content, clear words about damage."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import harness
from harness.atomic import write_json
from harness.errors import RunFailed, UserError
from harness.records import (
    arm_dir,
    find_runs,
    is_complete,
    load_arm,
    load_run,
    parquet_bytes,
    read_json,
    write_arm,
)
from harness.schema import TABLES, arrow_schema
from tests.hand_records import papers, plan, record, request, tables_of
from tests.synthetic import Effect, make_run, make_tables

ROWS = [request(chunks=[(100, 1), (130, 3)]), request(status="rejected", cached_tokens=None)]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    one = record(tmp_path, ROWS, events=[{"t_ns": 5, "kind": "preempt", "request": 0, "value": 2.5}])
    assert (one.arm, one.seed, len(one.tokens)) == ("stock", 0, 4)
    assert one.requests["first_token_ns"].tolist()[0] == 100_000_000
    assert pd.isna(one.requests["first_token_ns"].iloc[1])
    assert is_complete(one.path)
    assert [p.name for p in one.path.parent.iterdir()] == ["seed-0"]


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    """Whatever holds the content: a frame, a table, a table in chunks, columns in another order."""
    tables = make_tables("stock", 0, 200, 12.0, Effect())
    for name, table in tables.items():
        expected = parquet_bytes(name, table)
        frame = table.to_pandas()
        chunked = pa.concat_tables([table.slice(0, 7), table.slice(7)])
        for other in (
            frame,
            frame[list(reversed(frame.columns))],
            chunked,
            table.replace_schema_metadata({"a": "b"}),
        ):
            assert parquet_bytes(name, other) == expected
        back = pq.read_table(pa.BufferReader(expected))
        assert back.schema.equals(arrow_schema(name), check_metadata=True)
        assert back.equals(table)


def test_a_column_that_may_be_empty_need_not_have_been_written(tmp_path: Path) -> None:
    """A run from before there was such a column can be read; one that lacks another column cannot."""
    path = record(tmp_path, ROWS).path
    whole = pq.read_table(path / "requests.parquet")
    pq.write_table(whole.drop_columns(["retry_after_s"]), path / "requests.parquet")
    assert load_arm(path).requests["retry_after_s"].isna().all()
    pq.write_table(whole.drop_columns(["tenant"]), path / "requests.parquet")
    with pytest.raises(UserError, match="lacks the column tenant"):
        load_arm(path)


def test_tables_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    frame = tables_of(ROWS)["requests"]
    with pytest.raises(ValueError, match="tenant"):
        parquet_bytes("requests", frame.drop(columns="tenant"))
    with pytest.raises(ValueError, match="extra"):
        parquet_bytes("requests", frame.assign(extra=1))
    with pytest.raises(ValueError, match="intended_ns"):
        parquet_bytes("requests", frame.assign(intended_ns=[float("nan"), 1.0]))


@pytest.mark.parametrize("name", [f"{table}.parquet" for table in TABLES])
def test_a_truncated_table_is_named(tmp_path: Path, name: str) -> None:
    place = record(tmp_path, ROWS).path
    blob = (place / name).read_bytes()
    for size in (0, 3, len(blob) // 2, len(blob) - 1):
        (place / name).write_bytes(blob[:size])
        with pytest.raises(UserError, match="run again") as raised:
            load_arm(place)
        assert str(place / name) in str(raised.value)
        assert "\n" not in str(raised.value)


def test_damaged_or_missing_papers_are_named(tmp_path: Path) -> None:
    place = record(tmp_path, ROWS).path
    (place / "manifest.json").write_text('{"arm": ')
    with pytest.raises(UserError, match=r"manifest\.json cannot be read"):
        load_arm(place)
    (place / "receipt.json").unlink()
    assert not is_complete(place)
    with pytest.raises(UserError, match=r"lacks receipt\.json"):
        load_arm(place)


CASES: list[tuple[str, Callable[[Any], Any], str]] = [
    ("plan.json", lambda p: p.clear(), "schema: field required"),
    ("plan.json", lambda p: p.update(arms=3), "arms: input should be a valid list"),
    ("plan.json", lambda p: p.update(seeds=["0"]), "seeds.0: input should be a valid integer"),
    ("plan.json", lambda p: p.update(seeds=[0, 0]), "seeds: one is named twice"),
    ("plan.json", lambda p: p["arms"].append(p["arms"][0]), "arms: one is named twice"),
    ("plan.json", lambda p: p["arms"][0].pop("patches"), "arms.0.patches: field required"),
    ("plan.json", lambda p: p["arms"][0].update(name="logs"), "arms.0: .*file of the run"),
    ("plan.json", lambda p: p["arms"][0].update(patch_plan="{"), "arms.0.patch_plan: invalid JSON"),
    ("stock/seed-0/manifest.json", lambda m: m.clear(), "schema: field required"),
    ("stock/seed-0/manifest.json", lambda m: m["workload"].pop("phases"), "workload.phases: field required"),
    (
        "stock/seed-0/manifest.json",
        lambda m: m["workload"]["phases"][0].update(end_ns=0),
        "workload.phases.0",
    ),
    ("stock/seed-0/manifest.json", lambda m: m["workload"]["tenants"].pop(0), "workload.tenants: .*gold-a"),
    ("stock/seed-0/manifest.json", lambda m: m.update(validity=[]), "validity"),
    ("stock/seed-0/receipt.json", lambda r: r.clear(), "schema: field required"),
    ("stock/seed-0/receipt.json", lambda r: r.update(hooks={"qos": {}}), "hooks.qos.hits: field required"),
]


@pytest.mark.parametrize(("name", "edit", "says"), CASES)
def test_papers_that_do_not_fit_are_named(
    tmp_path: Path, name: str, edit: Callable[[Any], Any], says: str
) -> None:
    plan(tmp_path, {"stock": []})
    record(tmp_path, ROWS)
    load_run(tmp_path)
    value = read_json(tmp_path / name)
    edit(value)
    write_json(tmp_path / name, value)
    with pytest.raises(UserError, match=f"{tmp_path / name}, ({says})") as raised:
        load_run(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_receipt_of_no_patches_names_no_plan(tmp_path: Path) -> None:
    assert record(tmp_path, ROWS, plan_sha256=None).receipt["plan_sha256"] is None


def test_files_are_not_taken_for_arms(tmp_path: Path) -> None:
    plan(tmp_path / "run", {"stock": []})
    record(tmp_path / "run", ROWS)
    (tmp_path / "run/summary.json").write_text("{}")
    # the folder of an arm is no run, whatever it is called
    (tmp_path / "other/plan.json/seed-0").mkdir(parents=True)
    assert find_runs(tmp_path) == [tmp_path / "run"]
    (tmp_path / "run/tuned").write_text("a file where an arm's folder would be")
    value = read_json(tmp_path / "run/plan.json")
    value["arms"].append({**value["arms"][0], "name": "tuned"})
    write_json(tmp_path / "run/plan.json", value)
    assert load_run(tmp_path / "run").missing == (("tuned", 0),)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file size makes the real write fail half-way, as a full disk does."""
    code = textwrap.dedent(
        f"""
        import resource, signal
        from pathlib import Path
        from harness.errors import RunFailed
        from harness.records import write_arm
        from tests.synthetic import Effect, make_papers, make_tables
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        tables = make_tables("stock", 0, 500, 12.0, Effect())
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
        try:
            write_arm(Path({str(tmp_path)!r}) / "run/stock/seed-0", tables, *make_papers("stock", 0, 500, 12.0))
        except RunFailed as error:
            print(error)
        """
    )
    root = Path(harness.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert "could not write" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert list((tmp_path / "run/stock").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_failed_run(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file in the way")
    with pytest.raises(RunFailed, match="could not write"):
        write_arm(tmp_path / "run/stock/seed-0", tables_of(ROWS), *papers())


def test_what_a_killed_write_left_is_cleared_and_never_read(tmp_path: Path) -> None:
    left = tmp_path / "stock/.seed-0.tmp-99"
    left.mkdir(parents=True)
    (left / "requests.parquet").write_bytes(b"half")
    run = plan(tmp_path, {"stock": []})
    assert load_run(run).missing == (("stock", 0),)
    record(tmp_path, ROWS)
    assert not left.exists()
    assert load_run(run).missing == ()


def test_finding_runs(tmp_path: Path) -> None:
    for name in ("b", "a", "reference"):
        plan(tmp_path / name, {"stock": []})
    assert [run.name for run in find_runs(tmp_path)] == ["a", "b"]
    assert find_runs(tmp_path / "reference") == [tmp_path / "reference"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="bench run"):
        find_runs(tmp_path / "empty")
    with pytest.raises(UserError, match="no folder"):
        find_runs(tmp_path / "nowhere")


def test_load_reads_an_arm_a_run_and_a_results_folder(tmp_path: Path) -> None:
    make_run(tmp_path / "one", arms=("stock", "tuned"), seeds=(0, 3), n=50, phase_s=5)
    whole = harness.load(tmp_path)
    assert whole.requests.groupby(["arm", "seed"]).size().to_dict() == {
        (arm, seed): 50 for arm in ("stock", "tuned") for seed in (0, 3)
    }
    assert len(harness.load(tmp_path / "one").steps) == len(whole.steps)
    assert set(harness.load(tmp_path / "one/tuned/seed-3").tokens["seed"]) == {3}


@pytest.mark.parametrize(
    "name",
    ["../up", "a/b", "", ".hidden", "a b", "logs", "plan.json", "summary.json", "Summary.md", "compare.md"],
)
def test_arm_names_that_are_no_folders(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="arm name"):
        arm_dir(tmp_path, name, 0)


def test_the_column_dictionary_is_fresh() -> None:
    root = Path(harness.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, root / "scripts/column_docs.py", "--check"], check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr
