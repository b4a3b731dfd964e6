"""summary.json: schema 1, equal for equal runs, honest about what is missing. On made-up records."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.atomic import write_json
from harness.errors import RunFailed, UserError
from harness.records import read_json
from reports.summary import build_summary, raise_if_invalid, write_summary
from tests.synthetic import Effect, make_run

ARMS = ("stock", "tuned", "qos+mlfq+slru")
VERDICTS = {"better", "worse", "same", "undetermined"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("results") / "demo", seeds=(0, 1), n=600)


@pytest.fixture(scope="module")
def summary(run: Path) -> dict[str, Any]:
    return write_summary(run)


def test_schema(summary: dict[str, Any], run: Path) -> None:
    assert read_json(run / "summary.json") == summary
    assert (summary["schema"], summary["run"], summary["valid"], summary["reasons"]) == (1, "demo", True, [])
    assert [arm["name"] for arm in summary["arms"]] == list(ARMS)
    assert summary["profile"]["name"] == "rtx4090-24g/llama-3.1-8b"
    assert "sensitivity" not in summary
    for arm in summary["arms"]:
        assert arm["seeds"] == [0, 1]
        assert sorted(arm["schedule_digest"]) == ["0", "1"]
        assert list(arm["by_phase"]) == ["1", "2", "3", "4", "5", "3-5"]
        assert set(arm["by_tenant"]) == set(arm["by_tenant_phase"])
        assert set(arm["by_tenant_phase"]["gold-a"]) == {"1", "2", "3", "4", "5", "3-5"}
        assert "tier:gold/phase:3-5" in arm["by_scope"]
        for metric in arm["metrics"].values():
            assert {"value", "ci95", "unit", "n"} <= set(metric)
            if metric["ci95"] is not None and metric["value"] is not None:
                assert metric["ci95"][0] <= metric["value"] <= metric["ci95"][1]
            assert metric["value"] is not None or metric["reason"]
    patched = summary["arms"][2]
    assert patched["hooks"] == {"qos": {"hits": 2400}, "mlfq": {"hits": 1600}, "slru": {"hits": 800}}
    assert patched["metrics"]["qos_touched"]["value"] == 10.5


def test_comparisons_cover_both_baselines_and_all_kinds_of_scope(summary: dict[str, Any]) -> None:
    rows = summary["comparisons"]
    keys = {(c["arm"], c["baseline"], c["scope"], c["metric"]) for c in rows}
    assert len(keys) == len(rows)
    assert {c["verdict"] for c in rows} <= VERDICTS
    for baseline in ("stock", "tuned"):
        for scope in (
            "all",
            "phase:3",
            "phase:3-5",
            "tier:gold",
            "tenant:silver-0",
            "tenant:silver-0/phase:3",
        ):
            assert ("qos+mlfq+slru", baseline, scope, "slo_attainment") in keys
    assert ("tuned", "stock", "all", "ttft_ms_p99") in keys
    assert not [key for key in keys if key[0] == key[1] or key[0] == "stock"]
    # what was planted is found
    found = {(c["arm"], c["baseline"], c["scope"], c["metric"]): c for c in rows}
    assert found["tuned", "stock", "phase:3-5", "short_ttft_ms_p50"]["verdict"] == "better"


def test_only_run_facts_differ_between_equal_runs(summary: dict[str, Any], tmp_path: Path) -> None:
    other = make_run(tmp_path / "demo", seeds=(0, 1), n=600)
    for path in other.glob("*/*/manifest.json"):
        manifest = read_json(path)
        manifest["run_facts"] = {
            "wall_s": 99.0,
            "upstream_s": 1.0,
            "host": "elsewhere",
            "started": "2027-01-01",
        }
        write_json(path, manifest)
    again = build_summary(other)
    assert again["run_facts"]["host"] == "elsewhere"
    assert {**again, "run_facts": 0} == {**summary, "run_facts": 0}


def test_a_resumed_run_equals_an_uninterrupted_one(
    summary: dict[str, Any], run: Path, tmp_path: Path
) -> None:
    """Half the arms and seeds are there; the rest is added; every byte but the papers' run facts is the same."""
    half = tmp_path / "demo"
    shutil.copytree(run, half)
    shutil.rmtree(half / "tuned/seed-1")
    shutil.rmtree(half / "qos+mlfq+slru")
    partial = build_summary(half)
    assert not partial["valid"]
    by_name = {arm["name"]: arm for arm in partial["arms"]}
    assert by_name["stock"]["valid"]
    assert [r["code"] for r in by_name["tuned"]["reasons"] if r["code"] == "missing"] == ["missing"]
    assert by_name["qos+mlfq+slru"]["metrics"] == {}
    assert by_name["qos+mlfq+slru"]["seeds"] == []
    assert all(c["verdict"] == "undetermined" for c in partial["comparisons"])
    fresh = make_run(tmp_path / "fresh/demo", seeds=(0, 1), n=600)
    shutil.copytree(fresh / "tuned/seed-1", half / "tuned/seed-1")
    shutil.copytree(fresh / "qos+mlfq+slru", half / "qos+mlfq+slru")
    for path in run.glob("*/*/*.parquet"):
        assert (half / path.relative_to(run)).read_bytes() == path.read_bytes()
    whole = build_summary(half)
    # a copied file has another time of its last change
    for one in (whole, expected := copy.deepcopy(summary)):
        assert len(one["run_facts"].pop("fingerprint")) == 64
    assert whole == expected


