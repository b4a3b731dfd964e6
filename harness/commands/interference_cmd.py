"""`bench interference`: how much slower is each tenant beside the others than alone?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("interference")(interference)


def interference(
    run: Annotated[Path, typer.Argument(help="a finished virtual run's folder")],
    seeds: Annotated[int, typer.Option(help="on the run's first N seeds", min=1)] = 1,
    jobs: Annotated[int, typer.Option(help="runs at a time; 0 is one a core", min=0)] = 0,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="also write the slowdowns to this file")
    ] = None,
) -> None:
    """Run each tenant of a run alone on upstream's best flags, and set every arm's times against that.

    The records go to RUN/alone/; what is there is kept. The report of the run shows the same table.
    """
    from harness.atomic import check_writable, write_json
    from harness.interference import planned, run_alone
    from harness.run import default_jobs
    from reports import interference as found
    from reports.summary import current_summary, raise_if_invalid
    from reports.view import load_view

    check_writable(json_path)
    console = Console()
    plan = planned(run, seeds)
    run_alone(run, plan, seeds, jobs or default_jobs(), ["bench", *sys.argv[1:]], console)
    summary = current_summary(run)
    view = load_view(run, summary)
    console.print(found.terminal_table(view))
    if json_path is not None:
        write_json(json_path, {"run": view.name, "slowdowns": found.as_json(view)})
    console.print(f"next: bench report {run}", highlight=False, markup=False, soft_wrap=True)
    raise_if_invalid(summary)
