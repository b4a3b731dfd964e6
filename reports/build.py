"""From a run directory to its report files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.atomic import check_writable, write_json, write_text
from harness.records import MANIFEST, SUMMARY, is_complete, read_plan
from reports import html, markdown
from reports.summary import current_summary
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
        UserError: a record is missing or damaged, or the folder cannot be written to; nothing is written.
        RunFailed: the disk is full; the file that did not fit stays as it was.
    """
    folder = out or run_dir
    check_writable(folder / SUMMARY)
    view = load_view(run_dir, current_summary(run_dir))
    texts = {folder / "summary.md": markdown.render(view)}
    if with_html:
        texts[folder / "report.html"] = html.render(view)
    write_json(folder / SUMMARY, dict(view.summary))
    for path, text in texts.items():
        write_text(path, text)
    return Rendered(view, (folder / SUMMARY, *texts))


def foremost(runs: Sequence[Path]) -> Path:
    """The run whose table is printed: the one with the smallest part missing; of equals, the newest."""
    return max(runs, key=lambda run: (_completeness(run), _newest(run), run.name))


def _completeness(run: Path) -> float:
    plan = read_plan(run)
    wanted = [run / str(arm["name"]) / f"seed-{seed}" for arm in plan["arms"] for seed in plan["seeds"]]
    return sum(map(is_complete, wanted)) / len(wanted) if wanted else 0.0


def _newest(run: Path) -> int:
    return max((path.stat().st_mtime_ns for path in run.glob(f"*/seed-*/{MANIFEST}")), default=0)
