"""Check that what is installed here is what the lock says, and that the lock is complete.

A lock installed with `--no-deps` is complete only if somebody looks: this walks the metadata of every pinned
package, with the extras that others ask of it, and finds what is required and absent or of a wrong version.
Exit codes: 0 all is well, 1 problems (one a line), 2 bad usage.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts.locks import LEFT_OUT, REQUIREMENTS, LockError, read_lock


def installed_versions() -> dict[str, str]:
    """Version of every distribution on the path, by normalised name; the first found counts, as in an import."""
    versions: dict[str, str] = {}
    for dist in importlib.metadata.distributions():
        versions.setdefault(canonicalize_name(dist.name), dist.version)
    return versions


def requirements_of(name: str, extras: frozenset[str]) -> list[Requirement]:
    """What a distribution requires on this machine, with some of its extras."""
    lines = importlib.metadata.distribution(name).requires or []
    needed = []
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            needed.append(requirement)
    return needed


def problems(pins: dict[str, str], left_out: frozenset[str]) -> list[str]:
    """Every way in which this environment and the lock disagree, in words, sorted."""
    present = installed_versions()
    found = set()
    for name, version in pins.items():
        if name not in present:
            found.add(f"{name}=={version} is pinned but not installed")
        elif Version(present[name]).public != Version(version).public:
            found.add(f"{name} is {present[name]}, the lock says {version}")
    found |= {f"{name} is installed, which this build leaves out" for name in left_out & present.keys()}

    # Extras asked of a package add to what it requires, so a package is looked at once for each set of them.
    todo: list[tuple[str, frozenset[str]]] = [(name, frozenset()) for name in pins if name in present]
    seen = set(todo)
    while todo:
        name, extras = todo.pop()
        for requirement in requirements_of(name, extras):
            other = canonicalize_name(requirement.name)
            if other in left_out:
                continue
            if other not in pins:
                found.add(f"{name} requires {requirement}, which the lock does not pin")
            elif other in present:
                if not requirement.specifier.contains(present[other], prereleases=True):
                    found.add(f"{name} requires {requirement}, but {other} is {present[other]}")
                visit = (str(other), frozenset(requirement.extras))
                if visit not in seen:
                    seen.add(visit)
                    todo.append(visit)
    return sorted(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--lock", type=Path, default=REQUIREMENTS / "cpu.txt", help="lock file (default: the CPU one)"
    )
    path: Path = parser.parse_args().lock
    if path.stem not in LEFT_OUT:
        parser.error(f"{path.name} is no lock of ours: give requirements/cpu.txt or requirements/cuda.txt")
    try:
        pins = read_lock(path)
    except (OSError, LockError) as error:
        print(f"check_lock: {error}", file=sys.stderr)
        return 1
    found = problems(pins, LEFT_OUT[path.stem])
    for line in found:
        print(f"check_lock: {line}", file=sys.stderr)
    if not found:
        print(f"check_lock: {len(pins)} packages, as {path.name} pins them, and nothing is missing")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
