"""`bench sensitivity`: do the verdicts of a run hold when the profile is off?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from harness.sensitivity import Choice

ASSUME_HELP = "assumptions to try, comma separated (default: all): efficiency-15, efficiency+15, mixed-1x, mixed-2x, cpu-2ms, kv-20, kv+20"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("sensitivity")(sensitivity)


def sensitivity(
    run: Annotated[Path, typer.Argument(help="a finished run's folder")],
    seeds: Annotated[int, typer.Option(help="recompute on the run's first N seeds", min=1)] = 1,
    assume: Annotated[str, typer.Option(help=ASSUME_HELP)] = "",
    only_arms: Annotated[
        str, typer.Option(help="only these arms, comma separated (default: all with a verdict to lose)")
    ] = "",
    jobs: Annotated[int, typer.Option(help="runs at a time; 0 is one a core", min=0)] = 0,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="also write the summary to this file")
    ] = None,
) -> None:
    """Recompute a run's verdicts under other assumptions; one whose winner changes becomes undetermined.

    Tried are a GPU 15% faster and slower, mixed steps whose attention takes as long as that of their parts and twice as
    long, 2 ms of CPU time a step, and 20% more and fewer KV blocks. The records go to RUN/sensitivity/; what is there is kept.
    """
    from harness.atomic import check_writable
    from harness.commands.run_cmd import split
    from harness.sensitivity import Choice

    check_writable(json_path)
    choice = Choice(seeds, tuple(split(assume)), tuple(split(only_arms)))
    recompute_and_finish(run, choice, jobs, Console(), json_path)


def recompute_and_finish(
    run_dir: Path, choice: Choice, jobs: int, console: Console, json_path: Path | None
) -> None:
    """Recompute the verdicts of a run, then write its summary and show its table.

    Raises:
        UserError: there is no such run, or the choice does not fit it.
        RunFailed: the run is invalid, or an arm failed; the summary holds what was recomputed all the same.
    """
    from harness.commands.run_cmd import finish
    from harness.errors import RunFailed

    failed: RunFailed | None = None
    try:
        _recompute(run_dir, choice, jobs, console)
    except RunFailed as error:
        failed = error
    finish(run_dir, console, json_path)
    if failed is not None:
        raise failed


def _recompute(run_dir: Path, choice: Choice, jobs: int, console: Console) -> None:
    from harness.run import default_jobs
    from harness.sensitivity import planned, recompute
    from reports.sensitivity import decisive, main_baseline
    from reports.summary import current_summary, raise_if_invalid

    plan = planned(run_dir, choice)
    summary = current_summary(run_dir)
    raise_if_invalid(summary)
    arms = [str(arm["name"]) for arm in summary["arms"]]
    baseline, rows = main_baseline(arms), decisive(summary["comparisons"], arms)
    if not rows:
        said = f"no verdict against {baseline} is better or worse, so there is none to recompute"
        console.print(said, highlight=False, markup=False, soft_wrap=True)
        return
    deciding = list(dict.fromkeys(str(row["arm"]) for row in rows))
    said = f"recomputing {len(rows)} verdicts against {baseline} under other assumptions"
    console.print(said, highlight=False, markup=False, soft_wrap=True)
    command = ["bench", *sys.argv[1:]]
    recompute(run_dir, plan, deciding, baseline, choice, jobs or default_jobs(), command, console)
