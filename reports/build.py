"""From a run directory to its report files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import RunFailed, UserError
from harness.records import MANIFEST, PLAN, SUMMARY, is_complete, read_json, write_json
from reports import html, markdown
from reports.summary import build_summary
from reports.view import RunView, load_view


@dataclass(frozen=True, slots=True)
class Rendered:
    """One run and the files that were written for it."""

    view: RunView
    files: tuple[Path, ...]


def render_run(run_dir: Path, out: Path | None = None, *, with_html: bool = True) -> Rendered:
    """Build the summary of a run and write summary.json, summary.md and report.html.

    Args:
        run_dir: a folder with plan.json and the records of its arms.
        out: where the files go; the run's own folder if None.

    Raises:
        UserError: a record is missing or damaged.
        RunFailed: a file cannot be written; the old one stays as it was.
    """
    view = load_view(run_dir, current_summary(run_dir))
    folder = out or run_dir
    files = [folder / SUMMARY, folder / "summary.md"]
    write_json(files[0], dict(view.summary))
    write_text(files[1], markdown.render(view))
    if with_html:
        files.append(folder / "report.html")
        write_text(files[2], html.render(view))
    return Rendered(view, tuple(files))


def current_summary(run_dir: Path) -> dict[str, Any]:
    """The summary in the run's folder if it is newer than all of its records; else one built now."""
    path = run_dir / SUMMARY
    if path.is_file():
        records = [run_dir / PLAN, *run_dir.glob("*/seed-*"), *run_dir.glob("*/seed-*/*")]
        if path.stat().st_mtime_ns > max(record.stat().st_mtime_ns for record in records):
            try:
                return read_json(path)
            except UserError:
                pass  # damaged: it can be built again
    return build_summary(run_dir)


def write_text(path: Path, text: str) -> None:
    """Write a text file in one move; RunFailed where the disk refuses, with the old file untouched."""
    hidden = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden.write_text(text, encoding="utf-8", newline="\n")
        hidden.replace(path)
    except OSError as error:
        hidden.unlink(missing_ok=True)
        raise RunFailed(
            f"{path} cannot be written: {(error.strerror or str(error)).lower()}; free some space, or choose another --out"
        ) from error


def foremost(runs: Sequence[Path]) -> Path:
    """The run whose table is printed: the one with the smallest part missing; of equals, the newest."""
    return max(runs, key=lambda run: (_completeness(run), _newest(run), run.name))


def _completeness(run: Path) -> float:
    plan = read_json(run / PLAN)
    wanted = [run / str(arm["name"]) / f"seed-{seed}" for arm in plan["arms"] for seed in plan["seeds"]]
    return sum(map(is_complete, wanted)) / len(wanted) if wanted else 0.0


def _newest(run: Path) -> int:
    return max((path.stat().st_mtime_ns for path in run.glob(f"*/seed-*/{MANIFEST}")), default=0)
