"""Guards that a script answers bad input with one line that names it, and exit code 2: never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kv_targets", ["absent"]),
        ("scheduling_targets", ["absent"]),
        ("scheduling_bounds", ["absent"]),
        ("recompute_floor", ["absent"]),
        ("prompt_list", ["absent", "--length-scale", "0"]),
        ("prompt_list", ["folder"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    root: Path, tmp_path: Path, script: str, words: list[str]
) -> None:
    (tmp_path / "folder").mkdir()
    done = subprocess.run(
        [sys.executable, str(root / "scripts" / f"{script}.py"), *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"{script}: ") and done.stderr.count("\n") == 1
    assert not done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
