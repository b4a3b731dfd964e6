"""`bench capacity`: find what a profile can carry, and size the five phases by it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.commands.profile_options import DEFAULT_PROFILE, ModelName, ProfileName, TensorParallel


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("capacity")(capacity)


def capacity(
    profile: ProfileName = DEFAULT_PROFILE,
    model: ModelName = None,
    tensor_parallel: TensorParallel = None,
    seed: Annotated[
        int, typer.Option(help="seed of the probing traffic (not one of the runs' seeds)", min=0)
    ] = 1000,
    jobs: Annotated[int, typer.Option(help="phases at a time; 0 is one a core", min=0)] = 0,
    write: Annotated[bool, typer.Option("--write", help="put the rates into the profile's file")] = False,
    out: Annotated[
        Path | None, typer.Option(help="with --write: the profile's folder (default: where it is)")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="also write the figures to this file")
    ] = None,
) -> None:
    """Find the rate of each phase's mix at which the backlog starts to grow, and the rates that follow."""
    from rich.console import Console

    from harness import capacity as search
    from harness.atomic import check_writable, write_json
    from harness.profiles import load_profile
    from harness.run import default_jobs
    from workloads import five_phase

    check_writable(json_path)
    console = Console()
    loaded = load_profile(profile, model, tensor_parallel)
    found = []
    with console.status("probing; each phase takes a minute or more"):
        for one in search.find_all(loaded, seed, jobs or default_jobs()):
            found.append(one)
            for probe in one.probes:
                word = "keeps up" if probe.keeps_up else "grows"
                console.print(
                    f"phase {probe.phase} at {probe.scale:.4g} x the table, {probe.offered_rps:.2f} requests/s: {word} "
                    f"({probe.grown_requests:+d} of {probe.arrived_requests})",
                    highlight=False,
                    soft_wrap=True,
                )
    found.sort(key=lambda c: c.phase)
    factor = search.slo_factor(loaded, five_phase.build(seed, phases="all", rate_scale=0.05))
    for one in found:
        console.print(
            f"phase {one.phase}: capacity {one.scale:.4g} x the table ({one.offered_rps:.2f} requests/s), "
            f"load {one.load:g} -> rate_scale {one.rate_scale:.3g}",
            highlight=False,
        )
    console.print(f"SLO factor {factor:g}", highlight=False)
    if write:
        written = search.write(loaded, found, factor, out or loaded.path)
        console.print(f"written to {written}", highlight=False, soft_wrap=True)
    if json_path is not None:
        write_json(
            json_path,
            {
                "profile": loaded.name,
                "slo_factor": factor,
                "phases": [
                    {
                        "phase": c.phase,
                        "capacity_scale": c.scale,
                        "capacity_rps": c.offered_rps,
                        "load": c.load,
                        "rate_scale": c.rate_scale,
                    }
                    for c in found
                ],
            },
        )
