"""`bench report`: from records to summary.json, summary.md, report.html and a table on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from harness.records import find_runs, write_json


def register(app: typer.Typer) -> None:
    """Add `report` to the command line."""
    app.command("report")(report)


def report(
    results: Annotated[Path, typer.Argument(help="A results folder, or one run in it.")],
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="PATH", help="Also write the summaries of all runs, as one JSON file."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where the files go. Default: into each run's own folder."),
    ] = None,
    no_html: Annotated[bool, typer.Option("--no-html", help="Leave out report.html.")] = False,
) -> None:
    """Say what each patch did: report.html, summary.md and summary.json of every run, and a table here.

    The folder results/reference is left out. With several runs, the table is that of the most complete one
    (of equals, the newest).
    """
    # Reports pull in pandas and plotly; other commands start without them.
    from reports.build import foremost, render_run
    from reports.terminal import show

    console = Console()
    runs = find_runs(results)
    first = foremost(runs)
    entries: list[dict[str, Any]] = []
    shown = None
    for run in runs:
        folder = out if out is None or len(runs) == 1 else out / run.name
        rendered = render_run(run, folder, with_html=not no_html)
        files = {path.name: str(path) for path in rendered.files}
        entries.append({"run": rendered.view.name, "files": files, "summary": dict(rendered.view.summary)})
        if run == first:
            shown = rendered
    assert shown is not None
    show(shown.view, console)
    for entry in entries:
        for path in entry["files"].values():
            console.print(Text(path, style="dim"), soft_wrap=True)
    if json_path is not None:
        write_json(json_path, {"runs": entries})
