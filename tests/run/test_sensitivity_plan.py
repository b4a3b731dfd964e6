"""Which runs recompute a verdict: assumptions, plans and folders. Nothing is run here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness import plan as plans
from harness.arms import Arm, baseline, patched
from harness.assumptions import BASE, Assumptions, unfit, variations
from harness.atomic import write_json
from harness.errors import UserError
from harness.papers import arm_name_fault
from harness.plan import RunPlan, WorkloadChoice
from harness.profiles import Profile, load_profile
from harness.run import discard
from harness.sensitivity import Choice, planned, prepare, settle


@pytest.fixture(scope="module")
def profile() -> Profile:
    return load_profile("rtx4090-24g/llama-3.1-8b")


@pytest.fixture(scope="module")
def plan(profile: Profile) -> RunPlan:
    listed: list[Arm] = [baseline(profile, name) for name in ("stock", "tuned")]
    listed += [patched(profile, [], {}, name=name, flags={"max_num_seqs": 8}) for name in ("narrow", "other")]
    return RunPlan(WorkloadChoice(), profile, (0, 1, 2), tuple(listed))


def test_both_ends_of_every_range_are_tried(profile: Profile) -> None:
    made = {one.name: one.of(profile) for one in variations(profile)}
    assert made == {
        "efficiency-15": Assumptions("efficiency-15", efficiency=0.85),
        "efficiency+15": Assumptions("efficiency+15", efficiency=1.15),
        "mixed-1x": Assumptions("mixed-1x", mixed_penalty=1.0),
        "mixed-2x": Assumptions("mixed-2x", mixed_penalty=2.0),
        "cpu-2ms": Assumptions("cpu-2ms", cpu_step_us=2000.0),
        "kv-20": Assumptions("kv-20", kv_blocks=2070),
        "kv+20": Assumptions("kv+20", kv_blocks=3106),
    }
    other = profile.model_copy(update={"cpu_step_us": 500.0})
    assert {"cpu-0ms", "cpu-2ms"} <= {one.name for one in variations(other)}
    assert [one.name for one in variations(profile, ["kv-20%", "mixed-2x"])] == ["mixed-2x", "kv-20"]
    with pytest.raises(UserError, match="--assume kv-30: it is one of efficiency-15, "):
        variations(profile, ["kv-30%"])


def test_too_few_blocks_for_one_request_are_left_out_with_the_reason(plan: RunPlan, tmp_path: Path) -> None:
    small = plan.step_profile.model_copy(
        update={"memory": plan.step_profile.memory.model_copy(update={"kv_blocks": 2200})}
    )
    made = prepare(tmp_path, replace(plan, profile=small), ["narrow"], "tuned", Choice())
    assert {part.assumptions.name for part, _ in made.runs} == {
        "efficiency-15", "efficiency+15", "mixed-1x", "mixed-2x", "cpu-2ms", "kv+20",
    }  # fmt: skip
    assert made.left_out == {
        "kv-20": "1,760 KV blocks of 16 do not hold one request of 32,768 tokens, so vLLM would not start"
    }
    assert unfit(small, Assumptions(kv_blocks=2048), 32768) == ""


def test_a_plan_names_its_assumptions_only_where_it_has_some(plan: RunPlan) -> None:
    assert plan.assumptions == BASE
    assert "assumptions" not in plan.to_json()
    other = replace(plan, assumptions=Assumptions("kv-20", kv_blocks=2070))
    assert other.sha256 != plan.sha256
    assert "kv-20" in other.run_name
    for one in (plan, other):
        assert plans.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_the_baseline_and_the_deciding_arms_run_on_the_first_seeds(plan: RunPlan, tmp_path: Path) -> None:
    made = prepare(tmp_path, plan, ["narrow", "other"], "tuned", Choice(seeds=2, assume=("kv-20%",)))
    ((part, folder),) = made.runs
    assert folder == tmp_path / "sensitivity/kv-20"
    assert [arm.name for arm in part.arms] == ["tuned", "narrow", "other"]
    assert part.seeds == (0, 1)
    assert (part.workload, part.profile) == (plan.workload, plan.profile)
    (part, _), *_ = prepare(tmp_path, plan, ["narrow", "other"], "tuned", Choice(only_arms=("other",))).runs
    assert [arm.name for arm in part.arms] == ["tuned", "other"]
    with pytest.raises(UserError, match=r"--only-arms stock: .*narrow"):
        prepare(tmp_path, plan, ["narrow"], "tuned", Choice(only_arms=("stock",)))


def test_a_choice_that_the_run_does_not_have_is_refused_at_once(plan: RunPlan, tmp_path: Path) -> None:
    write_json(tmp_path / "plan.json", plan.to_json())
    assert planned(tmp_path, Choice(3)) == plan
    with pytest.raises(UserError, match=r"--seeds 4: .* has 3"):
        planned(tmp_path, Choice(seeds=4))
    with pytest.raises(UserError, match="--assume kv-30"):
        planned(tmp_path, Choice(assume=("kv-30%",)))


def test_records_stay_when_arms_or_seeds_are_added_and_go_when_the_code_changed(
    plan: RunPlan, tmp_path: Path
) -> None:
    ((one, folder),) = prepare(tmp_path, plan, ["narrow"], "tuned", Choice(assume=("kv-20",))).runs
    ((more, _),) = prepare(tmp_path, plan, ["narrow", "other"], "tuned", Choice(2, ("kv-20",))).runs
    write_json(folder / "plan.json", one.to_json())
    record = folder / "narrow/seed-0/manifest.json"
    write_json(record, {})
    settle(one, folder)
    settle(more, folder)
    assert record.is_file()
    assert plans.read(folder) == more
    write_json(folder / "plan.json", {**one.to_json(), "code_sha256": "other"})
    settle(one, folder)
    assert not folder.exists()
    settle(one, folder)  # where nothing lies, nothing is done
    discard(folder)


def test_no_arm_may_take_the_folder_s_name() -> None:
    assert "file of the run" in arm_name_fault("sensitivity")
