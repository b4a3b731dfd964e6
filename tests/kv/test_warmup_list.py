"""The file that `warmup` reads is part of the plan: a run with another list is another run.

Not here: what a list may hold (tests/kv/test_warmup.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import plan as plans
from harness.arms import patched
from harness.errors import UserError
from harness.plan import RunPlan, WorkloadChoice
from harness.profiles import load_profile
from harness.run import prepare
from patches.seam.plan import PatchPlan, resolve


def _run_plan(path: Path) -> RunPlan:
    profile = load_profile("tight")
    arm = patched(profile, ["warmup"], {"warmup": {"list_file": str(path)}})
    return RunPlan(WorkloadChoice(phases="1"), profile, (0,), (arm,))


def test_a_run_whose_list_has_changed_is_refused_and_not_resumed(tmp_path: Path) -> None:
    path, run = tmp_path / "list.jsonl", tmp_path / "run"
    path.write_text('{"prompt_token_ids": [1, 2, 3]}\n', encoding="utf-8")
    first = _run_plan(path)
    prepare(first, run)
    prepare(_run_plan(path), run)
    assert plans.read(run).sha256 == first.sha256
    path.write_text('{"prompt_token_ids": [1, 2, 4]}\n', encoding="utf-8")
    other = _run_plan(path)
    assert (other.sha256, other.run_name) != (first.sha256, first.run_name)
    with pytest.raises(UserError, match="holds another run"):
        prepare(other, run)
    # The processes that would go on with it read the plan, and refuse it too.
    with pytest.raises(UserError, match=r"warmup\.list_file: .*list\.jsonl has changed since"):
        plans.read(run)


def test_a_plan_without_a_file_is_told_as_before(tmp_path: Path) -> None:
    assert "files" not in resolve("warmup").to_json()
    path = tmp_path / "list.jsonl"
    path.write_text('{"text": "a"}\n', encoding="utf-8")
    plan = resolve("warmup", [f"warmup.list_file={path}"])
    assert PatchPlan.from_json(plan.to_json()) == plan
