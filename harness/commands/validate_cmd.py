"""`bench validate`: how far the virtual engine is off on a run that was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from harness.validate_live import LiveValidation
    from harness.validation_figures import Unqueued, Validation


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("validate")(validate)


def validate(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="requests.jsonl, workload.jsonl and run_meta.json of a run, or the folder of a live `bench run`",
        ),
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
    pair: Annotated[
        list[str] | None,
        typer.Option(
            help="BASE:ARM of a live run: does the change have the same sign on the virtual engine? may be repeated"
        ),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="also write the errors to this file")
    ] = None,
) -> None:
    """Replay a measured run through the virtual engine, calibration frozen, and print the errors."""
    from rich.console import Console

    from harness import validate as validation
    from harness import validate_live
    from harness.atomic import check_writable, write_json
    from harness.profiles import load_profile

    check_writable(json_path)
    console = Console()
    if validate_live.is_live_run(folder):
        if profile is None:
            raise UserError(
                f"{folder} is a run of `bench run`: name what predicts it, --profile DIR, "
                "as `bench calibrate OTHER_RUN DIR` writes one"
            )
        found = validate_live.validate(
            folder, load_profile(profile, model, None, blocks), _pairs(pair or ()), console.print
        )
        show_live(console, found)
        if json_path is not None:
            write_json(json_path, found.to_json())
        return
    if pair:
        raise UserError(f"--pair is of a live run, and {folder} is none")
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


def _pairs(given: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for text in given:
        base, colon, arm = text.partition(":")
        if not (base and colon and arm) or ":" in arm:
            raise UserError(f"--pair {text}: give two arms as BASE:ARM")
        pairs.append((base, arm))
    return pairs


def show_live(console: Console, found: LiveValidation) -> None:
    """Both tables: how far off the means are, and whether each decision comes out as it did live."""
    from rich.table import Table

    from harness.validate_live import FIGURES

    table = Table(title=f"{found.run} on {found.profile}: means over the requests served in both")
    for column in ("arm", "figure", "requests", "live", "virtual", "error"):
        table.add_column(column, justify="left" if column in ("arm", "figure") else "right")
    for one in found.errors:
        table.add_row(
            one.arm,
            FIGURES[one.figure],
            str(one.requests),
            f"{one.live_ms:.1f} ms",
            f"{one.virtual_ms:.1f} ms",
            f"{one.error_pct:+.1f}%",
            end_section=one.figure == [*FIGURES][-1],
        )
    console.print(table)
    means = ", ".join(f"{title} {found.mean_error_pct(name):.1f}%" for name, title in FIGURES.items())
    console.print(f"error without its sign, mean over the arms: {means}", highlight=False)
    if not found.decisions:
        return
    table = Table(title="does a change have the sign that it has live?")
    for column in ("from", "to", "figure", "live", "95%", "virtual", "sign"):
        table.add_column(column, justify="left" if column in ("from", "to", "figure", "sign") else "right")
    for d in found.decisions:
        said = "the same" if d.agrees else "OTHER"
        table.add_row(
            d.base,
            d.arm,
            FIGURES[d.figure],
            f"{d.live_pct:+.1f}%",
            f"{d.low:+.1f} to {d.high:+.1f}",
            f"{d.virtual_pct:+.1f}%",
            said if d.decides else f"({said})",
        )
    console.print(table)
    decided = [d for d in found.decisions if d.decides]
    if len(decided) < len(found.decisions):
        console.print("in brackets: what live does not decide", highlight=False)
    console.print(
        f"{sum(d.agrees for d in decided)} of {len(decided)} changes that live decides have the same sign",
        highlight=False,
    )
    noise = {FIGURES[d.figure]: d.noise_pct for d in found.decisions if d.noise_pct}
    if noise:
        said = ", ".join(f"{title} {pct:.1f}%" for title, pct in noise.items())
        console.print(f"two servers with the same flags differed by: {said}", highlight=False)


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
