"""`scripts/kv_targets.py`: finds arms by their patches, says what a run lacks, and judges what is there.

Not here: the figures themselves (tests/metrics).
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

from harness.atomic import write_json
from harness.records import arm_dir, write_arm
from scripts.kv_rows.cold import cold_pairs
from scripts.kv_rows.run import ABSENT
from scripts.kv_rows.switch import MOMENTS
from tests.hand_records import MS, S, papers, request, tables_of

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "kv_targets.py"
PHASES = [(1, 0.0, 20.0), (2, 20.0, 40.0)]


@pytest.fixture(scope="module")
def targets() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kv_targets", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kv_targets"] = module
    spec.loader.exec_module(module)
    return module


def make(folder: Path, arms: dict[str, dict[str, Any]]) -> Path:
    """A run of two phases; of each arm its patches, cached tokens of 100, knobs, gauges and bytes moved."""
    entries = []
    for name, given in arms.items():
        patches = given.get("patches", [])
        entries.append({"name": name, "base": "stock", "patches": patches, "knobs": given.get("knobs", {})})
        for seed in (0, 1):
            rows = [
                request(
                    400.0 * i,
                    phase=1 if i < 50 else 2,
                    chunks=[(400.0 * i + given.get("ttft", 100), 1)],
                    scheduled_ms=400.0 * i + 5,
                    cached_tokens=given.get("cached", 40),
                    preemptions=1,
                    recomputed_tokens=given.get("lost", 50),
                )
                for i in range(100)
            ]
            tables: dict[str, Any] = dict(tables_of(rows))
            if "moved" in given:
                tables["transfers"] = pd.DataFrame(
                    {"begin_ns": [S], "end_ns": [S + MS], "link": ["d2h"], "size_bytes": [given["moved"]]}
                )
            manifest, receipt = papers(
                name, seed, patches=patches, phases=PHASES, metrics=given.get("gauges", {})
            )
            manifest["workload"]["slo_factor"] = 2.0
            if "bound" in given:
                sums = {"prompt_tokens": 100, "cached_tokens": given.get("cached", 40)}
                sums |= dict.fromkeys(
                    ("infinite_tokens", "whole_pool_tokens", "clairvoyant_tokens"), given["bound"]
                )
                manifest["cache_bounds"] = {
                    "block_tokens": 16,
                    "blocks": 10,
                    "estimate": [],
                    "all": sums,
                    "by_phase": {},
                    "by_tenant": {},
                }
            write_arm(arm_dir(folder, name, seed), tables, manifest, receipt)
    write_json(folder / "plan.json", {"schema": 1, "run": folder.name, "seeds": [0, 1], "arms": entries})
    return folder


ARMS: dict[str, dict[str, Any]] = {
    "tuned": {"cached": 40, "bound": 50},
    "tuned-offload": {"cached": 50, "moved": 1000},
    "anything": {"patches": ["slru", "cacheaware", "shield"], "cached": 45, "bound": 60},
    "shield": {"patches": ["shield"], "lost": 10},
    "tiering": {
        "patches": ["tiering"],
        "cached": 50,
        "moved": 800,
        "gauges": {"tiering": {"own_ms_p99": 130.0, "restore_ms_p99": 40.0, "recovery_ms_p99": 210.0}},
    },
    "cacheaware": {
        "patches": ["cacheaware"],
        "knobs": {"cacheaware": {"overtakes_requests": 8}},
        "gauges": {"cacheaware": {"cacheaware_overtakes_max": 9}},
    },
    "version": {"patches": ["version"]},
    "warmup": {"patches": ["warmup"], "ttft": 50, "gauges": {"warmup": {"own_traffic_steps": 0}}},
}


def test_each_target_is_judged_or_said_to_be_absent(targets: ModuleType, tmp_path: Path) -> None:
    run = targets.Run(make(tmp_path / "run", ARMS))
    told = tmp_path / "conversation.json"
    rates = {(0, b, p): 0.1 if p == "lru" else 0.13 for b in (2500, 5000, 10000) for p in ("lru", "slru")}
    rates |= {(1, 2500, "lru"): 0.1, (1, 2500, "slru"): 0.12}
    rows = [{"scan_mix": s, "blocks": b, "policy": p, "hit_rate": r} for (s, b, p), r in rates.items()]
    write_json(told, {"trace": "conversation.jsonl", "rows": rows})
    perf = tmp_path / "perf.json"
    write_json(perf, {"running": 256, "waiting": 5000, "ratio": 1.3, "blocks": 20_000})
    found = {row.what: row for row in targets.rows(run, [told], [perf])}

    def met(start: str) -> bool | None:
        (row,) = [row for what, row in found.items() if what.startswith(start)]
        return row.met

    # +12.5%, and 75% of the bound.
    assert met("slru,cacheaware,shield: hit rate") is False
    assert "75.0% of the bound" in found["slru,cacheaware,shield: hit rate"].found
    assert met("slru: hit rate on a trace against LRU, conversation.jsonl") is False
    assert met("shield: tokens recomputed") is True
    assert met("shield+tiering: the same") is None and found["shield+tiering: the same"].found == ABSENT
    assert met("tiering: recovery beyond queueing") is False
    assert met("tiering against tuned-offload: bytes moved") is True
    assert met("tiering against tuned-offload: hit rate") is True
    assert met("cacheaware: most overtakes") is False and met("cacheaware: the longest wait") is True
    for moment in MOMENTS:
        recovery = f"version: gold-a's hit rate back to 95%, {moment}"
        assert found[recovery].met is True
        # This run's traffic was made up, so that nobody can say what an infinite cache had found.
        assert "not to be told" in found[f"{recovery}: infinite cache"].found
        assert run.untold, "and why"
    assert met("warmup: TTFT of the first 10 s, p90") is True
    assert met("warmup: TTFT of what was cold in tuned in the first 10 s (no hit at all), p90") is None
    assert met("warmup: passes") is True
    assert met("cancel: gold-b's hit rate") is None and found["all of them: the same figures"].found == ABSENT
    assert met("all KV patches") is False
    assert "clairvoyant 0.5" in found["tuned: hit rate and its bounds"].found
    shield = found["shield: tokens recomputed after preemption"]
    assert shield.found.startswith("-80.0%") and shield.interval.startswith("[-80.0")


def test_a_cell_of_several_bounds_is_met_by_either(targets: ModuleType, tmp_path: Path) -> None:
    arms = {
        "tuned": ARMS["tuned"],
        "x": {"patches": ["shield", "cacheaware", "slru"], "cached": 45, "bound": 50},
    }
    row = targets.rows(targets.Run(make(tmp_path / "run", arms)))[0]
    assert row.met is True and "90.0% of the bound" in row.found


def test_cold_requests_are_those_that_the_baseline_found_nothing_for() -> None:
    rows = pd.DataFrame(
        {
            "request_id": ["doc", "warm", "late", "chat", "gone"],
            "intended_ns": [S, 2 * S, 11 * S, 3 * S, 4 * S],
            "first_token_ns": [float(S + 400 * MS), 2.1 * S, 11.1 * S, float(3 * S + 100 * MS), float("nan")],
            "cached_tokens": [0.0, 32.0, 0.0, 0.0, 0.0],
            "measured": True,
            "short": [False, True, True, True, True],
        }
    )
    sooner = rows.assign(first_token_ns=rows["first_token_ns"] - 50 * MS).sample(frac=1, random_state=1)
    pairs = cold_pairs([rows, rows], [sooner, rows], 0)
    assert sorted(zip(pairs.before, pairs.after, strict=True)) == [
        (100, 50),
        (100, 100),
        (400, 350),
        (400, 400),
    ]
    assert pairs.documents.sum() == 2
    chats = pairs.part(documents=False)
    # The median of two by the nearest rank is the smaller.
    assert chats.change(50) == (-50.0, -50.0, 0.0)
    assert cold_pairs([rows], [sooner], 60 * S).change(90) is None


def test_the_command(tmp_path: Path) -> None:
    run = make(tmp_path / "run", {"tuned": ARMS["tuned"]})
    out = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(run), "--json", str(out)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "not in this run" in done.stdout and "0 of 0 met" in done.stdout
    assert len(json.loads(out.read_text())) > 15
    bad = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path / "no")], capture_output=True, text=True)
    assert bad.returncode == 2 and len(bad.stderr.splitlines()) == 1
