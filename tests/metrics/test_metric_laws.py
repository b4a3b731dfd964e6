"""Laws that hold whatever the numbers are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.metrics.fairness_windows import jain_index
from harness.metrics.registry import METRICS, compared
from harness.metrics.scope import Scope
from harness.records import ArmRecord
from harness.stats.measures import nearest_rank
from tests.hand_records import figures, papers, request, tables_of

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(1, 100))
def test_nearest_rank_is_the_smallest_value_that_enough_do_not_exceed(
    values: list[float], percent: int
) -> None:
    ordered = np.sort(np.array(values))
    found = nearest_rank(ordered, percent)
    assert found in ordered
    assert 100 * (ordered <= found).sum() >= percent * len(ordered)
    below = ordered[ordered < found]
    assert 100 * len(below) < percent * len(ordered)


def test_nearest_rank_at_round_numbers() -> None:
    hundred = np.arange(1, 101).astype(np.float64)
    assert [nearest_rank(hundred, p) for p in (1, 50, 90, 99, 100)] == [1, 50, 90, 99, 100]
    assert nearest_rank(np.arange(1, 1001).astype(np.float64), 99) == 990


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.floats(0.1, 10))
def test_jain_lies_between_one_nth_and_one(shares: list[float], factor: float) -> None:
    values = np.array(shares)
    index = jain_index(values)
    assert 1 / len(shares) - 1e-9 <= index <= 1 + 1e-9
    assert jain_index(values * factor) == pytest.approx(index, rel=1e-6)


def _memory(rows: list[dict[str, Any]]) -> ArmRecord:
    manifest, receipt = papers()
    return ArmRecord(Path(), "stock", 0, manifest=manifest, receipt=receipt, **tables_of(rows))


OUTCOME = st.tuples(
    st.floats(0, 59_000),
    st.floats(1, 5_000),
    st.sampled_from(["ok", "rejected", "expired", "failed", "cancelled", "early"]),
)


def _row(intended: float, delay: float, status: str) -> dict[str, Any]:
    if status in ("ok", "cancelled", "failed"):
        return request(intended, status=status, chunks=[(intended + delay, 1), (intended + delay + 10, 1)])
    return request(intended, status="cancelled" if status == "early" else status, end_ms=intended + delay)


@QUICK
@given(st.lists(OUTCOME, min_size=1, max_size=25))
def test_shares_stay_shares_and_counts_add_up(outcomes: list[tuple[float, float, str]]) -> None:
    found = figures(_memory([_row(*one) for one in outcomes]))

    def of(name: str) -> float:
        value = found[name].value
        assert value is not None
        return value

    for name in ("slo_attainment", "rejection_rate", "error_rate", "served_share"):
        assert 0 <= of(name) <= 1
    assert of("offered") == len(outcomes)
    assert of("goodput_rps") * 60 <= of("slo_attainment") * of("offered") + 1e-6
    errors = of("rejected") + of("expired") + of("failed")
    assert of("error_rate") * of("offered") == pytest.approx(errors)
    assert of("cancelled_unserved") <= of("cancelled") <= of("offered") - errors


@QUICK
@given(st.lists(OUTCOME, min_size=1, max_size=25), st.data())
def test_rejecting_a_request_raises_neither_attainment_nor_goodput(
    outcomes: list[tuple[float, float, str]], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(outcomes) - 1))
    shed = list(outcomes)
    shed[place] = (outcomes[place][0], outcomes[place][1], "rejected")
    before, after = (figures(_memory([_row(*one) for one in rows])) for rows in (outcomes, shed))
    for name in ("slo_attainment", "goodput_rps"):
        old, new = before[name].value, after[name].value
        assert old is not None
        assert new is not None
        assert new <= old + 1e-12


def test_every_metric_of_the_schema_is_declared() -> None:
    wanted = [
        "ttft_ms_p50",
        "ttft_ms_p90",
        "ttft_ms_p99",
        "tpot_ms_p50",
        "tpot_ms_p99",
        "itl_ms_p50",
        "itl_ms_p99",
        "e2e_ms_p50",
        "e2e_ms_p99",
        "short_ttft_ms_p99",
        "short_tpot_jitter_ms",
        "queue_wait_ms_p99",
        "slo_attainment",
        "goodput_rps",
        "output_tok_per_s",
        "prefix_hit_rate",
        "preemptions",
        "recomputed_tokens",
        "preempt_recovery_ms_p99",
        "jain_index",
        "offered",
        "rejected",
        "cancelled",
        "kv_usage_p99",
        "step_ms_p50",
        "gpu_busy_share",
        "gpu_s_per_1k_tokens",
        "short_queue_wait_ms_p99",
    ]
    assert set(wanted) <= set(METRICS)
    for scope in (Scope(), Scope((3,)), Scope((3,), tier="gold"), Scope(tenant="gold-a")):
        for name in compared(scope):
            assert scope.everybody or not METRICS[name].time_only


def test_definitions_are_sentences_of_their_own() -> None:
    texts = [metric.definition for metric in METRICS.values()]
    assert len(set(texts)) == len(texts)
    assert all(len(text) > 20 for text in texts)