def test_figures_have_six_digits(summary: dict[str, Any]) -> None:
    def floats(value: Any) -> list[float]:
        if isinstance(value, float):
            return [value]
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return [found for item in items for found in floats(item)]

    found = floats(summary["arms"])
    assert len(found) > 1000
    assert all(float(f"{x:.6g}") == x for x in found)
    json.dumps(summary, allow_nan=False)


def test_a_run_with_one_phase_and_one_seed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "small", arms=("stock", "qos"), seeds=(7,), n=300, phase_s=12)
    for path in run.glob("*/*/manifest.json"):
        manifest = read_json(path)
        for phase in manifest["workload"]["phases"]:
            phase["measured"] = phase["number"] == 4
        write_json(path, manifest)
    summary = build_summary(run)
    assert list(summary["arms"][0]["by_phase"]) == ["4"]
    assert summary["arms"][0]["metrics"]["offered"]["value"] < 150
    assert {c["baseline"] for c in summary["comparisons"]} == {"stock"}


def test_what_makes_arms_invalid(run: Path, tmp_path: Path) -> None:
    broken = tmp_path / "demo"
    shutil.copytree(run, broken)

    def change(path: str, edit: Any) -> None:
        value = copy.deepcopy(read_json(broken / path))
        edit(value)
        write_json(broken / path, value)

    change("qos+mlfq+slru/seed-0/receipt.json", lambda r: r.update(plan_sha256="of another plan"))
    change("stock/seed-1/manifest.json", lambda m: m["workload"].update(sha256="another trace"))
    bad = {"valid": False, "reasons": [{"code": "digest_mismatch", "text": "said so"}]}
    change("tuned/seed-0/manifest.json", lambda m: m.update(validity=bad))
    summary = build_summary(broken)
    codes = {
        arm["name"]: {r["code"] for r in arm["reasons"]} - {"too_few_samples"} for arm in summary["arms"]
    }
    assert codes == {"stock": set(), "tuned": {"digest_mismatch"}, "qos+mlfq+slru": {"receipt_mismatch"}}
    assert {r["code"] for r in summary["reasons"]} == {"trace_mismatch", "invalid_arms"}
    assert not summary["valid"]
    assert all(c["verdict"] == "undetermined" and c["reason"] for c in summary["comparisons"])


def test_an_invalid_run_is_raised(summary: dict[str, Any], run: Path, tmp_path: Path) -> None:
    raise_if_invalid(summary)
    half = tmp_path / "demo"
    shutil.copytree(run, half)
    shutil.rmtree(half / "tuned")
    with pytest.raises(RunFailed, match=r"run demo is INVALID: tuned: seed 0 .*not been run") as raised:
        raise_if_invalid(build_summary(half))
    assert "\n" not in str(raised.value)
    # what is only to be known beside the figures is not named as the reason
    few = make_run(tmp_path / "few", arms=("stock",), seeds=(0, 1), n=100)
    change_json(few / "stock/seed-1/manifest.json", lambda m: m.update(validity={"valid": False}))
    with pytest.raises(RunFailed, match="stock: seed 1: the run marked itself invalid"):
        raise_if_invalid(build_summary(few))


def change_json(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    value = read_json(path)
    edit(value)
    write_json(path, value)


def test_a_run_without_records_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "bare", arms=("stock",), seeds=(0,), n=50, phase_s=5)
    shutil.rmtree(run / "stock")
    with pytest.raises(UserError, match="no finished arm"):
        build_summary(run)


def test_a_p99_of_few_samples_is_marked_and_decides_nothing(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "few", arms=("stock", "plain"), seeds=(0,), n=200, effects={"plain": Effect(step=3.0)}
    )
    summary = build_summary(run)
    assert summary["arms"][0]["metrics"]["ttft_ms_p99"]["few_samples"] is True
    rows = {(c["scope"], c["metric"]): c for c in summary["comparisons"]}
    assert rows["all", "tpot_ms_p99"]["verdict"] == "undetermined"
    assert "459" in rows["all", "tpot_ms_p99"]["reason"]
    assert rows["all", "tpot_ms_p50"]["verdict"] == "worse"
