"""`bench run`: replay a workload with every arm."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.commands.live_options import (
    AgainOption,
    Engine,
    LengthScale,
    Recalibrate,
    TimeScale,
    VllmFlags,
    WarmupSeconds,
    check_engine,
    refuse_in_virtual,
    scales,
)
from harness.commands.profile_options import (
    DEFAULT_PROFILE,
    KvBlocks,
    ModelName,
    ProfileName,
    TensorParallel,
)
from harness.commands.sensitivity_cmd import ASSUME_HELP, recompute_and_finish
from harness.commands.trace_options import (
    TenantsPath,
    TraceFormat,
    TraceFrom,
    TraceLimit,
    TracePath,
    TraceSeconds,
    TraceSkipLong,
    refuse_with_trace,
    refuse_without_trace,
)
from harness.errors import UserError

if TYPE_CHECKING:
    from harness.live_plan import LiveSettings, Machine
    from harness.profiles import Profile


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
    trace: TracePath = None,
    tenants: TenantsPath = None,
    trace_from: TraceFrom = 0.0,
    trace_seconds: TraceSeconds = None,
    trace_limit: TraceLimit = None,
    trace_format: TraceFormat = None,
    trace_skip_long: TraceSkipLong = False,
    seeds: Annotated[
        int | None,
        typer.Option(help="seeds 0..N-1, paired over the arms (default 3; 1 for a trace)", min=1, max=1000),
    ] = None,
    profile: ProfileName = DEFAULT_PROFILE,
    model: ModelName = None,
    tensor_parallel: TensorParallel = None,
    kv_blocks: KvBlocks = None,
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
    engine: Engine = "virtual",
    rate_scale: Annotated[float, typer.Option(help="factor on all arrival rates", min=0.001)] = 1.0,
    time_scale: TimeScale = None,
    length_scale: LengthScale = None,
    warmup_s: WarmupSeconds = 5.0,
    aa: AgainOption = True,
    recalibrate: Recalibrate = False,
    vllm_flag: VllmFlags = None,
    jobs: Annotated[int, typer.Option(help="runs at a time; 0 is one a core", min=0)] = 0,
    out: Annotated[
        Path | None, typer.Option(help="the run's folder (default: results/<name of the plan>)")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="delete what an earlier run of this plan left")
    ] = False,
    sensitivity: Annotated[
        bool,
        typer.Option("--sensitivity", help="then recompute the verdicts as `bench sensitivity` does"),
    ] = False,
    assume: Annotated[str, typer.Option(help=f"with --sensitivity: {ASSUME_HELP}")] = "",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="also write the summary to this file")
    ] = None,
) -> None:
    """Replay the five-phase workload, or a trace, with stock vLLM, upstream's best flags, and your patches."""
    from rich.console import Console

    from harness import live_setup
    from harness import run as runs
    from harness.arms import BASELINES, baseline, from_toml, read_toml, select, with_ablations
    from harness.assumptions import variations
    from harness.atomic import check_writable
    from harness.live_plan import Machine
    from harness.plan import RunPlan, WorkloadChoice
    from harness.profiles import load_profile
    from harness.sensitivity import Choice
    from harness.trace_run import DEFAULT_SECONDS, TraceRequest, longest_request, plan_trace
    from patches.seam.plan import resolve
    from workloads import five_phase

    if phase.strip() == "list":
        typer.echo("\n".join(five_phase.phase_lines()))
        return
    check_engine(engine)
    live, served = engine == "live", engine != "virtual"
    if served:
        live_setup.refuse_jobs(jobs)
        if sensitivity:
            raise UserError(
                f"--sensitivity recomputes verdicts of the virtual engine; leave it out with --engine {engine}"
            )
    else:
        refuse_in_virtual(recalibrate=recalibrate, vllm_flag=vllm_flag, no_aa=not aa)
    small = live and trace is None and live_setup.on_cpu()
    lengths = (live_setup.CPU_TIME_SCALE, live_setup.CPU_LENGTH_SCALE) if small else (1.0, 1.0)
    time_scale, length_scale = scales(time_scale, length_scale, lengths)
    for option, scale in (("rate", rate_scale), ("time", time_scale), ("length", length_scale)):
        if not math.isfinite(scale):
            raise UserError(f"--{option}-scale {scale}: it must be a finite number")
    if base not in BASELINES:
        raise UserError(f"--base {base}: it is 'tuned' or 'stock'")
    check_writable(json_path)
    five_phase.check_choice(phase, mode)
    if trace is not None:
        refuse_with_trace(phase, time_scale)
    else:
        refuse_without_trace(
            {
                "--tenants": tenants,
                "--trace-from": trace_from,
                "--trace-seconds": trace_seconds is not None,
                "--trace-limit": trace_limit,
                "--trace-format": trace_format,
                "--trace-skip-long": trace_skip_long,
            }
        )
    assumed = split(assume)
    if assumed and not sensitivity:
        raise UserError("--assume goes with --sensitivity")
    names = split(enable)
    values: dict[str, dict[str, Any]] = read_toml(knobs) if knobs is not None else {}
    values = resolve(names, set_ or [], values).knobs
    console = Console()
    settings: LiveSettings | None = None
    machine: Machine | None = None
    wanted = live_setup.LiveRequest(
        model, tuple(vllm_flag or ()), warmup_s, aa, recalibrate, tensor_parallel or 1
    )
    if live:
        settings, machine = live_setup.settle(wanted, length_scale, lambda text: say(console, text))
        if kv_blocks is not None:
            raise UserError("--kv-blocks is of a virtual run; a server's KV cache is as large as it says")
        if machine is not None and profile != DEFAULT_PROFILE:
            raise UserError(
                "--profile is of a GPU, and the vLLM installed here is the one for CPUs; leave it out"
            )
    # With a GPU and a live engine the profile gives flags and rates, and the model is what is served.
    loaded: Profile | Machine = machine or load_profile(
        profile, None if live else model, None if live else tensor_parallel, kv_blocks
    )
    if not isinstance(loaded, Machine):
        variations(loaded, assumed)
        if served and not live:
            settings = live_setup.settle_emulated(loaded, wanted)
    listed = [baseline(loaded, name) for name in BASELINES]
    listed += with_ablations(loaded, names, values, base, each=each, leave_one_out=leave_one_out)
    if arms is not None:
        listed += from_toml(arms, loaded)
    chosen = tuple(select(listed, split(only_arms)))
    if settings is not None:
        if live:
            live_setup.refuse_arms(chosen, settings)
        settings, chosen = live_setup.with_again(settings, chosen, aa)
    if trace is not None:
        asked = TraceRequest(
            path=trace,
            tenants=tenants,
            from_s=trace_from,
            seconds=DEFAULT_SECONDS if trace_seconds is None else trace_seconds,
            limit=trace_limit,
            format=trace_format,
            skip_long=trace_skip_long,
        )
        workload, said = plan_trace(
            asked, longest_request(loaded, chosen), rate_scale=rate_scale, length_scale=length_scale
        )
    else:
        said = []
        refuse_unsized(loaded, rate_scale, length_scale)
        workload = WorkloadChoice(
            phases=phase, mode=mode, rate_scale=rate_scale, time_scale=time_scale, length_scale=length_scale
        )
    plan = RunPlan(
        workload=workload,
        profile=loaded,
        seeds=tuple(range(seeds or (3 if trace is None and not served else 1))),
        arms=chosen,
        live=settings,
    )
    run_dir = out if out is not None else Path("results") / plan.run_name
    if fresh:
        runs.discard(run_dir)
    for line in [*said, f"run folder: {run_dir}"]:
        say(console, line)
    command = ["bench", *sys.argv[1:]]
    if served:
        from harness import live_run

        failed = live_run.execute(plan, run_dir, command, console)
        if not live:
            from harness import http_path

            http_path.measure(plan, run_dir, command, console)
        live_run.finish(plan, run_dir, failed, lambda: finish(run_dir, console, json_path))
        return
    runs.execute(plan, run_dir, jobs or runs.default_jobs(), command, console)
    if sensitivity:
        recompute_and_finish(run_dir, Choice(assume=tuple(assumed)), jobs, console, json_path)
    else:
        finish(run_dir, console, json_path)


