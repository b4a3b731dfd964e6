"""The entry point in processes of its own: off means absent, receipts, errors that are seen, fork and spawn.

Each test starts an interpreter; what happens inside vLLM's own processes is for the engine tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patches.seam.plan import resolve

PLAN = "tests.seam.toys.reverse"


def run(root: Path, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter at the project's root."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PATCHBENCH_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=clean | {"PYTHONPATH": str(root)} | env,
        capture_output=True,
        text=True,
        timeout=180,
    )


def receipts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("receipt-*.json"))]


@pytest.mark.parametrize(
    "env", [{}, {"PATCHBENCH_PLAN": "{broken", "PATCHBENCH_OFF": "1"}, {"PATCHBENCH_PLAN": ""}]
)
def test_off_means_absent(root: Path, env: dict[str, str]) -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        "from patches.seam import plugin; plugin.register()\n"
        "new = {m for m in set(sys.modules) - before if m.split('.')[0] in ('patches', 'vllm', 'torch', 'pydantic')}\n"
        "assert new == {'patches', 'patches.seam', 'patches.seam.plugin'}, new\n"
    )
    done = run(root, code, **env)
    assert done.returncode == 0, done.stderr


def test_broken_plan_is_seen_twice(root: Path, tmp_path: Path) -> None:
    code = "from patches.seam import plugin; plugin.register()"
    done = run(root, code, PATCHBENCH_PLAN="{broken", PATCHBENCH_RECEIPTS=str(tmp_path))
    assert done.returncode != 0
    assert "not a patch plan" in done.stderr
    (receipt,) = receipts(tmp_path)
    assert "not a patch plan" in receipt["error"]
    assert receipt["hooks"] == {}


def test_plan_from_a_file_receipt_at_the_end_and_after_a_fork(root: Path, tmp_path: Path) -> None:
    plan = resolve(PLAN)
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    code = (
        "import multiprocessing, os\n"
        "from harness import vllm_env; vllm_env.prepare()\n"
        "from patches.seam import plugin; plugin.register(); plugin.register()\n"
        "from patches.seam import adapter\n"
        "def child():\n"
        "    adapter.active().tallies['reverse'].add('request_key', 5)\n"
        "    adapter.active().listener()\n"
        "    adapter.active().tallies['reverse'].add('request_key', 1)\n"
        "adapter.active().tallies['reverse'].add('request_key', 2)\n"
        "process = multiprocessing.get_context('fork').Process(target=child)\n"
        "process.start(); process.join(); assert process.exitcode == 0\n"
    )
    folder = tmp_path / "receipts"
    done = run(root, code, PATCHBENCH_PLAN=str(file), PATCHBENCH_RECEIPTS=str(folder))
    assert done.returncode == 0, done.stderr
    found = receipts(folder)
    assert len({receipt["pid"] for receipt in found}) == 2
    assert {receipt["plan_sha256"] for receipt in found} == {plan.sha256()}
    # The child inherited 2 and added 6, the last after its first step; both write again when they end.
    assert sorted(receipt["hooks"]["reverse"]["hits"] for receipt in found) == [2, 8]


def test_vllm_loads_the_entry_point(root: Path, tmp_path: Path) -> None:
    code = (
        "from harness import vllm_env; vllm_env.prepare()\n"
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.v1.core.sched.scheduler import Scheduler\n"
        "print(hasattr(Scheduler.schedule, '__wrapped__'))\n"
    )
    env = {"PATCHBENCH_PLAN": resolve(PLAN).to_json(), "PATCHBENCH_RECEIPTS": str(tmp_path)}
    done = run(root, code, VLLM_PLUGINS="patchbench", **env)
    assert done.stdout.strip() == "True", done.stderr
    assert len(receipts(tmp_path)) == 1
    done = run(root, code, VLLM_PLUGINS="patchbench", PATCHBENCH_OFF="1", **env)
    assert done.stdout.strip() == "False", done.stderr
