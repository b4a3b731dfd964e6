"""`bench cache`: hit rates of eviction policies on a trace, in vLLM's own block pool."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from harness import vllm_env
from harness.atomic import check_writable, write_json
from harness.errors import UserError


def register(app: typer.Typer) -> None:
    """Add `cache` to the command line."""
    app.command("cache")(cache)


def cache(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="Mooncake's JSONL: timestamp and hash_ids per request.")
    ],
    blocks: Annotated[
        str, typer.Option("--blocks", metavar="N,N", help="Pool sizes, in blocks of the trace.")
    ] = "2500,5000,10000",
    policies: Annotated[
        str,
        typer.Option(
            "--policies",
            metavar="NAME,NAME",
            help="Of lru (vLLM's own), slru (the patch), slru-80-20 (a fixed split, for comparison), lru-next64 and "
            "slru-next64 (sparing what the next 64 requests need), belady (clairvoyant bound), infinite (bound).",
        ),
    ] = "lru,slru,belady",
    scan_mix: Annotated[
        str,
        typer.Option(
            "--scan-mix",
            metavar="0|1|0,1",
            help="1: after each request comes one of the same length whose blocks nobody asks for again; it "
            "cannot hit, and its blocks count as requested.",
        ),
    ] = "0,1",
    in_flight: Annotated[
        int, typer.Option("--in-flight", metavar="N", help="Requests that hold their blocks at a time.")
    ] = 1,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Also write the figures as JSON.")
    ] = None,
) -> None:
    """Replay a trace of prefix blocks through vLLM's block pool and print hit blocks / requested blocks.

    Each request takes the longest cached prefix of its blocks, gets new ones for the rest, caches them and
    frees all, tail first. A request longer than the pool keeps what fits; how many did is said.
    """
    from harness.cache_policies import POLICIES

    check_writable(json_path)
    names = _names(policies, POLICIES)
    sizes = sorted(_positive(part, "--blocks") for part in _parts(blocks, "--blocks"))
    mixes = _mixes(scan_mix)
    if in_flight < 1:
        raise UserError(f"--in-flight {in_flight}: must be 1 or more")

    from harness.cache_trace import read_trace

    requests = read_trace(trace)
    console = Console()
    vllm_env.prepare()
    rows = _measure_all(requests, names, sizes, mixes, in_flight, Console(stderr=True))
    _show(rows, names, trace.name, console)
    if json_path is not None:
        write_json(json_path, {"trace": trace.name, "in_flight": in_flight, "rows": rows})


def _measure_all(
    trace: Any, names: list[str], sizes: list[int], mixes: list[bool], in_flight: int, console: Console
) -> list[dict[str, Any]]:
    from harness.cache_replay import measure

    tasks = [(scan, size, name) for scan in mixes for size in sizes for name in names]
    rows: list[dict[str, Any]] = []
    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bars:
        work = bars.add_task("replay", total=sum((1 + scan) * len(trace.requests) for scan, _, _ in tasks))
        done = 0
        for scan, size, name in tasks:
            title = f"{name}, {size} blocks{', scan 1:1' if scan else ''}"
            bars.update(work, description=title)
            if not console.is_terminal:
                console.print(title, highlight=False, markup=False)
            result = measure(
                trace,
                name,
                size,
                scan=scan,
                in_flight=in_flight,
                progress=lambda n, done=done: bars.update(work, completed=done + n),  # type: ignore[misc]
            )
            done += (1 + scan) * len(trace.requests)
            bars.update(work, completed=done)
            rows.append(
                {
                    "policy": name,
                    "blocks": size,
                    "scan_mix": int(scan),
                    "hit_rate": round(result.hit_rate, 9),
                    "hits": result.hits,
                    "requested": result.requested,
                    "truncated_requests": result.truncated,
                }
            )
    return rows


def _show(rows: list[dict[str, Any]], names: list[str], title: str, console: Console) -> None:
    table = Table(title=f"{title}: hit blocks / requested blocks", title_justify="left")
    table.add_column("scan")
    table.add_column("blocks", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    by_line: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        by_line.setdefault((row["scan_mix"], row["blocks"]), {})[row["policy"]] = row["hit_rate"]
    for (scan, size), rates in by_line.items():
        lru = rates.get("lru")
        table.add_row(
            "1:1" if scan else "none",
            f"{size:,}",
            *(
                f"{rates[name]:.2%}" + (f" ({rates[name] / lru - 1:+.1%})" if lru and name != "lru" else "")
                for name in names
            ),
        )
    console.print(table)
    if "lru" in names and len(names) > 1:
        console.print("In brackets: relative to lru.", style="dim")
    cut: dict[tuple[int, int], int] = {}
    for row in rows:
        key = row["blocks"], row["scan_mix"]
        cut[key] = max(cut.get(key, 0), row["truncated_requests"])
    for (size, scan), count in cut.items():
        if count:
            mix = " with the scan" if scan else ""
            console.print(f"{count} requests{mix} were longer than {size} blocks and were cut to that.")


def _parts(text: str, option: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UserError(f"{option} is empty; give at least one value")
    return list(dict.fromkeys(parts))


def _names(text: str, known: tuple[str, ...]) -> list[str]:
    names = _parts(text, "--policies")
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise UserError(f"--policies: no policy {name!r}; {hint}")
    return names


def _positive(text: str, option: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise UserError(f"{option}: {text!r} is not a positive whole number; for example {option} 2500,5000")
    return int(text)


def _mixes(text: str) -> list[bool]:
    parts = _parts(text, "--scan-mix")
    for part in parts:
        if part not in ("0", "1"):
            raise UserError(f"--scan-mix: {part!r} is neither 0 nor 1")
    return [part == "1" for part in parts]
