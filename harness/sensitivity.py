"""Recomputes a finished run's verdicts under other assumptions, into folders of its own beside the records.

`RUN/sensitivity/<assumption>/` is an ordinary run folder, so it is resumed and written whole like any other.
It holds the baseline that claims are made over and the arms whose verdicts can still be lost; the summary
then sets them against the same seeds of the run itself (`reports.sensitivity`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from harness import plan as plans
from harness import run as runs
from harness.assumptions import FOLDER, LEFT_OUT, unfit, variations
from harness.atomic import json_text, write_json
from harness.errors import UserError
from harness.papers import Json
from harness.plan import RunPlan
from harness.records import PLAN, read_plan


@dataclass(frozen=True, slots=True)
class Choice:
    """How much is recomputed.

    Attributes:
        seeds: the first so many seeds of the run.
        assume: names of assumptions; all if empty.
        only_arms: patched arms; all whose verdicts are better or worse if empty.
    """

    seeds: int = 1
    assume: tuple[str, ...] = ()
    only_arms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What is to be run.

    Attributes:
        runs: a plan for each assumption, with its folder.
        left_out: assumptions that cannot be made, each with the reason.
    """

    runs: tuple[tuple[RunPlan, Path], ...]
    left_out: dict[str, str]


def planned(run_dir: Path, choice: Choice) -> RunPlan:
    """The plan of the run whose verdicts are to be recomputed.

    Raises:
        UserError: there is none, it was made by other code, or the choice names seeds or assumptions that it
            does not have.
    """
    plan = plans.read(run_dir)
    if plan.live is not None:
        raise UserError(
            f"{run_dir} ran on a real server ({plan.engine}): recompute the verdicts of a virtual run of the same traffic"
        )
    variations(plan.step_profile, choice.assume)
    if choice.seeds > len(plan.seeds):
        raise UserError(f"--seeds {choice.seeds}: the run {run_dir} has {len(plan.seeds)}")
    return plan


def prepare(
    run_dir: Path, plan: RunPlan, deciding: Sequence[str], baseline: str, choice: Choice
) -> Recomputation:
    """The runs that recompute the verdicts of `deciding` against `baseline`.

    Raises:
        UserError: the choice names an arm without verdicts.
    """
    for name in choice.only_arms:
        if name not in deciding:
            have = ", ".join(deciding) or "none"
            raise UserError(f"--only-arms {name}: it has no verdict to recompute; arms that have: {have}")
    wanted = {baseline, *(choice.only_arms or deciding)}
    arms = tuple(arm for arm in plan.arms if arm.name in wanted)
    longest = max(arm.flags.max_model_len for arm in arms)
    found: list[tuple[RunPlan, Path]] = []
    left_out: dict[str, str] = {}
    for variation in variations(plan.step_profile, choice.assume):
        assumed = variation.of(plan.step_profile)
        if why := unfit(plan.step_profile, assumed, longest):
            left_out[variation.name] = why
        else:
            part = replace(plan, seeds=plan.seeds[: choice.seeds], arms=arms, assumptions=assumed)
            found.append((part, run_dir / FOLDER / variation.name))
    return Recomputation(tuple(found), left_out)


def recompute(
    run_dir: Path,
    plan: RunPlan,
    deciding: Sequence[str],
    baseline: str,
    choice: Choice,
    jobs: int,
    command: list[str],
    console: Console,
) -> None:
    """Run what is missing of a recomputation.

    Raises:
        UserError: the choice names an arm without verdicts.
        RunFailed: an arm failed.
    """
    todo = prepare(run_dir, plan, deciding, baseline, choice)
    for name, why in todo.left_out.items():
        console.print(f"not tried: {name}: {why}", highlight=False, markup=False, soft_wrap=True)
    if todo.left_out:
        write_json(run_dir / FOLDER / LEFT_OUT, todo.left_out)
    for part, folder in todo.runs:
        settle(part, folder)
    runs.execute_all(todo.runs, jobs, command, console)


def settle(plan: RunPlan, folder: Path) -> None:
    """Make room for a plan where another one lies: its records are kept if only arms and seeds differ."""
    path = folder / PLAN
    if not path.is_file():
        return
    wanted: Json = json.loads(json_text(plan.to_json()))
    try:
        there = read_plan(folder)
    except UserError:
        there = {}
    if there == wanted:
        return
    shared = {arm["name"]: arm for arm in there.get("arms", ())}
    if _kind(there) == _kind(wanted) and all(shared.get(arm["name"], arm) == arm for arm in wanted["arms"]):
        write_json(path, wanted)
    else:
        shutil.rmtree(folder)


def _kind(plan: Json) -> Json:
    return {key: value for key, value in plan.items() if key not in ("run", "sha256", "seeds", "arms")}
