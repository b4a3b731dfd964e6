"""What a replay of a measured run is judged by: errors of TTFT, TPOT and E2E, and of requests that did not queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.engines.flags import EngineFlags
from harness.measured_run import MeasuredRequest

METRICS = ("ttft", "tpot", "e2e")
PERCENTS = (50, 90, 99)
# A request whose first tokens were scheduled this soon after it was queued did not wait for others.
UNQUEUED_S = 0.001
# An engine's first steps pay for compilation and allocation once, and delay what arrives meanwhile.
WARM_UP_S = 1.0
CLOSE_PCT, CLOSE_STEPS = 10.0, 1.0


@dataclass(frozen=True, slots=True)
class Latency:
    """One request's latencies, s; TPOT is None with one output token."""

    ttft: float
    tpot: float | None
    e2e: float

    @staticmethod
    def of(start_s: float, first_s: float, last_s: float, tokens: int) -> Latency:
        """From when it counts, its first and its last token."""
        tpot = (last_s - first_s) / (tokens - 1) if tokens > 1 else None
        return Latency(first_s - start_s, tpot, last_s - start_s)


@dataclass(frozen=True, slots=True)
class Pair:
    """One request on both sides; `step_s` is the replayed step that gave it its first token."""

    request: MeasuredRequest
    measured: Latency
    replayed: Latency
    step_s: float

    @property
    def error_steps(self) -> float:
        """Error of its TTFT, in steps."""
        return (self.replayed.ttft - self.measured.ttft) / self.step_s

    @property
    def close(self) -> bool:
        """Whether its TTFT is within a tenth or one step."""
        error_pct = 100.0 * abs(self.replayed.ttft - self.measured.ttft) / max(self.measured.ttft, 1e-9)
        return error_pct <= CLOSE_PCT or abs(self.error_steps) <= CLOSE_STEPS

    def to_json(self) -> dict[str, Any]:
        """As `--json` writes it, ms."""
        sides = {"measured": self.measured, "replayed": self.replayed}
        return {"request_id": self.request.request_id, "first_token_step_ms": 1e3 * self.step_s} | {
            f"{metric}_{side}_ms": None if (value := getattr(latency, metric)) is None else 1e3 * value
            for side, latency in sides.items()
            for metric in METRICS
        }


@dataclass(frozen=True, slots=True)
class Statistic:
    """One statistic of one metric on both sides, s."""

    measured: float
    replayed: float

    @property
    def error_pct(self) -> float:
        """Relative error of the replay, per cent."""
        return 100.0 * (self.replayed / self.measured - 1.0) if self.measured else 0.0


@dataclass(frozen=True, slots=True)
class Unqueued:
    """TTFT of requests that did not queue in the measured run.

    Attributes:
        requests: how many.
        mean, p50: of their TTFT.
        step_s: mean duration of the replayed steps that gave them their first token.
        close: requests whose own TTFT is within a tenth or one step.
        worst: the one that is furthest off, in steps.
    """

    requests: int
    mean: Statistic
    p50: Statistic
    step_s: float
    close: int
    worst: Pair

    @property
    def error_steps(self) -> float:
        """Error of the mean, in steps."""
        return (self.mean.replayed - self.mean.measured) / self.step_s

    def to_json(self) -> dict[str, Any]:
        """As `--json` writes it."""
        return {
            "requests": self.requests,
            "mean_measured_ms": 1e3 * self.mean.measured,
            "mean_replayed_ms": 1e3 * self.mean.replayed,
            "mean_err_pct": self.mean.error_pct,
            "p50_measured_ms": 1e3 * self.p50.measured,
            "p50_replayed_ms": 1e3 * self.p50.replayed,
            "p50_err_pct": self.p50.error_pct,
            "step_ms": 1e3 * self.step_s,
            "err_steps": self.error_steps,
            "within_tenth_or_step": self.close,
            "worst_err_steps": self.worst.error_steps,
            "worst_request_id": self.worst.request.request_id,
        }


@dataclass(frozen=True, slots=True)
class Validation:
    """What a replay showed."""

    profile: str
    pairs: tuple[Pair, ...]
    skipped: int
    blocks: int
    flags: EngineFlags
    notes: tuple[str, ...]
    metrics: Mapping[str, Mapping[str, Statistic]]
    unqueued_recorded: bool
    unqueued: Unqueued | None
    unqueued_with_warm_up: Unqueued | None
    preemptions: int
    steps: int
    extrapolated: Mapping[str, float]
    unmeasured: Mapping[str, float]
    schedule_digest: str
    virtual_s: float
    wall_s: float
    upstream_s: float

    @property
    def requests(self) -> int:
        """Requests that are compared."""
        return len(self.pairs)

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
            "engine_flags": self.flags.model_dump(),
            "preemptions": self.preemptions,
            "steps": self.steps,
            "extrapolated": dict(self.extrapolated),
            "unmeasured": dict(self.unmeasured),
            "schedule_digest": self.schedule_digest,
            "virtual_s": self.virtual_s,
            "wall_s": self.wall_s,
            "upstream_s": self.upstream_s,
            "notes": list(self.notes),
            "per_request": [pair.to_json() for pair in self.pairs],
        }


def percentile(values: Sequence[float], percent: int) -> float:
    """Nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[max(-(-percent * len(ordered) // 100), 1) - 1]


def statistics_of(metric: str, pairs: Sequence[Pair]) -> dict[str, Statistic]:
    """Mean and percentiles of one metric; empty when no request has it."""
    measured = [v for pair in pairs if (v := getattr(pair.measured, metric)) is not None]
    replayed = [v for pair in pairs if (v := getattr(pair.replayed, metric)) is not None]
    if not measured:
        return {}
    found = {"mean": Statistic(sum(measured) / len(measured), sum(replayed) / len(replayed))}
    for percent in PERCENTS:
        found[f"p{percent}"] = Statistic(percentile(measured, percent), percentile(replayed, percent))
    return found


def unqueued_of(pairs: Sequence[Pair], warm_up_s: float = WARM_UP_S) -> Unqueued | None:
    """The requests that did not queue, without those of the run's first `warm_up_s`; None without any."""
    warm_s = min(pair.request.queued_s for pair in pairs) + warm_up_s
    chosen = [
        pair
        for pair in pairs
        if pair.request.scheduled_s is not None
        and pair.request.scheduled_s - pair.request.queued_s < UNQUEUED_S
        and pair.request.queued_s >= warm_s
    ]
    if not chosen:
        return None
    ttft = statistics_of("ttft", chosen)
    return Unqueued(
        requests=len(chosen),
        mean=ttft["mean"],
        p50=ttft["p50"],
        step_s=sum(pair.step_s for pair in chosen) / len(chosen),
        close=sum(pair.close for pair in chosen),
        worst=max(chosen, key=lambda pair: abs(pair.error_steps)),
    )
