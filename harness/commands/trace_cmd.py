"""`bench trace`: what a public trace holds, what replaying it assumes, and whether its rows are in order."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from harness.atomic import check_writable, write_json

if TYPE_CHECKING:
    from workloads.traces.summary import Lengths, TraceFigures
    from workloads.traces.window import Scan


def register(app: typer.Typer) -> None:
    """Add `trace` to the command line."""
    app.command("trace")(trace)


def trace(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Mooncake, Bailian, vLLM's timed_trace, Azure 2023 or 2024, BurstGPT, ServeGen; .gz as well",
        ),
    ],
    tenants: Annotated[
        Path | None, typer.Option(metavar="MAP", help="TOML of who sends what (docs/TRACES.md)")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="count the requests that are too long for this profile's stock flags")
    ] = None,
    from_s: Annotated[
        float,
        typer.Option("--from", metavar="S", help="begin so many seconds after the trace's start", min=0),
    ] = 0.0,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", help="so many seconds of it; 0 is to its end", min=0)
    ] = 0.0,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="read only the first N requests of the file", min=1)
    ] = None,
    format_name: Annotated[
        str | None, typer.Option("--format", metavar="NAME", help="the format, where two would fit")
    ] = None,
    seed: Annotated[int, typer.Option(help="decides who sends what, where the map has shares", min=0)] = 0,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="also write the figures to this file")
    ] = None,
) -> None:
    """Recognise a trace, check every row, and say its rates, lengths and prefix sharing, and what is assumed."""
    from workloads.traces import TenantMap, Window, load_map, open_trace
    from workloads.traces.assumptions import assumptions
    from workloads.traces.summary import Gatherer
    from workloads.traces.tenant_map import Draw
    from workloads.traces.window import read_window

    check_writable(json_path)
    longest = None if profile is None else _longest(profile)
    mapped = load_map(tenants) if tenants is not None else TenantMap()
    window = Window(from_s, seconds or None, limit)
    source = open_trace(file, format_name)
    draw = Draw(mapped, source.label_names, seed, file)
    gathered, scan = read_window(source, window, lambda: Gatherer(draw.tenant_of, longest))
    figures = gathered.figures()
    assumed = list(assumptions(source, mapped, scan))
    console = Console()
    _heading(console, file, source.reader.title, source.reader.name, scan, window)
    _show(console, figures, source.block_tokens, profile, longest)
    for said in assumed:
        console.print(f"- {said}", highlight=False, markup=False)
    if json_path is not None:
        write_json(
            json_path, _json(file, source.reader.name, source.block_tokens, scan, figures, assumed, longest)
        )


def _longest(profile: str) -> int:
    from harness.arms import baseline
    from harness.profiles import load_profile
    from harness.trace_run import longest_request

    loaded = load_profile(profile)
    return longest_request(loaded, [baseline(loaded, "stock")])


def _heading(console: Console, file: Path, title: str, name: str, scan: Scan, window: Any) -> None:
    console.print(f"{file.name}: {title} ({name}), {scan.rows:,} requests", highlight=False, markup=False)
    if window.from_s or window.seconds is not None:
        end = scan.span_s if window.seconds is None else window.from_s + window.seconds
        console.print(
            f"figures of {window.from_s:,.0f} to {end:,.0f} s of {scan.span_s:,.1f} s",
            highlight=False,
            markup=False,
        )


def _show(
    console: Console, figures: TraceFigures, block_tokens: int, profile: str | None, longest: int | None
) -> None:
    plain = Table(box=None, show_header=False, pad_edge=False)
    plain.add_column(no_wrap=True)
    plain.add_column(overflow="fold")
    for label, text in _facts(figures, block_tokens, profile, longest):
        plain.add_row(label, text)
    console.print(plain)
    lengths = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    lengths.add_column("tokens", no_wrap=True)
    for column in ("mean", "p50", "p90", "p99", "max", "total"):
        lengths.add_column(column, justify="right", no_wrap=True)
    for label, part in (("input", figures.input), ("output", figures.output)):
        lengths.add_row(label, *_cells(part))
    console.print(lengths)
    if len(figures.tenants) > 1:
        counts = ", ".join(f"{name} {count:,}" for name, count in sorted(figures.tenants.items()))
        console.print(f"tenants: {counts}", highlight=False, markup=False)
    console.print("assumed:", highlight=False)


def _facts(
    figures: TraceFigures, block_tokens: int, profile: str | None, longest: int | None
) -> list[tuple[str, str]]:
    def rate(value: float | None, why: str) -> str:
        return why if value is None else f"{value:,.2f} requests/s"

    facts = [
        ("requests", f"{figures.requests:,} over {figures.span_s:,.1f} s"),
        ("mean rate", rate(figures.mean_rps, "not defined: all at one time")),
        (
            "peak rate",
            rate(figures.peak_rps, "not defined: less than a minute")
            + (" over 60 s" if figures.peak_rps else ""),
        ),
        (
            "burstiness",
            "not defined"
            if figures.burstiness is None
            else f"{figures.burstiness:.2f} (deviation of the gaps over their mean; Poisson has 1)",
        ),
    ]
    if figures.sessions is not None:
        facts.append(("sessions", f"{figures.sessions:,}"))
    share = figures.shared_share
    facts.append(
        (
            "prefix sharing",
            "not known: the trace names no blocks"
            if share is None
            else f"{share:.1%} of {figures.blocks:,} prompt blocks of {block_tokens} tokens have come before with all "
            "that precedes them",
        )
    )
    if longest is not None:
        facts.append(("too long", f"{figures.too_long:,} requests, for the {longest:,} tokens of {profile}"))
    return facts


def _cells(part: Lengths) -> list[str]:
    return [
        f"{part.mean:,.1f}",
        *(f"{value:,}" for value in (part.p50, part.p90, part.p99, part.max, part.total)),
    ]


def _json(
    file: Path,
    name: str,
    block_tokens: int,
    scan: Scan,
    figures: TraceFigures,
    assumed: list[str],
    longest: int | None,
) -> dict[str, Any]:
    from workloads.traces.lines import file_sha256

    return {
        "schema": 1,
        "file": file.name,
        "sha256": file_sha256(file),
        "format": name,
        "block_tokens": block_tokens,
        "rows": scan.rows,
        "out_of_order": scan.out_of_order,
        "changed": dict(scan.tally),
        "max_tokens": longest,
        "figures": figures.as_json(),
        "assumed": assumed,
    }
