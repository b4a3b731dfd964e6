"""`bench workload`: what would be sent, without sending it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.atomic import check_writable, write_json

if TYPE_CHECKING:
    from workloads.planned_load import LoadRow
    from workloads.request import Workload


def register(app: typer.Typer) -> None:
    """Add `workload` to the command line."""
    app.command("workload")(workload)


def workload(
    describe: Annotated[
        bool, typer.Option("--describe", help="counts, tokens and rates by tenant and phase (the default)")
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="write every request, with its tokens, as one Parquet file"),
    ] = None,
    phase: Annotated[str, typer.Option(help="all, a number, several as in 2,4, or list to see them")] = "all",
    seed: Annotated[int, typer.Option(help="decides everything that is drawn", min=0)] = 0,
    profile: Annotated[
        str | None, typer.Option(help="use the rates and SLOs of this profile (default: the bare table)")
    ] = None,
    mode: Annotated[str, typer.Option(help="deployment mode: single")] = "single",
    rate_scale: Annotated[float, typer.Option(help="factor on all arrival rates", min=0.001)] = 1.0,
    time_scale: Annotated[float, typer.Option(help="factor on the length of the phases", min=0.001)] = 1.0,
    length_scale: Annotated[float, typer.Option(help="factor on prompt and output lengths", min=0.001)] = 1.0,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="also write the figures to this file")
    ] = None,
) -> None:
    """Say what the five-phase workload sends, or write it to a file."""
    from workloads import five_phase

    check_writable(json_path)
    if phase == "list":
        _list_phases(json_path)
        return
    rates, slo_factor = five_phase.RatePlan(), 1.0
    if profile is not None:
        from harness.profiles import load_profile

        sizing = load_profile(profile).five_phase
        rates, slo_factor = five_phase.RatePlan(tuple(sizing.rate_scale)), sizing.slo_factor
    built = five_phase.build(
        seed,
        phases=phase,
        rates=rates,
        rate_scale=rate_scale,
        time_scale=time_scale,
        length_scale=length_scale,
        slo_factor=slo_factor,
        mode=mode,
    )
    if describe or json_path is not None or export is None:
        _describe(built, json_path)
    if export is not None:
        from workloads import trace_parquet

        trace_parquet.export(built, export)
        typer.echo(f"{len(built.requests)} requests written to {export}")


def _list_phases(json_path: Path | None) -> None:
    from workloads import five_phase
    from workloads.five_phase.phases import PHASE_SECONDS

    typer.echo("\n".join(five_phase.phase_lines()))
    rows = [
        {"phase": row.number, "name": row.name, "seconds": PHASE_SECONDS, "rates_rps": dict(row.rates_rps)}
        for row in five_phase.PHASES
    ]
    _write(json_path, {"schema": 1, "phases": rows})


def _describe(built: Workload, json_path: Path | None) -> None:
    from workloads import planned_load

    rows = planned_load.describe(built)
    _show(built, rows)
    _write(
        json_path,
        {
            "schema": 1,
            "workload": built.name,
            "seed": built.seed,
            "sha256": built.sha256,
            "corpus_sha256": built.corpus_sha256,
            "slo_factor": built.slo_factor,
            "rows": [row.as_json() for row in rows],
            "totals": planned_load.total(rows).as_json(),
        },
    )


def _show(built: Workload, rows: tuple[LoadRow, ...]) -> None:
    """A table that fits 80 columns: a row for every tenant of every phase, and one for all."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from workloads import planned_load

    console = Console()
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in ("phase", "tenant"):
        table.add_column(name, no_wrap=True)
    for name in ("requests", "req/s", "prompt", "output", "tok/s", "cancel", "shared"):
        table.add_column(name, justify="right", no_wrap=True)
    for phase in built.phases:
        for row in (row for row in rows if row.phase == phase.number):
            shown = f"{phase.number}" if phase.measured else f"({phase.number})"
            table.add_row(shown, row.tenant, *_cells(row), style=None if phase.measured else "dim")
        table.add_section()
    table.add_row("all", "all", *_cells(planned_load.total(rows)), style="bold")
    console.print(f"{built.name}, seed {built.seed}: {len(built.requests)} requests", highlight=False)
    console.print(table)
    console.print(
        "prompt, output: mean tokens. tok/s: of prompts. cancel: given up for the next one.\n"
        "shared: prompt tokens that a prefix cache without limits would hold.",
        highlight=False,
    )
    if not all(phase.measured for phase in built.phases):
        console.print("(n): replayed for backlog and cache, not measured.", highlight=False)
    console.print(f"sha256 {built.sha256}", highlight=False)
    console.print(f"corpus {built.corpus_sha256}", highlight=False)


def _cells(row: LoadRow) -> list[str]:
    count = max(1, row.requests)
    bound = row.hit_rate_bound
    return [
        str(row.requests),
        f"{row.rate_rps:.2f}",
        f"{row.prompt_tokens / count:.0f}",
        f"{row.output_tokens / count:.0f}",
        f"{row.prompt_tokens / row.seconds:.0f}",
        f"{row.cancelled / count:.0%}" if row.cancelled else "-",
        "-" if bound is None else f"{bound:.0%}",
    ]


def _write(path: Path | None, value: dict[str, Any]) -> None:
    if path is not None:
        write_json(path, value)
