"""All metrics by name, and which of them are compared in which scopes."""

from __future__ import annotations

from harness.metrics import cache, cost, engine, fairness, latency, order, slo, tokens
from harness.metrics.base import Metric
from harness.metrics.scope import Scope

_THEMES = (latency, slo, tokens, order, cache, fairness, engine, cost)


def _by_name() -> dict[str, Metric]:
    out: dict[str, Metric] = {}
    for theme in _THEMES:
        for metric in theme.METRICS:
            if metric.name in out:
                raise ValueError(f"metric {metric.name} is declared twice")
            out[metric.name] = metric
    return out


METRICS: dict[str, Metric] = _by_name()

# Every comparison widens every interval of a report (Holm), so these lists are short on purpose.
_SERVER = (
    "ttft_ms_p50",
    "ttft_ms_p99",
    "tpot_ms_p50",
    "tpot_ms_p99",
    "itl_ms_p99",
    "e2e_ms_p99",
    "short_ttft_ms_p50",
    "short_ttft_ms_p99",
    "short_tpot_jitter_ms",
    "short_queue_wait_ms_p99",
    "queue_wait_ms_p99",
    "slo_attainment",
    "goodput_rps",
    "output_tok_per_s",
    "prefix_hit_rate",
    "preemptions",
    "recomputed_tokens",
    "preempt_recovery_ms_p99",
    "jain_index",
    "rejected",
    "kv_usage_p99",
    "step_ms_p50",
    "gpu_s_per_1k_tokens",
    "joules_per_output_token",
)
_GROUP = ("ttft_ms_p50", "ttft_ms_p90", "ttft_ms_p99", "tpot_ms_p99", "slo_attainment", "output_tok_per_s")
_GROUP_IN_PHASE = ("ttft_ms_p90", "ttft_ms_p99", "slo_attainment")


def compared(scope: Scope) -> tuple[str, ...]:
    """The metrics that are compared between arms in a scope."""
    if scope.everybody:
        return _SERVER
    if scope.phases is None or len(scope.phases) > 1:
        return _GROUP
    return _GROUP_IN_PHASE
