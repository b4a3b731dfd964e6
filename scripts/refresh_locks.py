"""Make requirements/cuda.txt and requirements/cpu.txt anew from their `.in` files.

uv resolves: the one on PATH, else one that pip puts into a throw-away environment. Pins that still fit are kept;
`--upgrade` takes the newest. The CPU lock names torch by its plain version, the one that the CUDA lock resolved
to, so that each machine can satisfy it with the build it has; `make setup` sees to a CPU build.
Exit codes: 0 written, 1 no resolution (uv's own words say why).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from scripts.locks import REQUIREMENTS, read_lock

# The oldest glibc that the wheels of the pin support.
PLATFORM = "x86_64-manylinux_2_28"
PYTHON = "3.11"

HEADER = """\
# Every package of the {build} build, with those that they need in turn. Made by `python scripts/refresh_locks.py`
# from {build}.in{extra}; do not edit.
# Installed with `pip install --no-deps`: nothing is resolved on the way. `python scripts/check_lock.py` checks it.
"""
CPU_NOTES = """\
# torch stands here without "+cpu": each machine takes the build that it has, and `make setup` a CPU one.
# Left out on purpose: torchvision, torchaudio, torchcodec (importing them beside a CPU torch breaks transformers), triton.
"""


def find_uv(scratch: Path) -> str:
    """Path of a uv command; installs one below `scratch` where there is none."""
    found = shutil.which("uv")
    if found:
        return found
    venv.create(scratch / "uv", with_pip=True)
    subprocess.run([scratch / "uv/bin/python", "-m", "pip", "install", "--quiet", "uv"], check=True)
    return str(scratch / "uv/bin/uv")


def resolve(uv: str, build: str, scratch: Path, upgrade: bool) -> dict[str, str]:
    """Resolve `<build>.in`; pins of the present lock are preferred unless `upgrade`."""
    output = scratch / f"{build}.txt"
    present = REQUIREMENTS / f"{build}.txt"
    if present.exists() and not upgrade:
        output.write_text("".join(f"{name}=={version}\n" for name, version in read_lock(present).items()))
    command = [
        uv,
        "pip",
        "compile",
        str(REQUIREMENTS / f"{build}.in"),
        "--output-file",
        str(output),
        "--quiet",
    ]
    command += ["--python-version", PYTHON, "--python-platform", PLATFORM, "--no-annotate", "--no-header"]
    if build == "cpu":
        command += ["--overrides", str(REQUIREMENTS / "overrides.txt")]
    if upgrade:
        command.append("--upgrade")
    subprocess.run(command, check=True)
    return read_lock(output)


def write_lock(build: str, pins: dict[str, str]) -> None:
    """Write a lock under its header, sorted, in one go."""
    header = HEADER.format(build=build, extra=" and overrides.txt" if build == "cpu" else "")
    if build == "cpu":
        header += CPU_NOTES
    target = REQUIREMENTS / f"{build}.txt"
    fresh = target.with_suffix(".txt.new")
    fresh.write_text(header + "".join(f"{name}=={version}\n" for name, version in sorted(pins.items())))
    fresh.replace(target)
    print(f"refresh_locks: {target.name}: {len(pins)} packages")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--upgrade", action="store_true", help="take the newest versions, not the present pins"
    )
    upgrade: bool = parser.parse_args().upgrade
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        try:
            uv = find_uv(scratch)
            cuda = resolve(uv, "cuda", scratch, upgrade)
            cpu = resolve(uv, "cpu", scratch, upgrade)
        except subprocess.CalledProcessError as error:
            print(f"refresh_locks: no lock was written: {Path(error.cmd[0]).name} failed", file=sys.stderr)
            return 1
    write_lock("cuda", cuda)
    write_lock("cpu", {**cpu, "torch": cuda["torch"]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
