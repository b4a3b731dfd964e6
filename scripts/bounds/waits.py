"""The least tail of a wait for the work that an arm did, in any order; alone, and with the promises that it kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from scripts.bounds.line import Bools, beyond, fewest_late, least_limit, percentile
from scripts.bounds.records import Floats, Seed


@dataclass(frozen=True)
class Wait:
    """p99 as found, the least that keeps the same promises, and the least if none had to be kept; ms."""

    found: float
    promised: float
    any_order: float
    kept_share: float


@dataclass(frozen=True)
class _Jobs:
    """One seed's requests that were served; seconds, and uncached prompt tokens."""

    arrival_s: Floats
    first_s: Floats
    after_s: Floats
    promise_s: Floats
    work: Floats
    judged: Bools
    kept: Bools
    done: tuple[Floats, Floats]


def wait_ms(seeds: Sequence[Seed], phase: int, metric: str, tier: str = "") -> Wait | None:
    """p99 of `ttft_ms` or `e2e_ms`, of one tier or all, and its bounds; None where there are none."""
    jobs = [_jobs(seed, phase, metric, tier) for seed in seeds]
    count = sum(int(job.judged.sum()) for job in jobs)
    if not count:
        return None
    values = np.concatenate(
        [(job.first_s + job.after_s - job.arrival_s)[job.judged] for job in jobs if job.judged.any()]
    )
    found, allowed = percentile(values, 99), beyond(count)

    def least(keep: bool) -> float:
        return least_limit(lambda limit_s: sum(_late(job, limit_s, keep) for job in jobs), allowed, found)

    kept = sum(int(job.kept.sum()) for job in jobs) / count
    any_order = least(False)
    return Wait(1e3 * found, 1e3 * max(least(True), any_order), 1e3 * any_order, kept)


def _late(job: _Jobs, limit_s: float, keep: bool) -> int:
    """How many of those judged must be beyond the limit; all others get their first token as they did."""
    due = np.where(job.judged, job.arrival_s + limit_s - job.after_s, job.first_s)
    free = job.judged
    if keep:
        due = np.where(job.kept, job.promise_s, due)
        free = job.judged & ~job.kept
    return fewest_late(due, job.work, np.interp(due, *job.done), free)


def _jobs(seed: Seed, phase: int, metric: str, tier: str) -> _Jobs:
    served: pd.DataFrame = seed.requests.dropna(subset=["first_token_ns", "cached_tokens", "ttft_ms"])
    arrival, first = (served[f"{at}_ns"].to_numpy(np.float64) / 1e9 for at in ("intended", "first_token"))
    judged = ((served["phase"] == phase) & served[metric].notna()).to_numpy(bool)
    if tier:
        judged = judged & (served["tier"] == tier).to_numpy(bool)
    after = (served[metric] - served["ttft_ms"]).fillna(0.0).to_numpy(np.float64) / 1e3
    begun = served["scheduled_ns"].to_numpy(np.float64) / 1e9
    work = (served["prompt_tokens"] - served["cached_tokens"]).to_numpy(np.float64)
    return _Jobs(
        arrival,
        first,
        after,
        arrival + served["slo_ttft_ms"].to_numpy(np.float64) / 1e3,
        work,
        judged,
        judged & (served["met"] > 0).to_numpy(bool),
        done_over_time(begun, first, work),
    )


def done_over_time(begun_s: Floats, ended_s: Floats, work: Floats) -> tuple[Floats, Floats]:
    """Times, and all the work that was done by then: that of each evenly from its begin to its end."""
    rate = work / np.maximum(ended_s - begun_s, 1e-9)
    at, change = np.concatenate([begun_s, ended_s]), np.concatenate([rate, -rate])
    order = np.argsort(at, kind="stable")
    at, rates = at[order], change[order].cumsum()
    return at, np.concatenate([[0.0], (rates[:-1] * np.diff(at)).cumsum()])
