"""`bench validate`: replay a measured run through the virtual engine and say how far off it is.

Nothing is fitted here: the profile's tables are frozen, and the engine's limits are those that the run
recorded. Both sides count latency from the moment the engine took a request from its input queue, because
that is what vLLM records as `queued_ts`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import RunFailed
from harness.measured_config import (
    blocks_of,
    captured_sizes,
    check_fits,
    flags_of,
    profile_for,
    refuse_unmodelled,
)
from harness.measured_run import MeasuredRequest, MeasuredRun, read_measured_run
from harness.profiles import StepTimeModel, load_profile
from harness.profiles.model import outside_shares
from workloads.request import Phase, PlannedRequest, Tenant, Workload

_NS = 1_000_000_000
METRICS = ("ttft", "tpot", "e2e")
# A request whose first tokens were scheduled this soon after it was queued did not wait for others.
UNQUEUED_S = 0.001
# An engine's first steps pay for compilation and allocation once, and delay what arrives meanwhile.
WARM_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class Latency:
    """One request's latencies, s; TPOT is None with one output token."""

    ttft: float
    tpot: float | None
    e2e: float


@dataclass(frozen=True, slots=True)
class Statistic:
    """One statistic of one metric on both sides, s."""

    measured: float
    replayed: float

    @property
    def error_pct(self) -> float:
        """Relative error of the replay, per cent."""
        return 100.0 * (self.replayed / self.measured - 1.0)


@dataclass(frozen=True, slots=True)
class Unqueued:
    """TTFT of requests that did not queue in the measured run.

    `step_s` is the mean duration of the replayed steps that gave these requests their first token.
    """

    requests: int
    mean: Statistic
    step_s: float

    @property
    def error_steps(self) -> float:
        """Error of the mean, in steps."""
        return (self.mean.replayed - self.mean.measured) / self.step_s

    def to_json(self) -> dict[str, float]:
        """As `--json` writes it."""
        return {
            "requests": self.requests,
            "mean_measured_ms": 1e3 * self.mean.measured,
            "mean_replayed_ms": 1e3 * self.mean.replayed,
            "mean_err_pct": self.mean.error_pct,
            "step_ms": 1e3 * self.step_s,
            "err_steps": self.error_steps,
        }


@dataclass(frozen=True, slots=True)
class Validation:
    """What a replay showed."""

    profile: str
    requests: int
    skipped: int
    blocks: int
    notes: tuple[str, ...]
    metrics: Mapping[str, Mapping[str, Statistic]]
    unqueued: Unqueued | None
    unqueued_with_warm_up: Unqueued | None
    preemptions: int
    steps: int
    extrapolated: Mapping[str, float]
    schedule_digest: str
    virtual_s: float
    wall_s: float
    upstream_s: float

    @property
    def speedup(self) -> float:
        """Virtual seconds per second of wall time."""
        return self.virtual_s / self.wall_s

    def to_json(self) -> dict[str, Any]:
        """As `--json` writes it."""
        return {
            "speedup": self.speedup,
            "metrics": {
                metric: {f"{name}_err_pct": value.error_pct for name, value in statistics.items()}
                for metric, statistics in self.metrics.items()
            },
            "unqueued_ttft": self.unqueued and self.unqueued.to_json(),
            "unqueued_ttft_with_warm_up": self.unqueued_with_warm_up and self.unqueued_with_warm_up.to_json(),
            "seconds": {
                metric: {n: {"measured": v.measured, "replayed": v.replayed} for n, v in statistics.items()}
                for metric, statistics in self.metrics.items()
            },
            "profile": self.profile,
            "requests": self.requests,
            "skipped": self.skipped,
            "kv_blocks": self.blocks,
            "preemptions": self.preemptions,
            "steps": self.steps,
            "extrapolated": dict(self.extrapolated),
            "schedule_digest": self.schedule_digest,
            "virtual_s": self.virtual_s,
            "wall_s": self.wall_s,
            "upstream_s": self.upstream_s,
            "notes": list(self.notes),
        }


