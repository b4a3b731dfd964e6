"""Carries out a run plan: starts the runner process, shows its progress, leaves a run folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from harness import vllm_metadata
from harness.atomic import write_text
from harness.display import display
from harness.errors import RunFailed, UserError
from harness.plan import RunPlan
from harness.records import is_complete

# Measured: a 300 s run with its tables, its trace and the forked interpreter.
_TASK_BYTES = 2_000_000_000


def execute(plan: RunPlan, run_dir: Path, jobs: int, command: list[str], console: Console) -> None:
    """Run what is missing in `run_dir`.

    Raises UserError when the folder holds another run, RunFailed when an arm failed.
    """
    execute_all([(plan, run_dir)], jobs, command, console)


def execute_all(
    runs: Sequence[tuple[RunPlan, Path]], jobs: int, command: list[str], console: Console
) -> None:
    """Run what is missing in several folders, as one run; errors as `execute`."""
    for plan, run_dir in runs:
        prepare(plan, run_dir)
    places = [run_dir / arm / f"seed-{seed}" for plan, run_dir in runs for arm, seed in plan.tasks]
    done, total = sum(map(is_complete, places)), len(places)
    if done:
        console.print(f"{done} of {total} runs are already there and are kept", highlight=False)
    if done == total:
        return
    folders = [run_dir for _, run_dir in runs]
    failed = _drive(folders, min(jobs, total - done), command, console, total, done)
    if failed:
        raise RunFailed(f"{len(failed)} of {total} runs failed, the first: {failed[0]}")


def prepare(plan: RunPlan, run_dir: Path) -> None:
    """Make the run's folder with its plan; UserError where it holds something else."""
    path = run_dir / "plan.json"
    text = json.dumps(plan.to_json(), indent=1, sort_keys=True) + "\n"
    if path.exists():
        try:
            same = json.loads(path.read_text(encoding="utf-8")).get("sha256") == plan.sha256
        except (json.JSONDecodeError, AttributeError):
            raise UserError(f"{path} is damaged; delete the folder {run_dir} and run again") from None
        if not same:
            raise UserError(
                f"{run_dir} holds another run (its plan or the code differs); choose another --out or delete it"
            )
        return
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{run_dir} is a file; --out names the run's folder")
    if run_dir.exists() and any(run_dir.iterdir()):
        raise UserError(f"{run_dir} is not empty and holds no run; choose another --out")
    run_dir.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def _drive(
    run_dirs: Sequence[Path], jobs: int, command: list[str], console: Console, total: int, done: int
) -> list[str]:
    vllm_metadata.ensure()
    failed: list[str] = []
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "harness.runner",
            *map(str, run_dirs),
            "--jobs",
            str(jobs),
            "--command",
            json.dumps(command),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
    ) as runner:
        assert runner.stdout is not None and runner.stderr is not None
        try:
            with display(console, total, done) as shown:
                for line in runner.stdout:
                    event = _event(line)
                    if event is None:
                        continue
                    shown.on(event)
                    if event["event"] == "failed":
                        failed.append(f"{event['arm']} seed {event['seed']}: {event['error']}")
            code = runner.wait()
        except BaseException:
            runner.kill()
            runner.wait()
            raise
        if code != 0 and not failed:
            last = runner.stderr.read().strip().splitlines()[-1:] or [f"exit code {code}"]
            raise RunFailed(f"the runner process ended early: {last[0]}")
    return failed


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except json.JSONDecodeError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def default_jobs() -> int:
    """One run a core, less where memory would not hold them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return cores
    return max(1, min(cores, memory // _TASK_BYTES))


def discard(run_dir: Path) -> None:
    """Delete a run folder (for --fresh); refuses a folder that holds no plan."""
    if run_dir.exists():
        if not (run_dir / "plan.json").is_file():
            raise UserError(f"{run_dir} holds no run; it is not deleted")
        shutil.rmtree(run_dir)