def say(console: Any, text: str) -> None:
    """A line as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def refuse_unsized(profile: Profile | Machine, rate_scale: float, length_scale: float) -> None:
    """UserError where the five phases were never sized for a profile, or their documents do not fit its cache."""
    from workloads.five_phase import LONGEST_REQUEST_TOKENS

    if not profile.sized and rate_scale == 1.0:
        raise UserError(
            f"the five-phase rates were not found yet for {profile.name}: run `bench capacity --profile {profile.name} "
            "--write` once (some minutes), or choose a load with --rate-scale"
        )
    longest = round(LONGEST_REQUEST_TOKENS * length_scale)
    if profile.max_model_len < longest:
        raise UserError(
            f"{profile.name} holds requests of {profile.max_model_len:,} tokens, and the workload's documents need "
            f"{longest:,}: give more GPUs with --tensor-parallel, or --length-scale"
        )


def finish(run_dir: Path, console: Any, json_path: Path | None) -> None:
    """Write the summary of a finished run and show its table."""
    from harness.atomic import write_json
    from reports.summary import raise_if_invalid, write_summary
    from reports.terminal import print_summary

    summary = write_summary(run_dir)
    print_summary(summary, console)
    if json_path is not None:
        write_json(json_path, summary)
    say(console, f"summary: {run_dir / 'summary.json'}")
    say(console, f"next: bench report {run_dir}")
    raise_if_invalid(summary)


def split(text: str) -> list[str]:
    """A comma separated list, without empty entries."""
    return [part.strip() for part in text.split(",") if part.strip()]
