"""`bench report`: from records to summary.json, summary.md, report.html and a table on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from harness.atomic import check_writable, write_json
from harness.errors import UserError
from harness.records import SUMMARY, find_runs


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
    (of equals, the newest). Exit code 2 where a run could not be read (the others are reported), 1 where one
    is INVALID.
    """
    # Reports pull in pandas and plotly; other commands start without them.
    from reports.build import Rendered, foremost, render_run
    from reports.summary import raise_if_invalid
    from reports.terminal import show

    runs = find_runs(results)
    check_writable(json_path, None if out is None else out / SUMMARY)
    made: dict[Path, Rendered] = {}
    faults: list[str] = []
    for run in runs:
        folder = out if out is None or len(runs) == 1 else out / run.name
        try:
            made[run] = render_run(run, folder, with_html=not no_html)
        except UserError as error:
            if len(runs) == 1:
                raise
            faults.append(str(error))
    console = Console()
    entries: list[dict[str, Any]] = []
    for rendered in made.values():
        files = {path.name: str(path) for path in rendered.files}
        entries.append({"run": rendered.view.name, "files": files, "summary": dict(rendered.view.summary)})
    if made:
        show(made[foremost(list(made))].view, console)
    for entry in entries:
        for path in entry["files"].values():
            console.print(Text(path, style="dim"), soft_wrap=True)
    if json_path is not None:
        write_json(json_path, {"runs": entries, "faults": faults})
    if faults:
        others = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise UserError(f"{len(faults)} of {len(runs)} runs could not be reported: {faults[0]}{others}")
    for rendered in made.values():
        raise_if_invalid(dict(rendered.view.summary))
