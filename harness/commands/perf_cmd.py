"""`bench perf`: what the patches cost the scheduler, and where the virtual engine's time goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.commands.profile_options import (
    DEFAULT_PROFILE,
    KvBlocks,
    ModelName,
    ProfileName,
    TensorParallel,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from harness.engine_perf import EnginePerf
    from harness.profiles import Profile
    from patches.seam.plan import PatchPlan


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("perf")(perf)


def perf(
    enable: Annotated[str, typer.Option(help="patches to measure, comma separated")] = "",
    engine: Annotated[
        bool,
        typer.Option("--engine", help="where the whole engine's time goes, on a fixed overload of a profile"),
    ] = False,
    running: Annotated[int, typer.Option(help="running requests", min=1, max=4096)] = 256,
    waiting: Annotated[int, typer.Option(help="waiting requests", min=0, max=1_000_000)] = 5000,
    turns: Annotated[int, typer.Option(help="turns of each side; the medians are over these", min=1)] = 30,
    steps: Annotated[int, typer.Option(help="steps in a turn", min=1)] = 10,
    blocks: Annotated[
        int,
        typer.Option(
            help="KV blocks, all cached at the start; 0: twice what the running ones need, empty", min=0
        ),
    ] = 0,
    profile: ProfileName = DEFAULT_PROFILE,
    model: ModelName = None,
    tensor_parallel: TensorParallel = None,
    kv_blocks: KvBlocks = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="a knob: PATCH.KNOB=VALUE")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="also write the figures to this file")
    ] = None,
) -> None:
    """Time vLLM's schedule + update with and without patches, in turns, on the real scheduler.

    With --engine: run a fixed overload of a profile through the virtual engine, stock and patched, and print
    who spends the time. --waiting, --turns, --steps and --blocks are for the first kind, --profile, --model,
    --tensor-parallel and --kv-blocks for the second.
    """
    from rich.console import Console

    from harness import vllm_env
    from harness.atomic import check_writable
    from harness.commands.run_cmd import split
    from harness.errors import UserError
    from patches.seam.plan import resolve

    names = split(enable)
    if not names and not engine:
        raise UserError(
            "--enable: name at least one patch, as in --enable qos,mlfq,slru; or ask for --engine"
        )
    plan = resolve(names, set_ or []) if names else None
    check_writable(json_path)
    console = Console()
    if engine:
        from harness.profiles import load_profile

        loaded = load_profile(profile, model, tensor_parallel, kv_blocks)
        vllm_env.prepare()
        _engine(loaded, plan, running, json_path, console)
        return
    assert plan is not None
    vllm_env.prepare()
    _scheduler(plan, running, waiting, turns, steps, blocks, json_path, console)


def _scheduler(
    plan: PatchPlan,
    running: int,
    waiting: int,
    turns: int,
    steps: int,
    blocks: int,
    json_path: Path | None,
    console: Console,
) -> None:
    from harness import perf as bench
    from harness.arms import Arm
    from harness.atomic import write_json

    flags = bench.flags_for(running)
    brought = flags.model_copy(update=plan.engine_flags)
    with console.status(f"{turns} turns of {steps} steps at {running} running, {waiting} waiting"):
        result = bench.measure(
            Arm("stock", "stock", flags),
            Arm(plan.label, "stock", brought, plan),
            running,
            waiting,
            turns,
            steps,
            blocks or None,
        )
    console.print(
        f"{plan.label} at {running} running, {waiting} waiting, {result.blocks:,} blocks, medians of {turns} turns:\n"
        f"  schedule + update   stock {result.stock_us:.0f} us, patched {result.patched_us:.0f} us, "
        f"ratio {result.ratio:.3f}\n"
        f"  add to the queue    stock {result.stock_add_us:.1f} us, patched {result.patched_add_us:.1f} us",
        highlight=False,
    )
    if json_path is not None:
        write_json(json_path, {"enable": list(plan.names), **result.to_json()})


def _engine(
    profile: Profile, plan: PatchPlan | None, running: int, json_path: Path | None, console: Console
) -> None:
    from harness import engine_perf as bench
    from harness.arms import Arm, baseline
    from harness.atomic import write_json
    from harness.engines.flags import parse_flags

    over = {
        "max_num_seqs": running,
        "max_num_batched_tokens": max(baseline(profile, "stock").flags.max_num_batched_tokens, running),
    }
    flags = parse_flags({**profile.stock, **over}, f"profile {profile.name}")
    arms = [Arm("stock", "stock", flags)]
    if plan is not None:
        arms.append(Arm(plan.label, "stock", flags, plan))
    results = []
    for arm in arms:
        with console.status(f"{arm.name}: {running} seats on {profile.name}"):
            results.append(bench.measure(arm, profile, running))
    console.print(f"real time of a step, us: {running} seats on {profile.name}", highlight=False)
    console.print(_table(results))
    for result in results:
        console.print(
            f"{result.arm}: {result.ratio:.2f} times vLLM's own schedule and update; what is neither vLLM's nor"
            f" the patches' is {100 * result.own_share:.0f}%; {result.virtual_s:.0f} s of virtual time in"
            f" {result.spent.wall_s:.1f} s; profile look-up {result.look_up_us:.1f} us a step",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    if json_path is not None:
        write_json(
            json_path,
            {"profile": profile.name, "seats": running, "arms": [result.to_json() for result in results]},
        )


def _table(results: list[EnginePerf]) -> Table:
    from rich.table import Table

    from harness.engines.virtual.account import LABELS

    table = Table()
    table.add_column("who")
    for result in results:
        table.add_column(result.arm, justify="right")
        table.add_column("share", justify="right")
    for part, label in LABELS.items():
        cells = []
        for result in results:
            seconds = getattr(result.spent, part)
            cells += [f"{1e6 * seconds / result.steps:.0f}", f"{100 * seconds / result.spent.wall_s:.1f}%"]
        table.add_row(label, *cells)
    table.add_section()
    whole = [(f"{1e6 * r.spent.wall_s / r.steps:.0f}", f"{r.running:.0f} running") for r in results]
    table.add_row("all", *(cell for pair in whole for cell in pair))
    return table
