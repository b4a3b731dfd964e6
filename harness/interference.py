"""Runs each tenant of a finished run alone, to tell what the others cost it.

`RUN/alone/<tenant>/` is an ordinary run folder: the same trace less all other tenants' requests, on upstream's best
flags and on the run's first seeds. The report sets every arm's times against those alone (`reports.interference`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
from rich.console import Console

from harness import plan as plans
from harness import run as runs
from harness.arms import baseline
from harness.errors import UserError
from harness.plan import RunPlan
from harness.records import arm_dir, is_complete
from harness.sensitivity import settle

FOLDER = "alone"
# What a tenant is run on alone: the flags that claims are made over.
ARM = "tuned"
_PLAIN = re.compile(r"[^A-Za-z0-9_+.-]|^\.")


def planned(run_dir: Path, seeds: int) -> RunPlan:
    """The plan of the run whose tenants are to be run alone.

    Raises:
        UserError: there is none, it was made by other code, it ran on a real server, or has fewer seeds.
    """
    plan = plans.read(run_dir)
    if plan.live is not None:
        raise UserError(
            f"{run_dir} ran on a real server ({plan.engine}): tenants run alone on the virtual engine only; "
            "name a virtual run of the same traffic"
        )
    if seeds > len(plan.seeds):
        raise UserError(f"--seeds {seeds}: the run {run_dir} has {len(plan.seeds)}")
    return plan


def prepare(run_dir: Path, plan: RunPlan, seeds: int) -> list[tuple[RunPlan, Path]]:
    """One run for each tenant that sent anything in the first `seeds` seeds, with its folder.

    Raises:
        UserError: none of these seeds has a finished arm.
    """
    arm = next((one for one in plan.arms if one.name == ARM), None) or baseline(plan.step_profile, ARM)
    chosen = plan.seeds[:seeds]
    return [
        (
            replace(plan, workload=replace(plan.workload, only_tenant=name), arms=(arm,), seeds=chosen),
            run_dir / FOLDER / folder_name(name),
        )
        for name in _senders(run_dir, plan, chosen)
    ]


def run_alone(
    run_dir: Path, plan: RunPlan, seeds: int, jobs: int, command: list[str], console: Console
) -> None:
    """Run what is missing.

    Raises:
        UserError: none of the seeds has a finished arm.
        RunFailed: an arm failed.
    """
    todo = prepare(run_dir, plan, seeds)
    for part, folder in todo:
        settle(part, folder)
    runs.execute_all(todo, jobs, command, console)


def folder_name(tenant: str) -> str:
    """The name itself where it can name a folder; else with what cannot stand there as %XX."""
    return _PLAIN.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), tenant) or "%"


def _senders(run_dir: Path, plan: RunPlan, seeds: tuple[int, ...]) -> list[str]:
    """Tenants with requests in any of the seeds, by name; all arms of a seed replay the same trace."""
    found: set[str] = set()
    for seed in seeds:
        places = (arm_dir(run_dir, arm.name, seed) for arm in plan.arms)
        place = next(filter(is_complete, places), None)
        if place is not None:
            names = pq.read_table(place / "requests.parquet", columns=["tenant"]).column("tenant")
            found.update(map(str, names.unique().to_pylist()))
    if not found:
        raise UserError(
            f"{run_dir} has no finished arm of seed {seeds[0]}: finish it with its `bench run` command first"
        )
    return sorted(found)
