"""Guards a live run from the plan to the report: two real servers in turn, every witness, one record each.

SmolLM2 where it is in the cache, else two layers of random Llama. Whether the machine was quiet enough for the figures
to be believed is not asked: a busy one gives `client_stall`, as it should.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from rich.console import Console

from harness import live_run
from harness.arms import baseline, patched
from harness.engines.live.served import served_model
from harness.errors import RunFailed
from harness.live_plan import LiveSettings, Machine
from harness.plan import RunPlan, WorkloadChoice
from harness.profiles.profile import FivePhase
from harness.records import load_run
from reports.build import render_run
from reports.summary import write_summary
from tests.live import served_model as models

PATCHES = ("qos", "mlfq", "slru")
ARM = "qos+mlfq+slru"
KV_CACHE_BYTES = 2**28
# What a busy machine does to a run, and no fault of the code.
CONDUCT = {"client_stall", "warmup_short"}

pytestmark = [pytest.mark.slow, pytest.mark.live]


def plan_for(folder: Path, *, again: bool = False) -> RunPlan:
    """Nine seconds of the steady phase, small requests, rates that any machine keeps up with."""
    model = served_model(folder)
    longest = min(2048, model.max_tokens)
    machine = Machine(
        name=f"cpu/{model.name}",
        title="this machine",
        stock={"max_model_len": longest, "block_size": 32, "max_num_batched_tokens": 512, "max_num_seqs": 16},
        tuned={"max_num_batched_tokens": 256, "scheduling_policy": "priority"},
        five_phase=FivePhase(rate_scale=[0.08] * 5, slo_factor=10.0, comment="by hand"),
        max_model_len=longest,
    )
    settings = LiveSettings(
        model=os.fspath(folder),
        model_name=model.name,
        model_sha256=model.sha256,
        vocab_size=model.vocab_size,
        kv_cache_bytes=KV_CACHE_BYTES,
        warmup_s=1.0,
    )
    arms = (baseline(machine, "tuned"), patched(machine, PATCHES, {}))
    choice = WorkloadChoice(phases="1", time_scale=0.15, length_scale=0.05)
    return RunPlan(choice, machine, (0,), arms, live=settings)


@dataclass(frozen=True)
class Ran:
    """A finished run: its folder, its plan, what was printed."""

    folder: Path
    plan: RunPlan
    said: str


@pytest.fixture(scope="module")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make_small_llama(tmp_path_factory.mktemp("small-llama") / "small-llama")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, small_llama: Path) -> Ran:
    folder = tmp_path_factory.mktemp("live") / "run"
    plan = plan_for(models.cached_smollm2() or small_llama)
    out = tmp_path_factory.mktemp("said") / "said.txt"
    with models.alone(), out.open("w", encoding="utf-8") as file:
        failed = live_run.execute(plan, folder, ["bench", "run"], Console(file=file, width=200))
    said = out.read_text(encoding="utf-8")
    assert failed == [], said
    return Ran(folder, plan, said)


def manifests(ran: Ran) -> dict[str, dict[str, Any]]:
    return {
        arm.name: json.loads((ran.folder / arm.name / "seed-0" / "manifest.json").read_text())
        for arm in ran.plan.arms
    }


@pytest.mark.smoke
def test_every_request_is_told_by_client_and_engine_alike(ran: Ran) -> None:
    run = load_run(ran.folder)
    assert run.missing == ()
    for (record,) in run.arms.values():
        requests, tokens, steps = record.requests, record.tokens, record.steps
        assert len(requests) >= 20
        assert set(requests["status"]) <= {"ok", "cancelled"}
        served = requests[requests["status"] == "ok"]
        assert (served["output_tokens"] == served["output_tokens_planned"]).all()
        assert (served["prompt_tokens_counted"] == served["prompt_tokens"]).all()
        times = served[
            ["intended_ns", "sent_ns", "scheduled_ns", "first_token_ns", "last_token_ns", "end_ns"]
        ]
        assert (times.diff(axis=1).iloc[:, 1:] >= 0).all().all()
        assert len(tokens) == requests["output_tokens"].sum()
        # each token that was served went through a step of the engine's own account
        assert steps["t_ns"].is_monotonic_increasing and (steps["t_ns"] >= 0).all()
        assert steps["prefill_tokens"].sum() + steps["decode_tokens"].sum() >= tokens.shape[0]
        assert served["cached_tokens"].sum() > 0
        batches = pd.read_parquet(record.path / "batches.parquet")
        assert len(batches) == len(steps)


@pytest.mark.smoke
def test_the_manifest_says_how_the_run_was_conducted(ran: Ran) -> None:
    for name, manifest in manifests(ran).items():
        codes = {reason["code"] for reason in manifest["validity"]["reasons"] if reason["fatal"]}
        assert codes <= CONDUCT, manifest["validity"]
        assert manifest["validity"]["valid"] == (not codes)
        assert manifest["engine"] == "live" and manifest["plan_sha256"] == ran.plan.sha256
        assert manifest["server"]["ended"]["clean"], manifest["server"]
        assert manifest["server"]["roles"][0] == "APIServer"
        assert (manifest["telemetry"]["engines"], manifest["telemetry"]["strangers"]) == (1, 0)
        assert manifest["telemetry"]["overhead"] < 0.01
        assert manifest["prometheus"]["faults"] == [] and manifest["prometheus"]["scrapes"] >= 2
        assert manifest["prometheus"]["increase"]["vllm:generation_tokens"] > 0
        assert manifest["gpu"]["absent"] or manifest["gpu"]["gpus"]
        assert manifest["host"]["cores"] >= 1 and name in ran.said
        assert "Bearer" not in json.dumps(manifest) and "pb-" not in json.dumps(manifest["server"])


@pytest.mark.smoke
def test_the_patches_were_there_and_fired(ran: Ran) -> None:
    receipt = json.loads((ran.folder / ARM / "seed-0" / "receipt.json").read_text())
    plan = ran.plan.arm(ARM).plan
    assert plan is not None and receipt["plan_sha256"] == plan.sha256()
    assert all(receipt["hooks"][name]["hits"] > 0 for name in PATCHES)
    bare = json.loads((ran.folder / "tuned" / "seed-0" / "receipt.json").read_text())
    assert bare["hooks"] == {} and bare["plan_sha256"] is None


@pytest.mark.smoke
def test_the_report_names_engine_noise_and_conduct(ran: Ran) -> None:
    summary = write_summary(ran.folder)
    stalled = any(not arm["valid"] for arm in summary["arms"])
    assert summary["valid"] != stalled
    render_run(ran.folder)
    page = (ran.folder / "report.html").read_text(encoding="utf-8")
    text = (ran.folder / "summary.md").read_text(encoding="utf-8")
    assert "a real server of vLLM" in page and "no A/A pair was run" in text
    assert "Live figures vary from run to run" in text and "virtual clock" not in text
    if stalled:
        assert "INVALID" in text and "<s " in page


@pytest.mark.smoke
def test_what_is_there_is_kept(ran: Ran) -> None:
    before = {path: path.stat().st_mtime_ns for path in ran.folder.glob("*/seed-0/*")}
    assert live_run.execute(ran.plan, ran.folder, ["bench"], Console(quiet=True)) == []
    assert before == {path: path.stat().st_mtime_ns for path in ran.folder.glob("*/seed-0/*")}


def test_a_server_that_dies_fails_its_arm_and_the_others_go_on(small_llama: Path, tmp_path: Path) -> None:
    plan = plan_for(small_llama)
    folder = tmp_path / "run"
    victim: list[str] = []

    def kill_first_engine() -> None:
        """Once it serves: when its log shows that requests come in, half a second later."""
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and not victim:
            for process in psutil.Process().children(recursive=True):
                try:
                    title = "".join(process.cmdline()[:1])
                    begun = any(
                        child
                        for child in psutil.Process().children()
                        if "client.worker" in " ".join(child.cmdline())
                    )
                except psutil.Error:
                    continue
                if title.startswith("VLLM::EngineCore") and begun:
                    time.sleep(3)
                    process.send_signal(signal.SIGKILL)
                    victim.append(title)
                    break
            time.sleep(0.2)

    killer = threading.Thread(target=kill_first_engine, daemon=True)
    with models.alone():
        killer.start()
        failed = live_run.execute(plan, folder, ["bench"], Console(quiet=True))
    assert victim and len(failed) == 1
    assert "EngineCore" in failed[0] and "server crashed" in failed[0]
    shown: list[dict[str, Any]] = []
    with pytest.raises(RunFailed, match="1 of 2 runs failed"):
        live_run.finish(plan, folder, failed, lambda: shown.append(write_summary(folder)))
    wrong = [arm for arm in shown[0]["arms"] if any(r["code"] == "server_crashed" for r in arm["reasons"])]
    assert len(wrong) == 1 and not wrong[0]["valid"] and not shown[0]["valid"]
    assert sum(1 for _ in folder.glob("*/seed-0/manifest.json")) == 1
