"""The GPU files: complete, small, made from the tables by the script, and refused when damaged.

Guards the files and their reader. What the numbers are worth is guarded by test_step_error.py and test_compose.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from harness.profiles.gpu import BUILT_IN, list_gpus, load_gpu

MADE_FROM = {
    "a100-80g": "aic/a100_sxm",
    "h100-80g": "aic/h100_sxm",
    "h200-141g": "aic/h200_sxm",
    "rtx4090-24g": "rtx4090-llama31-8b",
    "rtxpro6000-96g": "rtxpro6000-llama31-8b",
}
SHEET_ONLY = ("a10-24g", "l4-24g", "t4-16g")


def make(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts" / "make_gpu.py"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}
    )


def test_all_gpus_are_there_and_small() -> None:
    assert list_gpus() == sorted((*MADE_FROM, *SHEET_ONLY))
    for name in list_gpus():
        gpu = load_gpu(name)
        assert gpu.name == name
        assert gpu.path.stat().st_size < 100_000
        assert gpu.source.notice
        assert gpu.source.licence in ("MIT", "Apache-2.0")
        assert gpu.spec.origin


def test_each_says_what_was_not_measured() -> None:
    for name in MADE_FROM:
        assert load_gpu(name).measured
    for name in ("a100-80g", "h100-80g", "h200-141g"):
        assert load_gpu(name).not_measured == ["context", "mixed"]
    for name in SHEET_ONLY:
        gpu = load_gpu(name)
        assert not gpu.measured
        assert gpu.not_measured == ["decode", "prefill", "context", "mixed"]
    assert load_gpu("t4-16g").dtype == "float16"


@pytest.mark.parametrize("name", sorted(MADE_FROM))
def test_numbers_are_made_from_the_tables_by_the_script(
    name: str, shared_dir: Path, tmp_path: Path, root: Path
) -> None:
    file = tmp_path / f"{name}.json"
    content = json.loads((BUILT_IN / f"{name}.json").read_text(encoding="utf-8"))
    file.write_text(json.dumps(content | {"numbers": None}), encoding="utf-8")
    done = make(root, str(shared_dir / "data" / MADE_FROM[name]), str(file))
    assert done.returncode == 0, done.stderr
    assert file.read_bytes() == (BUILT_IN / f"{name}.json").read_bytes()


@pytest.mark.parametrize("name", SHEET_ONLY)
def test_sheet_only_numbers_are_made_from_the_nearest_gpu(name: str, tmp_path: Path, root: Path) -> None:
    file = tmp_path / f"{name}.json"
    shutil.copy(BUILT_IN / f"{name}.json", file)
    done = make(root, "--like", str(BUILT_IN / "rtxpro6000-96g.json"), str(file))
    assert done.returncode == 0, done.stderr
    assert file.read_bytes() == (BUILT_IN / f"{name}.json").read_bytes()


def test_the_script_says_what_is_wrong(tmp_path: Path, root: Path) -> None:
    missing = make(root, str(tmp_path), str(tmp_path / "new.json"))
    assert missing.returncode == 2
    assert "copy one from harness/profiles/gpus first" in missing.stderr
    file = tmp_path / "new.json"
    file.write_text('{"name": "x"}', encoding="utf-8")
    assert "spec" in make(root, str(tmp_path), str(file)).stderr
    shutil.copy(BUILT_IN / "l4-24g.json", file)
    no_tables = make(root, str(tmp_path), str(file))
    assert no_tables.returncode == 2
    assert "attention.csv: cannot be read" in no_tables.stderr
    assert "Traceback" not in missing.stderr + no_tables.stderr


def _damaged(tmp_path: Path, change: dict[str, Any]) -> Path:
    file = tmp_path / "gpu.json"
    content = json.loads((BUILT_IN / "l4-24g.json").read_text(encoding="utf-8"))
    file.write_text(json.dumps(content | change), encoding="utf-8")
    return file


def test_damage_names_file_and_field(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gpu\.json: colour: Extra inputs"):
        load_gpu(str(_damaged(tmp_path, {"colour": "green"})))
    spec = json.loads((BUILT_IN / "l4-24g.json").read_text(encoding="utf-8"))["spec"]
    with pytest.raises(UserError, match=r"spec\.tflops"):
        load_gpu(str(_damaged(tmp_path, {"spec": spec | {"tflops": -1}})))
    numbers = json.loads((BUILT_IN / "l4-24g.json").read_text(encoding="utf-8"))["numbers"]
    numbers["decode"]["geometries"][0]["us"].pop()
    with pytest.raises(UserError, match=r"numbers\.decode.*us has 89 values"):
        load_gpu(str(_damaged(tmp_path, {"numbers": numbers})))
    (tmp_path / "gpu.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="not a GPU file"):
        load_gpu(str(tmp_path / "gpu.json"))


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean h100-80g"):
        load_gpu("h100")
    with pytest.raises(UserError, match="known GPUs are a10-24g"):
        load_gpu("zzz")


def test_line_ends_do_not_change_the_hash(tmp_path: Path) -> None:
    raw = (BUILT_IN / "l4-24g.json").read_bytes()
    (tmp_path / "other.json").write_bytes(raw.replace(b"\n", b"\r\n"))
    assert load_gpu(str(tmp_path / "other.json")).sha256 == load_gpu("l4-24g").sha256
