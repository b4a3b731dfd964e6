"""`bench validate`: how far the virtual engine is off on a run that was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from harness.validation_figures import Unqueued, Validation


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("validate")(validate)


def validate(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="requests.jsonl, workload.jsonl and run_meta.json of a run")
    ],
    profile: Annotated[
        str | None,
        typer.Option(help="GPU, GPU/MODEL[-tpN], or a folder with a profile.toml (default: as recorded)"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="known model, or a folder with a config.json (default: as recorded)"),
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
    with _bar(console) as progress:
        result = validation.validate(folder, profile, blocks, model, progress)
    show(console, result)
    if json_path is not None:
        write_json(json_path, result.to_json())


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[int, int], None] | None]:
    """A bar of requests that have ended, where a person watches."""
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("requests served"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("replay", total=None)
        yield lambda ended, total: bars.update(task, completed=ended, total=total)


def show(console: Console, result: Validation) -> None:
    """The errors as a table, and what to know beside them."""
    from rich.table import Table

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
    lines = [
        *_unqueued_lines(result),
        f"{result.virtual_s:.1f} s in {result.wall_s:.1f} s: {result.speedup:.1f} times real time "
        f"(vLLM's own schedule and update take {result.upstream_s:.1f} s of it); "
        f"{result.steps} steps, {result.preemptions} preemptions",
        f"steps outside the sizes that were measured: {_shares(result.extrapolated)}",
        f"steps that rest on something of which this GPU has no measurement: {_shares(result.unmeasured)}",
        *(f"note: {note}" for note in result.notes),
    ]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _unqueued_lines(result: Validation) -> Iterator[str]:
    if not result.unqueued_recorded:
        yield "requests that did not queue are not told apart: scheduled_ts is not recorded"
        return
    after = "TTFT of requests that did not queue, after warm-up"
    for title, found in ((after, result.unqueued), ("with the warm-up", result.unqueued_with_warm_up)):
        yield (
            f"{title}: none in this run" if found is None else f"{title} {_unqueued(found, result.requests)}"
        )


def _unqueued(u: Unqueued, total: int) -> str:
    return (
        f"({u.requests} of {total}): mean {1e3 * u.mean.measured:.0f} ms measured, {1e3 * u.mean.replayed:.0f} ms "
        f"replayed: {u.mean.error_pct:+.1f}%, or {u.error_steps:+.2f} steps of {1e3 * u.step_s:.0f} ms; "
        f"p50 {u.p50.error_pct:+.1f}%; {u.close} of {u.requests} within 10% or one step, the worst "
        f"{u.worst.error_steps:+.1f} steps of {1e3 * u.worst.step_s:.0f} ms ({u.worst.request.request_id})"
    )


def _shares(shares: Mapping[str, float]) -> str:
    parts = [f"{name} {100 * share:.1f}%" for name, share in shares.items() if name != "any" and share > 0]
    return f"{100 * shares['any']:.1f}%" + (f" ({', '.join(parts)})" if parts else "")
