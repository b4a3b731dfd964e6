"""Reading a lock: which packages it pins, and which it leaves out on purpose."""

from __future__ import annotations

from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"

# Not in the CPU lock although something there asks for them: importing one of the first three beside a CPU torch
# breaks transformers, and Triton has no CPU backend on PyPI.
LEFT_OUT = {"cpu": frozenset({"torchvision", "torchaudio", "torchcodec", "triton"}), "cuda": frozenset()}


class LockError(Exception):
    """A line of a lock that pins nothing."""


def read_lock(path: Path) -> dict[str, str]:
    """Pinned version by normalised name.

    Raises LockError for a line that is no exact pin, or names a package twice.
    """
    pins: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        specifiers = list(requirement.specifier)
        if len(specifiers) != 1 or specifiers[0].operator != "==" or specifiers[0].version.endswith("*"):
            raise LockError(f"{path.name} line {number}: {text!r} is no exact pin")
        name = canonicalize_name(requirement.name)
        if name in pins:
            raise LockError(f"{path.name} line {number}: {name} is pinned twice")
        pins[name] = specifiers[0].version
    return pins
