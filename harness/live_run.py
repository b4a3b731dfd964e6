"""Carries out a live run: one server at a time, arms in turns, each task whole or not at all."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from harness import failures
from harness.display import display
from harness.errors import RunFailed, UserError
from harness.failures import Failure
from harness.plan import RunPlan
from harness.records import is_complete
from harness.run import prepare
from harness.worker import build_workload
from workloads.request import Workload

_OTHER = "failed"


def execute(plan: RunPlan, run_dir: Path, command: list[str], console: Console) -> list[str]:
    """Run what is missing in `run_dir`; a line for each task that failed, the others went on.

    Raises:
        UserError: the folder holds another run.
    """
    from harness.engines.live.order import interleaved

    prepare(plan, run_dir)
    names = [arm.name for arm in plan.arms]
    sha256 = plan.sha256
    tasks = interleaved(names, plan.seeds, sha256)
    todo = [(arm, seed) for arm, seed in tasks if not is_complete(run_dir / arm / f"seed-{seed}")]
    done, total = len(tasks) - len(todo), len(tasks)
    if done:
        console.print(f"{done} of {total} runs are already there and are kept", highlight=False)
    failed: list[str] = []
    if not todo:
        return failed
    workloads: dict[int, Workload] = {}
    with display(console, total, done) as shown:
        for arm, seed in todo:
            if seed not in workloads:
                # Tasks come by seed: older traces are not needed again.
                workloads = {seed: build_workload(plan, seed)}
            failure = _task(plan, arm, seed, workloads[seed], run_dir, command, sha256, shown.on)
            if failure is not None:
                failed.append(f"{arm} seed {seed}: {failure.text}")
    return failed


def finish(plan: RunPlan, run_dir: Path, failed: list[str], show: Callable[[], None]) -> None:
    """Show the summary of what there is, and say what failed.

    Raises:
        RunFailed: a task failed, or a figure may not be believed.
    """
    some = any(is_complete(run_dir / arm / f"seed-{seed}") for arm, seed in plan.tasks)
    try:
        if some:
            show()
    finally:
        if failed:
            raise RunFailed(f"{len(failed)} of {len(plan.tasks)} runs failed, the first: {failed[0]}")


def _task(
    plan: RunPlan,
    arm: str,
    seed: int,
    workload: Workload,
    run_dir: Path,
    command: list[str],
    plan_sha256: str,
    on: Callable[[Mapping[str, Any]], None],
) -> Failure | None:
    from harness.engines.live.task import run_task

    def tell(event: str, **fields: Any) -> None:
        on({"event": event, "arm": arm, "seed": seed, **fields})

    failures.clear(run_dir, arm, seed)
    tell("started", requests=len(workload.requests), virtual_s=workload.phases[-1].end_ns / 1e9)
    try:
        done = run_task(
            plan,
            plan.arm(arm),
            seed,
            workload,
            run_dir,
            command,
            lambda at_s, ended, _: tell("progress", virtual_s=max(at_s, 0.0), ended=ended),
            lambda text: tell("note", text=text),
            plan_sha256,
        )
    except (RunFailed, UserError) as error:
        failure = Failure(str(getattr(error, "code", _OTHER)), str(error))
    except Exception as error:
        # A fault of ours: the others still go on, and the whole story is kept.
        log = run_dir / "logs" / f"{arm}-seed-{seed}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(traceback.format_exc(), encoding="utf-8")
        failure = Failure(_OTHER, f"{type(error).__name__}: {error} (details in {log})")
    else:
        text = (
            f"server ready after {done.start_s:.0f} s, traffic {done.run_s:.0f} s, all {done.wall_s:.0f} s; "
            f"send delay p99 {done.send_delay_ms_p99:.1f} ms"
        )
        for finding in done.found:
            text += f"; {'INVALID' if finding.fatal else 'note'} {finding.code}: {finding.text}"
        tell("finished", text=text)
        return None
    failures.write(run_dir, arm, seed, failure)
    tell("failed", error=failure.text)
    return failure