def validate(folder: Path, profile: str | None = None, blocks: int | None = None) -> Validation:
    """Replay the measured run in `folder`.

    Args:
        folder: requests.jsonl, workload.jsonl and run_meta.json.
        profile: name or path of a profile; by default the one for the recorded GPU and model.
        blocks: KV blocks; by default those recorded, else derived from the GPU's memory.

    Raises UserError for bad input and for what is not modelled, RunFailed when a request never ends.
    """
    run = read_measured_run(folder)
    refuse_unmodelled(run)
    chosen = load_profile(profile) if profile is not None else profile_for(run)
    notes: list[str] = []
    flags = flags_of(run, chosen)
    kv_blocks = blocks if blocks is not None else blocks_of(run, chosen, flags, notes)
    check_fits(run, flags, kv_blocks)
    if not run.prompts_known:
        notes.append("prompts without token ids share no prefix in the replay")
    if run.skipped:
        notes.append(f"{run.skipped} requests without a first token are left out on both sides")

    from harness.engines.virtual.engine import VirtualEngine

    step_time = StepTimeModel(chosen, flags.max_num_seqs, flags.max_num_batched_tokens, captured_sizes(run))
    engine = VirtualEngine(chosen.model_dir, flags, step_time, kv_blocks, cpu_step_us=chosen.cpu_step_us)
    try:
        replay = engine.run(as_workload(run))
    finally:
        engine.shutdown()
    rows = {row["request_id"]: row for row in replay.tables["requests"].to_pylist()}
    steps = replay.tables["steps"]
    pickups: list[int] = steps.column("t_ns").to_pylist()
    replayed: list[Latency] = []
    for request in run.requests:
        row = rows[request.request_id]
        if row["status"] != "ok":
            raise RunFailed(
                f"request {request.request_id!r} ended as {row['status']} ({row['reason']}) in the replay"
            )
        # The engine takes its input between steps: when it next schedules, it has seen the request.
        queued_ns = pickups[bisect_left(pickups, row["intended_ns"])]
        replayed.append(
            _latency(queued_ns / _NS, row["first_token_ns"] / _NS, row["last_token_ns"] / _NS, request)
        )
    measured = [_latency(r.queued_s, r.first_token_s, r.last_token_s, r) for r in run.requests]
    return Validation(
        profile=chosen.name,
        requests=len(run.requests),
        skipped=run.skipped,
        blocks=kv_blocks,
        notes=tuple(notes),
        metrics={metric: _statistics(metric, measured, replayed) for metric in METRICS},
        unqueued=_unqueued(run.requests, measured, replayed, rows, steps, WARM_UP_S),
        unqueued_with_warm_up=_unqueued(run.requests, measured, replayed, rows, steps, 0.0),
        preemptions=sum(row["preemptions"] for row in rows.values()),
        steps=replay.steps,
        extrapolated=outside_shares(step_time),
        schedule_digest=replay.schedule_digest,
        virtual_s=replay.virtual_s,
        wall_s=replay.wall_s,
        upstream_s=replay.upstream_s,
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """Nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[max(-(-percent * len(ordered) // 100), 1) - 1]


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


def _latency(queued_s: float, first_s: float, last_s: float, request: MeasuredRequest) -> Latency:
    tokens = request.output_tokens
    tpot = (last_s - first_s) / (tokens - 1) if tokens > 1 else None
    return Latency(first_s - queued_s, tpot, last_s - queued_s)


def _statistics(
    metric: str, measured: Sequence[Latency], replayed: Sequence[Latency]
) -> dict[str, Statistic]:
    sides = [[v for one in side if (v := getattr(one, metric)) is not None] for side in (measured, replayed)]
    if not sides[0]:
        return {}
    statistics = {"mean": Statistic(*(sum(side) / len(side) for side in sides))}
    for percent in (50, 90, 99):
        statistics[f"p{percent}"] = Statistic(*(percentile(side, percent) for side in sides))
    return statistics


def _unqueued(
    requests: Sequence[MeasuredRequest],
    measured: Sequence[Latency],
    replayed: Sequence[Latency],
    rows: Mapping[str, Mapping[str, Any]],
    steps: Any,
    warm_up_s: float,
) -> Unqueued | None:
    warm_s = min(r.queued_s for r in requests) + warm_up_s
    chosen = [
        i for i, r in enumerate(requests) if r.scheduled_s - r.queued_s < UNQUEUED_S and r.queued_s >= warm_s
    ]
    if not chosen:
        return None
    ends: list[int] = steps.column("end_ns").to_pylist()
    starts: list[int] = steps.column("start_ns").to_pylist()
    lengths = []
    for i in chosen:
        step = min(bisect_left(ends, rows[requests[i].request_id]["first_token_ns"]), len(ends) - 1)
        lengths.append((ends[step] - starts[step]) / _NS)
    mean = Statistic(*(sum(side[i].ttft for i in chosen) / len(chosen) for side in (measured, replayed)))
    return Unqueued(len(chosen), mean, sum(lengths) / len(lengths))
