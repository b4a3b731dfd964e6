"""`bench validate`: how far the virtual engine is off on a run that was measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from harness.validate import Validation


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("validate")(validate)


def validate(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="requests.jsonl, workload.jsonl and run_meta.json of a run")
    ],
    profile: Annotated[
        str | None,
        typer.Option(help="GPU/MODEL, or a folder with a profile.toml (default: by GPU and model)"),
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(help="KV blocks (default: as recorded, else derived from memory)", min=1)
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="also write the errors to this file")
    ] = None,
) -> None:
    """Replay a measured run through the virtual engine, calibration frozen, and print the errors."""
    from rich.console import Console

    from harness import validate as validation
    from harness.atomic import check_writable, write_json

    check_writable(json_path)
    console = Console()
    result = validation.validate(folder, profile, blocks)
    show(console, result)
    if json_path is not None:
        write_json(json_path, result.to_json())


def show(console: object, result: Validation) -> None:
    """The errors as a table, and what to know beside them."""
    from rich.console import Console
    from rich.table import Table

    assert isinstance(console, Console)
    table = Table(title=f"{result.requests} requests on {result.profile}, {result.blocks:,} KV blocks")
    for column in ("", "statistic", "measured", "replayed", "error"):
        table.add_column(column, justify="left" if column in ("", "statistic") else "right")
    for metric, statistics in result.metrics.items():
        scale, unit = (1e3, "ms") if metric == "tpot" else (1.0, "s")
        for name, value in statistics.items():
            table.add_row(
                metric.upper() if name == "mean" else "",
                name,
                f"{scale * value.measured:.2f} {unit}",
                f"{scale * value.replayed:.2f} {unit}",
                f"{value.error_pct:+.1f}%",
                end_section=name == "p99",
            )
    console.print(table)
    after = "TTFT of requests that did not queue, after warm-up"
    for title, u in ((after, result.unqueued), ("with the warm-up", result.unqueued_with_warm_up)):
        if u is None:
            console.print(f"{title}: none in this run", soft_wrap=True)
            continue
        console.print(
            f"{title} ({u.requests}): measured {1e3 * u.mean.measured:.0f} ms, replayed "
            f"{1e3 * u.mean.replayed:.0f} ms: {u.mean.error_pct:+.1f}%, or {u.error_steps:+.2f} steps of "
            f"{1e3 * u.step_s:.0f} ms",
            soft_wrap=True,
        )
    console.print(
        f"{result.virtual_s:.1f} s in {result.wall_s:.1f} s: {result.speedup:.1f} times real time "
        f"(vLLM's own schedule and update take {result.upstream_s:.1f} s of it); "
        f"{result.steps} steps, {result.preemptions} preemptions, "
        f"{100 * result.extrapolated['any']:.1f}% of steps outside the calibrated range",
        soft_wrap=True,
    )
    for note in result.notes:
        console.print(f"note: {note}", soft_wrap=True)
