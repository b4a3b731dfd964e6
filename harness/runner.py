"""The process that does a run's work: imports vLLM once, then forks a child for each arm and seed.

Started by `bench run` as `python -m harness.runner RUN_DIR`, under a fixed PYTHONHASHSEED, so that no
set order inside vLLM differs between two runs. Several folders may be named: those of one run under other
assumptions share the import. It speaks JSON lines on its standard output, and ends when its parent does.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from harness import plan as plans
from harness import vllm_env
from harness.assumptions import BASE
from harness.errors import RunFailed, UserError
from harness.records import is_complete
from workloads.request import Workload

_PR_SET_PDEATHSIG = 1
_TELL_EVERY_S = 0.25


def say(event: str, **fields: Any) -> None:
    """One JSON line; a single write, so that children may share the stream."""
    line = json.dumps({"event": event, **fields}) + "\n"
    os.write(1, line.encode())


def _die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends (Linux; elsewhere it is left to the pipe)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Run every task of each RUN_DIR/plan.json that has no complete folder yet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dirs", type=Path, nargs="+")
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--command", required=True)
    args = parser.parse_args()
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    vllm_env.prepare()
    runs = [(plans.read(run_dir), run_dir) for run_dir in args.run_dirs]
    todo = [task for plan, run_dir in runs for task in tasks_of(plan, run_dir)]
    if not todo:
        return 0
    say("loading")
    _warm_up(todo[0].plan)
    # All runs of a seed together, since they share its trace. Of one run's the longest go first, which is those with
    # the most patches: begun last, they would leave a core idle at the end.
    places = {run_dir: place for place, (_, run_dir) in enumerate(runs)}
    todo.sort(key=lambda task: (task.seed, places[task.run_dir], -len(task.plan.arm(task.arm).patches)))
    failures = _Pool(json.loads(args.command), args.jobs).run(todo)
    return 1 if failures else 0


@dataclass(frozen=True, slots=True)
class Task:
    """One arm on one seed of one run."""

    plan: plans.RunPlan
    run_dir: Path
    arm: str
    seed: int

    @property
    def label(self) -> str:
        """The arm as the display names it."""
        if only := self.plan.workload.only_tenant:
            return f"{only} alone: {self.arm}"
        under = self.plan.assumptions
        return self.arm if under == BASE else f"{under.name}: {self.arm}"


def tasks_of(plan: plans.RunPlan, run_dir: Path) -> list[Task]:
    """What a run folder lacks, in the plan's order."""
    return [
        Task(plan, run_dir, arm, seed)
        for arm, seed in plan.tasks
        if not is_complete(run_dir / arm / f"seed-{seed}")
    ]


def _warm_up(plan: plans.RunPlan) -> None:
    """Import and configure once what every child needs, so that they inherit it."""
    from harness.engines.virtual.config import engine_config

    engine_config(plan.step_profile.model_dir, plan.arms[0].flags)
    for module in ("harness.worker", "harness.engines.virtual.engine", "vllm.v1.engine.core"):
        importlib.import_module(module)


class _Pool:
    """At most `jobs` children at a time, tasks in order of seed so that a trace is built once."""

    def __init__(self, command: list[str], jobs: int) -> None:
        self._command, self._jobs = command, jobs
        self._fork = multiprocessing.get_context("fork")
        self._workloads: dict[tuple[str, str, int], Workload] = {}
        self._failures = 0

    def run(self, todo: list[Task]) -> int:
        """Number of tasks that failed."""
        pending = list(todo)
        running: dict[int, tuple[Any, Task]] = {}
        while pending or running:
            while pending and len(running) < self._jobs:
                task = pending.pop(0)
                child = self._start(task)
                running[child.sentinel] = (child, task)
            for sentinel in wait(list(running)):
                child, task = running.pop(sentinel)  # type: ignore[arg-type]
                child.join()
                if child.exitcode != 0:
                    self._failures += 1
                    if child.exitcode is not None and child.exitcode < 0:
                        error = f"killed by signal {-child.exitcode}"
                        say("failed", arm=task.label, seed=task.seed, error=error)
        return self._failures

    def _workload(self, task: Task) -> Workload:
        from harness.worker import build_workload

        # Runs under other assumptions replay the same traffic.
        key = (json.dumps(task.plan.workload.to_json()), task.plan.profile.sha256, task.seed)
        if key not in self._workloads:
            # Tasks come by seed: older traces are not needed again.
            self._workloads = {key: build_workload(task.plan, task.seed)}
        return self._workloads[key]

    def _start(self, task: Task) -> Any:
        workload = self._workload(task)
        say(
            "started",
            arm=task.label,
            seed=task.seed,
            requests=len(workload.requests),
            virtual_s=workload.phases[-1].end_ns / 1e9,
        )
        child = self._fork.Process(target=self._work, args=(task, workload))
        child.start()
        return child

    def _work(self, task: Task, workload: Workload) -> None:
        from harness.worker import run_task

        _die_with_parent()
        last = 0.0

        def progress(virtual_s: float, ended: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= _TELL_EVERY_S:
                last = now
                say("progress", arm=task.label, seed=task.seed, virtual_s=virtual_s, ended=ended)

        plan, seed = task.plan, task.seed
        try:
            done = run_task(plan, plan.arm(task.arm), seed, workload, task.run_dir, self._command, progress)
        except (RunFailed, UserError) as error:
            say("failed", arm=task.label, seed=seed, error=str(error))
            os._exit(1)
        except BaseException as error:
            log = task.run_dir / "logs" / f"{task.arm}-seed-{seed}.log"
            log.parent.mkdir(exist_ok=True)
            log.write_text(traceback.format_exc(), encoding="utf-8")
            said = f"{type(error).__name__}: {error} (details in {log})"
            say("failed", arm=task.label, seed=seed, error=said)
            os._exit(1)
        say(
            "finished",
            arm=task.label,
            seed=seed,
            wall_s=done.wall_s,
            virtual_s=done.virtual_s,
            upstream_s=done.upstream_s,
            steps=done.steps,
            spent=done.spent,
        )
        # A forked child must not run the parent's exit handlers.
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
