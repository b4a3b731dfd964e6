"""`bench interference`: which runs it makes, that a tenant alone sends what it sent among the others, and the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness import plan as plans
from harness.arms import baseline, patched
from harness.atomic import write_json
from harness.errors import UserError
from harness.interference import folder_name, planned, prepare
from harness.papers import arm_name_fault
from harness.plan import RunPlan, WorkloadChoice
from harness.profiles import Profile, load_profile
from harness.worker import build_workload

BENCH = [sys.executable, "-c", "from harness.cli import main; main()"]


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
def profile() -> Profile:
    return load_profile("rtx4090-24g/llama-3.1-8b")


@pytest.fixture(scope="module")
def plan(profile: Profile) -> RunPlan:
    arms = (baseline(profile, "stock"), patched(profile, [], {}, name="narrow", flags={"max_num_seqs": 2}))
    return RunPlan(WorkloadChoice(phases="1", time_scale=0.05), profile, (0, 1), arms)


def test_the_tenant_is_named_in_a_plan_only_where_there_is_one(plan: RunPlan) -> None:
    assert "only_tenant" not in plan.workload.to_json()
    one = replace(plan, workload=replace(plan.workload, only_tenant="gold-a"))
    assert one.sha256 != plan.sha256
    assert plans.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert "file of the run" in arm_name_fault("alone")


def test_a_tenant_alone_sends_what_it_sends_among_the_others(plan: RunPlan) -> None:
    whole = build_workload(plan, 1)
    one = build_workload(replace(plan, workload=replace(plan.workload, only_tenant="silver-1")), 1)
    among = [r for r in whole.requests if r.tenant == "silver-1"]
    assert 0 < len(among) < len(whole.requests)
    assert [r.request_id for r in one.requests] == [r.request_id for r in among]
    for alone, beside in zip(one.requests, among, strict=True):
        assert alone.prompt.tolist() == beside.prompt.tolist()
        assert (alone.intended_ns, alone.cancel_ns) == (beside.intended_ns, beside.cancel_ns)
    assert [r.index for r in one.requests] == list(range(len(among)))
    assert [t.name for t in one.tenants] == ["silver-1"]
    assert one.phases == whole.phases
    assert one.sha256 != whole.sha256


def test_each_tenant_that_sent_something_is_run_on_tuneds_flags(
    plan: RunPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="no finished arm"):
        prepare(tmp_path, plan, 1)
    place = tmp_path / "narrow/seed-0"
    place.mkdir(parents=True)
    pd.DataFrame({"tenant": ["b", "a", "../x", "b"]}).to_parquet(place / "requests.parquet")
    monkeypatch.setattr("harness.interference.is_complete", Path.is_dir)
    made = prepare(tmp_path, plan, 1)
    assert [folder.relative_to(tmp_path).as_posix() for _, folder in made] == [
        "alone/%2E.%2Fx",
        "alone/a",
        "alone/b",
    ]
    for part, _ in made:
        assert [arm.name for arm in part.arms] == ["tuned"]  # which the run itself does not have
        assert part.seeds == (0,)
    assert [part.workload.only_tenant for part, _ in made] == ["../x", "a", "b"]


@pytest.mark.parametrize(
    ("tenant", "folder"), [("gold-a", "gold-a"), ("..", "%2E."), ("a/b", "a%2Fb"), ("é", "%C3%A9"), ("", "%")]
)
def test_any_tenant_has_a_folder(tenant: str, folder: str) -> None:
    assert folder_name(tenant) == folder


def test_more_seeds_than_the_run_has_are_refused(plan: RunPlan, tmp_path: Path) -> None:
    write_json(tmp_path / "plan.json", plan.to_json())
    assert planned(tmp_path, 2) == plan
    with pytest.raises(UserError, match=r"--seeds 3: the run .* has 2"):
        planned(tmp_path, 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    done = bench(
        "run", "--only-arms", "tuned,mlfq", "--enable", "mlfq", "--phase", "1", "--seeds", "1", "--time-scale", "0.1",
        "--jobs", "2", "--out", str(folder / "demo"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    done = bench("interference", str(folder / "demo"), "--jobs", "2", "--json", str(folder / "out.json"))
    assert done.returncode == 0, done.stderr + done.stdout
    assert "times as long as alone" in done.stdout
    return folder / "demo"


def test_each_tenant_is_an_ordinary_run_of_its_own(run: Path) -> None:
    among = pd.read_parquet(run / "tuned/seed-0/requests.parquet")
    folders = sorted(path.name for path in (run / "alone").iterdir())
    assert folders == sorted(set(among["tenant"]))
    for name in folders:
        own = pd.read_parquet(run / "alone" / name / "tuned/seed-0/requests.parquet")
        assert own["request_id"].tolist() == among.loc[among["tenant"] == name, "request_id"].tolist()
        manifest = read(run / "alone" / name / "tuned/seed-0/manifest.json")
        assert manifest["workload"]["only_tenant"] == name
        assert manifest["engine_flags"] == read(run / "tuned/seed-0/manifest.json")["engine_flags"]


def ttft_ms(place: Path) -> pd.Series[float]:
    """TTFT of what was served, by request."""
    table = pd.read_parquet(place / "requests.parquet").set_index("request_id")
    served = table[table["status"].isin(["ok", "cancelled"])]
    return ((served["first_token_ns"] - served["intended_ns"]) / 1e6).dropna()


def test_the_factors_are_those_of_the_records(run: Path) -> None:
    entries = {(one["tenant"], one["arm"]): one for one in read(run.parent / "out.json")["slowdowns"]}
    for (tenant, arm), one in entries.items():
        alone, beside = ttft_ms(run / "alone" / tenant / "tuned/seed-0"), ttft_ms(run / arm / "seed-0")
        both = alone.index.intersection(beside.index)
        assert one["ttft"]["n"] == len(both) > 0
        assert one["ttft"]["times"] == pytest.approx(beside[both].mean() / alone[both].mean())
    assert min(one["ttft"]["times"] for one in entries.values()) > 0.9
    assert max(one["ttft"]["times"] for one in entries.values()) > 1.05


def test_again_nothing_is_run_and_the_report_shows_it(run: Path, tmp_path: Path) -> None:
    stamps = {path: path.stat().st_mtime_ns for path in run.rglob("*.parquet")}
    done = bench("interference", str(run))
    assert done.returncode == 0, done.stderr
    assert "are already there" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*.parquet")} == stamps
    done = bench("report", str(run), "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Interference: beside the others against alone" in page
    assert "Waiting requests by level" in page
    assert "fig-level-1" in page


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path) -> None:
    done = bench("interference", str(tmp_path))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
