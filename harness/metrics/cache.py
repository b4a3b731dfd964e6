"""Prefix cache, preemption and KV memory."""

from __future__ import annotations

import numpy as np

from harness.metrics.base import Metric, per_seed
from harness.metrics.pool import View
from harness.stats.measures import Measure, Nothing, Percentile, Ratio


def _hit_rate(view: View) -> Measure:
    admitted = view.column("admitted_tokens")
    count = int((admitted > 0).sum())
    if count == 0:
        return Nothing("no request of this scope was admitted")
    return view.ratio(view.column("cached_tokens"), view.blocks, admitted, count)


def _recovery(view: View) -> Measure:
    sample = view.points("recoveries")
    if len(sample.values) == 0:
        return Nothing("no preempted request came back in this scope")
    return Percentile(sample, 99)


def _restore(view: View) -> Measure:
    sample = view.points("restores")
    if len(sample.values) == 0:
        return Nothing("no preempted request came back in this scope")
    return Percentile(sample, 99)


def _moved(view: View) -> Measure:
    moved = view.pool.moved_bytes
    if moved is None:
        return Nothing("nothing moved below the device's memory")
    if view.size == 0:
        return Nothing("no measured phase in this scope")
    # As `View.per_seed`: every replicate draws as many blocks as there are.
    seeds = np.full(view.size, float(view.pool.grid.seeds))
    return Ratio(moved[view.span] * view.size, seeds, view.size)


def _kv_usage(view: View) -> Measure:
    return Percentile(view.steps("kv_usage"), 99)


def _evicted(view: View) -> Measure:
    sample = view.steps("evicted")
    if view.size == 0:
        return Nothing("no measured phase in this scope")
    return Ratio(view.summed(sample.values, sample.blocks), view.seconds, len(sample.values))


METRICS: tuple[Metric, ...] = (
    Metric(
        "prefix_hit_rate",
        "ratio",
        "Prompt tokens found in the prefix cache at first admission, over prompt tokens of admitted requests.",
        "higher",
        _hit_rate,
    ),
    Metric(
        "preemptions",
        "count",
        "Times that a request was preempted, counted per seed and averaged over the seeds.",
        "lower",
        per_seed("preemptions"),
    ),
    Metric(
        "recomputed_tokens",
        "tokens",
        "Tokens computed again after preemptions, counted per seed and averaged over the seeds.",
        "lower",
        per_seed("recomputed_tokens"),
    ),
    Metric(
        "preempt_recovery_ms_p99",
        "ms",
        "p99 of the time from a preemption to the request's next token.",
        "lower",
        _recovery,
    ),
    Metric(
        "preempt_restore_ms_p99",
        "ms",
        "p99 of the time from a preempted request's resumption to its next token: its recovery without the queue.",
        "lower",
        _restore,
    ),
    Metric(
        "tier_bytes_moved",
        "bytes",
        "Bytes of KV blocks moved between the device's memory and the tiers below it, either way, averaged over the "
        "seeds.",
        "lower",
        _moved,
        time_only=True,
        known=lambda pool: pool.moved_bytes is not None,
    ),
    Metric(
        "kv_usage_p99",
        "ratio",
        "p99 over steps of the share of KV blocks that are referenced.",
        "neither",
        _kv_usage,
        time_only=True,
    ),
    Metric(
        "evicted_blocks_per_s",
        "blocks/s",
        "Cached blocks evicted per second of the measured phases.",
        "neither",
        _evicted,
        time_only=True,
    ),
)
