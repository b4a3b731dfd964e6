"""`bench run`: replay a workload with every arm."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.errors import UserError

DEFAULT_PROFILE = "rtxpro6000-96g-shared/llama-3.1-8b"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("run")(run)


def run(
    enable: Annotated[
        str, typer.Option(help="patches to switch on, comma separated: names, or import paths of your own")
    ] = "",
    phase: Annotated[
        str, typer.Option(help="all, one of 1..5, several as in 2,4, or list to see them")
    ] = "all",
    seeds: Annotated[int, typer.Option(help="seeds 0..N-1, paired over the arms", min=1, max=1000)] = 3,
    profile: Annotated[
        str, typer.Option(help="GPU/MODEL, or a folder with a profile.toml")
    ] = DEFAULT_PROFILE,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="a knob: PATCH.KNOB=VALUE; may be repeated")
    ] = None,
    knobs: Annotated[Path | None, typer.Option(help="TOML file of knobs, one table a patch")] = None,
    arms: Annotated[Path | None, typer.Option(help="TOML file of more arms")] = None,
    only_arms: Annotated[str, typer.Option(help="run only these arms, comma separated")] = "",
    base: Annotated[str, typer.Option(help="flags under the patches: tuned or stock")] = "tuned",
    each: Annotated[bool, typer.Option("--each", help="add an arm for each patch alone")] = False,
    leave_one_out: Annotated[
        bool, typer.Option("--leave-one-out", help="add an arm without each patch")
    ] = False,
    mode: Annotated[str, typer.Option(help="deployment mode: single")] = "single",
    engine: Annotated[
        str, typer.Option(help="virtual (the default; live and emulated are planned)")
    ] = "virtual",
    rate_scale: Annotated[float, typer.Option(help="factor on all arrival rates", min=0.001)] = 1.0,
    time_scale: Annotated[float, typer.Option(help="factor on the length of the phases", min=0.001)] = 1.0,
    length_scale: Annotated[float, typer.Option(help="factor on prompt and output lengths", min=0.001)] = 1.0,
    jobs: Annotated[int, typer.Option(help="runs at a time; 0 is one a core", min=0)] = 0,
    out: Annotated[
        Path | None, typer.Option(help="the run's folder (default: results/<name of the plan>)")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="delete what an earlier run of this plan left")
    ] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="also write the summary to this file")
    ] = None,
) -> None:
    """Replay the five-phase workload with stock vLLM, upstream's best flags, and your patches."""
    from rich.console import Console

    from harness import run as runs
    from harness.arms import BASELINES, baseline, from_toml, read_toml, select, with_ablations
    from harness.atomic import check_writable
    from harness.plan import RunPlan, WorkloadChoice
    from harness.profiles import load_profile
    from patches.seam.plan import resolve
    from workloads import five_phase

    if phase.strip() == "list":
        typer.echo("\n".join(five_phase.phase_lines()))
        return
    if engine != "virtual":
        raise UserError(f"--engine {engine}: only 'virtual' is built so far; live and emulated are planned")
    for option, scale in (("rate", rate_scale), ("time", time_scale), ("length", length_scale)):
        if not math.isfinite(scale):
            raise UserError(f"--{option}-scale {scale}: it must be a finite number")
    if base not in BASELINES:
        raise UserError(f"--base {base}: it is 'tuned' or 'stock'")
    check_writable(json_path)
    loaded = load_profile(profile)
    five_phase.check_choice(phase, mode)
    names = split(enable)
    values: dict[str, dict[str, Any]] = read_toml(knobs) if knobs is not None else {}
    values = resolve(names, set_ or [], values).knobs
    listed = [baseline(loaded, name) for name in BASELINES]
    listed += with_ablations(loaded, names, values, base, each=each, leave_one_out=leave_one_out)
    if arms is not None:
        listed += from_toml(arms, loaded)
    plan = RunPlan(
        workload=WorkloadChoice(
            phases=phase, mode=mode, rate_scale=rate_scale, time_scale=time_scale, length_scale=length_scale
        ),
        profile=loaded,
        seeds=tuple(range(seeds)),
        arms=tuple(select(listed, split(only_arms))),
    )
    run_dir = out if out is not None else Path("results") / plan.run_name
    if fresh:
        runs.discard(run_dir)
    console = Console()
    console.print(f"run folder: {run_dir}", highlight=False, markup=False, soft_wrap=True)
    runs.execute(plan, run_dir, jobs or runs.default_jobs(), ["bench", *sys.argv[1:]], console)
    finish(run_dir, console, json_path)


def finish(run_dir: Path, console: Any, json_path: Path | None) -> None:
    """Write the summary of a finished run and show its table."""
    from harness.atomic import write_json
    from reports.summary import raise_if_invalid, write_summary
    from reports.terminal import print_summary

    summary = write_summary(run_dir)
    print_summary(summary, console)
    if json_path is not None:
        write_json(json_path, summary)
    console.print(f"summary: {run_dir / 'summary.json'}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"next: bench report {run_dir}", highlight=False, markup=False, soft_wrap=True)
    raise_if_invalid(summary)


def split(text: str) -> list[str]:
    """A comma separated list, without empty entries."""
    return [part.strip() for part in text.split(",") if part.strip()]
