"""`bench perf`: what the patches cost the scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("perf")(perf)


def perf(
    enable: Annotated[str, typer.Option(help="patches to measure, comma separated")],
    running: Annotated[int, typer.Option(help="running requests", min=1, max=4096)] = 256,
    waiting: Annotated[int, typer.Option(help="waiting requests", min=0, max=1_000_000)] = 5000,
    turns: Annotated[int, typer.Option(help="turns of each side; the medians are over these", min=1)] = 30,
    steps: Annotated[int, typer.Option(help="steps in a turn", min=1)] = 10,
    blocks: Annotated[int, typer.Option(help="KV blocks; 0 is twice what the running ones need", min=0)] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="a knob: PATCH.KNOB=VALUE")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="also write the figures to this file")
    ] = None,
) -> None:
    """Time vLLM's schedule + update with and without patches, in turns, on the real scheduler."""
    from rich.console import Console

    from harness import perf as bench
    from harness import vllm_env
    from harness.arms import Arm
    from harness.atomic import check_writable, write_json
    from harness.commands.run_cmd import split
    from harness.errors import UserError
    from patches.seam.plan import resolve

    names = split(enable)
    if not names:
        raise UserError("--enable: name at least one patch, as in --enable qos,mlfq,slru")
    plan = resolve(names, set_ or [])
    check_writable(json_path)
    vllm_env.prepare()
    console = Console()
    flags = bench.flags_for(running)
    with console.status(f"{turns} turns of {steps} steps at {running} running, {waiting} waiting"):
        result = bench.measure(
            Arm("stock", "stock", flags),
            Arm(plan.label, "stock", flags, plan),
            running,
            waiting,
            turns,
            steps,
            blocks or None,
        )
    console.print(
        f"{plan.label} at {running} running, {waiting} waiting, medians of {turns} turns:\n"
        f"  schedule + update   stock {result.stock_us:.0f} us, patched {result.patched_us:.0f} us, "
        f"ratio {result.ratio:.3f}\n"
        f"  add to the queue    stock {result.stock_add_us:.1f} us, patched {result.patched_add_us:.1f} us",
        highlight=False,
    )
    if json_path is not None:
        write_json(json_path, {"enable": list(plan.names), **result.to_json()})
