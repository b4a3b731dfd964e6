"""The file that `warmup` reads is part of the plan: a run with another list is another run.

Not here: what a list may hold (tests/kv/test_warmup.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import plan as plans
from harness.arms import patched
from harness.errors import UserError
from harness.plan import RunPlan, WorkloadChoice
from harness.profiles import load_profile
from harness.run import prepare
from harness.worker import build_workload, run_virtual
from patches.seam import adapter
from patches.seam.plan import PatchPlan, resolve
from patches.seam.process import install_from_environment


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
    # The processes that would go on with it read the plan and refuse its arm too; scripts and reports read it as it was.
    again = plans.read(run)
    assert again.sha256 == first.sha256
    with pytest.raises(UserError, match=r"warmup\.list_file: .*list\.jsonl has changed since"):
        _start(again)
    for text, said in (("{", "has changed since"), (None, "list.jsonl: No such file")):
        path.unlink() if text is None else path.write_text(text, encoding="utf-8")
        again = plans.read(run)
        assert again == first
        with pytest.raises(UserError, match=said):
            _start(again)


def _start(plan: RunPlan) -> None:
    """Begin with its only arm, in this process."""
    run_virtual(plan.step_profile, plan.arms[0], build_workload(plan, 0))


def test_a_server_with_another_list_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "list.jsonl"
    path.write_text('{"text": "a"}\n', encoding="utf-8")
    text = resolve("warmup", [f"warmup.list_file={path}"]).to_json()
    path.write_text('{"text": "b"}\n', encoding="utf-8")
    with pytest.raises(UserError, match="has changed since"):
        install_from_environment(text, None)
    path.unlink()
    with pytest.raises(UserError, match="No such file"):
        install_from_environment(text, None)
    assert adapter.active() is None


def test_a_list_that_was_not_hashed_is_looked_into_before_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "list.jsonl"
    path.write_text("{", encoding="utf-8")
    text = json.dumps({"schema": 1, "patches": [{"source": "warmup", "knobs": {"list_file": str(path)}}]})
    with pytest.raises(UserError, match="line 1"):
        PatchPlan.from_json(text).check_files()


def test_a_plan_without_a_file_is_told_as_before(tmp_path: Path) -> None:
    assert "files" not in resolve("warmup").to_json()
    path = tmp_path / "list.jsonl"
    path.write_text('{"text": "a"}\n', encoding="utf-8")
    plan = resolve("warmup", [f"warmup.list_file={path}"])
    assert PatchPlan.from_json(plan.to_json()) == plan
