"""The process that does a run's work: imports vLLM once, then forks a child for each arm and seed.

Started by `bench run` as `python -m harness.runner RUN_DIR`, under a fixed PYTHONHASHSEED, so that no
set order inside vLLM differs between two runs. It speaks JSON lines on its standard output, and ends
when its parent does.
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
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from harness import plan as plans
from harness import vllm_env
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
    """Run every task of RUN_DIR/plan.json that has no complete folder yet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--command", required=True)
    args = parser.parse_args()
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    vllm_env.prepare()
    plan = plans.read(args.run_dir)
    todo = [(a, s) for a, s in plan.tasks if not is_complete(args.run_dir / a / f"seed-{s}")]
    if not todo:
        return 0
    say("loading")
    _warm_up(plan)
    failures = _Pool(plan, args.run_dir, json.loads(args.command), args.jobs).run(todo)
    return 1 if failures else 0


def _warm_up(plan: plans.RunPlan) -> None:
    """Import and configure once what every child needs, so that they inherit it."""
    from harness.engines.virtual.config import engine_config

    engine_config(plan.profile.model_dir, plan.arms[0].flags)
    for module in ("harness.worker", "harness.engines.virtual.engine", "vllm.v1.engine.core"):
        importlib.import_module(module)


class _Pool:
    """At most `jobs` children at a time, tasks in order of seed so that a trace is built once."""

    def __init__(self, plan: plans.RunPlan, run_dir: Path, command: list[str], jobs: int) -> None:
        self._plan, self._run_dir, self._command, self._jobs = plan, run_dir, command, jobs
        self._fork = multiprocessing.get_context("fork")
        self._workloads: dict[int, Workload] = {}
        self._failures = 0

    def run(self, todo: list[tuple[str, int]]) -> int:
        """Number of tasks that failed."""
        pending = list(todo)
        running: dict[int, tuple[Any, str, int]] = {}
        while pending or running:
            while pending and len(running) < self._jobs:
                arm, seed = pending.pop(0)
                child = self._start(arm, seed)
                running[child.sentinel] = (child, arm, seed)
            for sentinel in wait(list(running)):
                child, arm, seed = running.pop(sentinel)  # type: ignore[arg-type]
                child.join()
                if child.exitcode != 0:
                    self._failures += 1
                    if child.exitcode is not None and child.exitcode < 0:
                        say("failed", arm=arm, seed=seed, error=f"killed by signal {-child.exitcode}")
        return self._failures

    def _workload(self, seed: int) -> Workload:
        from harness.worker import build_workload

        if seed not in self._workloads:
            # Tasks come by seed: older traces are not needed again.
            self._workloads = {seed: build_workload(self._plan, seed)}
        return self._workloads[seed]

    def _start(self, arm: str, seed: int) -> Any:
        workload = self._workload(seed)
        say(
            "started",
            arm=arm,
            seed=seed,
            requests=len(workload.requests),
            virtual_s=workload.phases[-1].end_ns / 1e9,
        )
        child = self._fork.Process(target=self._work, args=(arm, seed, workload))
        child.start()
        return child

    def _work(self, arm: str, seed: int, workload: Workload) -> None:
        from harness.worker import run_task

        _die_with_parent()
        last = 0.0

        def progress(virtual_s: float, ended: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= _TELL_EVERY_S:
                last = now
                say("progress", arm=arm, seed=seed, virtual_s=virtual_s, ended=ended)

        try:
            done = run_task(
                self._plan, self._plan.arm(arm), seed, workload, self._run_dir, self._command, progress
            )
        except (RunFailed, UserError) as error:
            say("failed", arm=arm, seed=seed, error=str(error))
            os._exit(1)
        except BaseException as error:
            log = self._run_dir / "logs" / f"{arm}-seed-{seed}.log"
            log.parent.mkdir(exist_ok=True)
            log.write_text(traceback.format_exc(), encoding="utf-8")
            say("failed", arm=arm, seed=seed, error=f"{type(error).__name__}: {error} (details in {log})")
            os._exit(1)
        say(
            "finished",
            arm=arm,
            seed=seed,
            wall_s=done.wall_s,
            virtual_s=done.virtual_s,
            upstream_s=done.upstream_s,
            steps=done.steps,
        )
        # A forked child must not run the parent's exit handlers.
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
