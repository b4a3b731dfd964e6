"""`bench validate`: replay a measured run through the virtual engine and say how far off it is.

Nothing is fitted here: the profile's tables are frozen, and the engine's limits are those that the run
recorded. Both sides count latency from the moment the engine took a request from its input queue, because
that is what vLLM records as `queued_ts`; a run without it counts from arrival, on both sides.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.errors import RunFailed
from harness.measured_config import blocks_of, captured_sizes, fitted, flags_of, refuse_unmodelled, version_of
from harness.measured_profile import profile_for
from harness.measured_run import MeasuredRequest, MeasuredRun, read_measured_run
from harness.profiles import Profile, StepTimeModel
from harness.profiles.model import outside_shares, unmeasured_shares
from harness.validation_figures import METRICS, Latency, Pair, Validation, statistics_of, unqueued_of
from workloads.request import Phase, PlannedRequest, Tenant, Workload

_NS = 1_000_000_000
PINNED = (0, 32)


def validate(
    folder: Path,
    profile: str | None = None,
    blocks: int | None = None,
    model: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Validation:
    """Replay the measured run in `folder`.

    Args:
        folder: requests.jsonl, workload.jsonl and run_meta.json.
        profile: name or path of a profile, or a GPU; by default the one for the recorded GPU and model.
        blocks: KV blocks; by default those recorded, else derived from the GPU's memory.
        model: known shape or folder with a config.json, in place of the recorded model.
        progress: told now and then how many requests have ended, and of how many.

    Raises UserError for bad input and for what is not modelled, RunFailed when a request never ends.
    """
    run = read_measured_run(folder)
    refuse_unmodelled(run)
    notes: list[str] = []
    chosen = profile_for(run, profile, model, notes)
    flags = flags_of(run, chosen, notes)
    kv_blocks = blocks if blocks is not None else blocks_of(run, chosen, flags, notes)
    flags = fitted(run, chosen, flags, kv_blocks, notes)
    notes += _notes_on(run, chosen)

    from harness.engines.virtual.engine import VirtualEngine

    captured = captured_sizes(run, flags)
    step_time = StepTimeModel(chosen, flags.max_num_seqs, flags.max_num_batched_tokens, captured)
    engine = VirtualEngine(chosen.model_dir, flags, step_time, kv_blocks, cpu_step_us=chosen.cpu_step_us)
    try:
        replay = engine.run(as_workload(run), _ended(progress, len(run.requests)))
    finally:
        engine.shutdown()
    rows = {row["request_id"]: row for row in replay.tables["requests"].to_pylist()}
    steps = _Steps(replay.tables["steps"])
    pairs = tuple(_pair(run, request, rows[request.request_id], steps) for request in run.requests)
    return Validation(
        profile=chosen.name,
        pairs=pairs,
        skipped=run.skipped,
        blocks=kv_blocks,
        flags=flags,
        notes=tuple(notes),
        metrics={metric: statistics_of(metric, pairs) for metric in METRICS},
        unqueued_recorded=any(pair.request.scheduled_s is not None for pair in pairs),
        unqueued=unqueued_of(pairs),
        unqueued_with_warm_up=unqueued_of(pairs, warm_up_s=0.0),
        preemptions=sum(row["preemptions"] for row in rows.values()),
        steps=replay.steps,
        extrapolated=outside_shares(step_time),
        unmeasured=unmeasured_shares(step_time),
        schedule_digest=replay.schedule_digest,
        virtual_s=replay.virtual_s,
        wall_s=replay.wall_s,
        upstream_s=replay.upstream_s,
    )


def _notes_on(run: MeasuredRun, profile: Profile) -> list[str]:
    notes = list(run.notes)
    version = version_of(run)
    if version != PINNED:
        took = (
            f"vLLM {run.meta.get('vllm_version')}" if version else "a version of vLLM that it does not name"
        )
        notes.append(f"measured on {took}; the replay schedules as vLLM {PINNED[0]}.{PINNED[1]}.0 does")
    if not run.prompts_known:
        notes.append("prompts without token ids share no prefix in the replay")
    if run.skipped:
        total = run.skipped + len(run.requests)
        notes.append(
            f"{run.skipped} of {total} requests without recorded times are left out on both sides; if the "
            "engine served them, the replay carries less load"
        )
    if not profile.measured:
        notes.append(f"{profile.name} was not measured: its step times come from a data sheet")
    if profile.beyond:
        notes.append(f"step times reach beyond what was measured: {'; '.join(profile.beyond)}")
    return notes


def _ended(progress: Callable[[int, int], None] | None, total: int) -> Callable[[float, int], None] | None:
    if progress is None:
        return None
    progress(0, total)
    return lambda _, ended: progress(ended, total)


def as_workload(run: MeasuredRun) -> Workload:
    """The run as something the engine can replay: one tenant, one phase, true prompts and outputs."""
    requests = tuple(
        PlannedRequest(
            index=index,
            request_id=r.request_id,
            tenant="measured",
            phase=1,
            intended_ns=round(r.arrival_s * _NS),
            prompt=r.prompt,
            output=r.output,
            segments=(),
        )
        for index, r in enumerate(run.requests)
    )
    return Workload(
        name="measured",
        seed=0,
        tenants=(Tenant("measured", "gold", "chat", 1, 0, 1e9, False),),
        phases=(Phase(1, "measured", 0, requests[-1].intended_ns + 1, True),),
        requests=requests,
        sha256="",
        corpus_sha256="",
    )


class _Steps:
    """When the replay's steps were scheduled, began and ended, ns."""

    def __init__(self, table: Any) -> None:
        self.scheduled: list[int] = table.column("t_ns").to_pylist()
        self.starts: list[int] = table.column("start_ns").to_pylist()
        self.ends: list[int] = table.column("end_ns").to_pylist()

    def taken_in(self, arrived_ns: int) -> int:
        """The engine takes its input between steps: when it next schedules, it has seen the request."""
        return self.scheduled[bisect_left(self.scheduled, arrived_ns)]

    def length_s(self, ended_ns: int) -> float:
        """Duration of the step that ended then."""
        step = min(bisect_left(self.ends, ended_ns), len(self.ends) - 1)
        return (self.ends[step] - self.starts[step]) / _NS


def _pair(run: MeasuredRun, request: MeasuredRequest, row: Mapping[str, Any], steps: _Steps) -> Pair:
    if row["status"] != "ok":
        raise RunFailed(
            f"request {request.request_id!r} ended as {row['status']} ({row['reason']}) in the replay"
        )
    arrived_ns, first_ns, last_ns = row["intended_ns"], row["first_token_ns"], row["last_token_ns"]
    start_ns = arrived_ns if run.from_arrival else steps.taken_in(arrived_ns)
    tokens = request.output_tokens
    return Pair(
        request=request,
        measured=Latency.of(request.queued_s, request.first_token_s, request.last_token_s, tokens),
        replayed=Latency.of(start_ns / _NS, first_ns / _NS, last_ns / _NS, tokens),
        step_s=steps.length_s(first_ns),
    )
