"""Why an arm and seed of a live run has no record: a note in the run's `logs` folder, until it has one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from harness.atomic import write_json

_FALLBACK = "failed"


@dataclass(frozen=True, slots=True)
class Failure:
    """What ended it: a code, as those of a verdict, and a line."""

    code: str
    text: str


def _path(run_dir: Path, arm: str, seed: int) -> Path:
    return run_dir / "logs" / f"{arm}-seed-{seed}.failed.json"


def write(run_dir: Path, arm: str, seed: int, failure: Failure) -> None:
    """Leave the note."""
    write_json(_path(run_dir, arm, seed), {"code": failure.code, "text": failure.text})


def clear(run_dir: Path, arm: str, seed: int) -> None:
    """Take it away, as the arm is run again."""
    _path(run_dir, arm, seed).unlink(missing_ok=True)


def read(run_dir: Path, arm: str, seed: int) -> Failure | None:
    """The note, or None where there is none that can be read."""
    try:
        raw = json.loads(_path(run_dir, arm, seed).read_text(encoding="utf-8"))
        return Failure(str(raw.get("code") or _FALLBACK), str(raw.get("text", "")))
    except (OSError, ValueError, AttributeError):
        return None
