"""Guards how a live run is set against its prediction: errors and signs, on runs whose truth is known.

The "live" runs are the virtual engine's own, so that the right answer is exact. Does not guard what a real server shows
(docs/LIVE.md has the figures).
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness import run as runs
from harness import validate_live
from harness.arms import Arm, baseline, patched
from harness.assumptions import BASE
from harness.atomic import json_text
from harness.cli import main
from harness.errors import RunFailed, UserError
from harness.live_plan import LiveSettings, Machine
from harness.plan import RunPlan, WorkloadChoice
from harness.profiles import load_profile
from harness.profiles.profile import FivePhase
from harness.records import write_arm
from harness.worker import build_workload, run_virtual

PROFILE = load_profile("rtx4090-24g")
MACHINE = Machine(
    name="cpu/some-model",
    title="some processor",
    stock=dict(PROFILE.stock) | {"async_scheduling": True},
    tuned={"max_num_seqs": 64},
    five_phase=FivePhase(rate_scale=[0.3] * 5, slo_factor=10.0, comment="by hand"),
    max_model_len=4096,
)
SETTINGS = LiveSettings(
    model=os.fspath(PROFILE.model_dir),
    model_name="some-model",
    model_sha256="a folder",
    vocab_size=30_000,
    kv_cache_bytes=0,
    again="tuned-again",
    again_of="tuned",
)
TUNED = baseline(MACHINE, "tuned")
SEATS = patched(MACHINE, (), {}, name="seats-2", flags={"max_num_seqs": 2})
PLAN = RunPlan(
    WorkloadChoice(phases="1", time_scale=0.12, length_scale=0.1),
    MACHINE,
    (0, 1),
    (TUNED, SEATS, replace(TUNED, name="tuned-again")),
    live=SETTINGS,
)


def record(folder: Path, *, slower: float = 1.0, arms: tuple[Arm, ...] = PLAN.arms) -> None:
    """What a run of a machine `slower` times the profile would have left."""
    runs.prepare(PLAN, folder)
    for seed in PLAN.seeds:
        work = build_workload(PLAN, seed)
        for arm in arms:
            run, receipt, _ = run_virtual(PROFILE, arm, work, replace(BASE, efficiency=1 / slower))
            manifest = {"arm": arm.name, "telemetry": {"kv_blocks": PROFILE.kv_blocks}}
            write_arm(folder / arm.name / f"seed-{seed}", run.tables, manifest, receipt)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact") / "run"
    record(folder)
    return folder


@pytest.fixture(scope="module")
def exact(recorded: Path) -> validate_live.LiveValidation:
    return validate_live.validate(recorded, PROFILE)


def test_the_same_engine_is_predicted_exactly(exact: validate_live.LiveValidation) -> None:
    assert {one.arm for one in exact.errors} == {"tuned", "seats-2", "tuned-again"}
    assert all(one.error_pct == 0 and one.requests > 20 for one in exact.errors)
    assert exact.mean_error_pct("ttft_ms") == 0
    # By default each arm against the baseline that is measured twice; the second one decides nothing.
    assert {(d.base, d.arm) for d in exact.decisions} == {("tuned", "seats-2")}
    assert all(d.agrees and d.live_pct == pytest.approx(d.virtual_pct) for d in exact.decisions)
    assert json.loads(json_text(exact.to_json()))["mean_error_pct"]["e2e_ms"] == 0
    ttft = next(d for d in exact.decisions if d.figure == "ttft_ms")
    assert ttft.live_pct > 0 and ttft.low <= ttft.live_pct <= ttft.high


def test_a_slower_machine_shows_as_an_error(tmp_path: Path) -> None:
    record(tmp_path / "run", slower=1.3, arms=(TUNED,))
    found = validate_live.validate(tmp_path / "run", PROFILE)
    errors = {one.figure: one.error_pct for one in found.errors}
    # 1 / 1.3 - 1 or more: what takes longer also shares steps with more that arrives.
    assert all(-45 < error < -22 for error in errors.values()), errors
    assert found.decisions == ()


def test_a_pair_may_be_named_and_turned_round(recorded: Path) -> None:
    found = validate_live.validate(recorded, PROFILE, [("seats-2", "tuned")])
    assert all(d.live_pct <= 0 for d in found.decisions if d.figure == "ttft_ms")
    with pytest.raises(UserError, match="no finished arm 'qos'; it has tuned, seats-2, tuned-again"):
        validate_live.validate(recorded, PROFILE, [("tuned", "qos")])


def test_an_interval_holds_the_change_and_shrinks_with_its_spread() -> None:
    rng = np.random.default_rng(3)
    times = np.arange(400) * 250_000_000
    before = rng.uniform(90, 110, 400)
    low, high = validate_live._interval(times, before, before * 1.1)
    assert low == pytest.approx(10) and high == pytest.approx(10)
    low, high = validate_live._interval(times, before, rng.uniform(90, 110, 400))
    assert low < 0 < high
    assert not validate_live.Decision("a", "b", "ttft_ms", 0.1, low, high, -5.0).decides
    assert validate_live.Decision("a", "b", "ttft_ms", 9.0, 3.0, 15.0, -5.0, 8.0).decides
    # Two servers with the same flags differ by more than that.
    assert not validate_live.Decision("a", "b", "ttft_ms", 9.0, 3.0, 15.0, -5.0, 10.0).decides


def test_what_cannot_be_validated_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.prepare(PLAN, tmp_path / "empty")
    with pytest.raises(RunFailed, match="no arm of it is finished"):
        validate_live.validate(tmp_path / "empty", PROFILE)
    for words, said in (
        ([str(tmp_path / "empty")], "name what predicts it, --profile DIR"),
        ([str(tmp_path / "empty"), "--profile", "tight", "--pair", "one"], "give two arms as BASE:ARM"),
        ([str(tmp_path), "--pair", "a:b"], "is of a live run"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["validate", *words])
        assert end.value.code == 2
        assert said in capsys.readouterr().err
    virtual = replace(PLAN, live=None, profile=PROFILE)
    runs.prepare(virtual, tmp_path / "virtual")
    with pytest.raises(UserError, match="ran on the virtual engine"):
        validate_live.validate(tmp_path / "virtual", PROFILE)
