"""Intervals and verdicts: nothing is found where nothing is, a planted slowdown is, and no verdict
contradicts its interval. The noise here is made up; autocorrelated as queues are, but milder than overload."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.metrics.registry import METRICS
from harness.stats.blocks import BlockGrid, Window
from harness.stats.bootstrap import Estimate, Weights, candidate_ranks, estimate
from harness.stats.compare import ALPHA, MARGIN_PCT, Difference, difference, holm_levels, outcomes
from harness.stats.measures import Percentile, Ratio, Sample, nearest_rank
from tests.metrics.aa import comparisons
from tests.synthetic import Effect

GRID = BlockGrid((Window(1, 0, 60_000_000_000), Window(2, 60_000_000_000, 90_000_000_000)), 3)


def test_an_a_a_arm_is_neither_better_nor_worse() -> None:
    """Three repetitions of more than 400 comparisons each, none with a slip: at a family-wise error of 50% one in eight."""
    wrong = 0
    for repetition in range(3):
        rows = comparisons(Effect(), f"a/a {repetition}", seeds=2, n=400)
        assert len(rows) > 400
        wrong += any(row["verdict"] in ("better", "worse") for row in rows)
    assert wrong == 0


def test_an_identical_arm_is_the_same() -> None:
    one = Estimate(5.0, np.linspace(4, 6, 50), 100, False, 18)
    found = outcomes([difference(one, one, seeds=3, blocks_a_phase=6)], ["lower"])[0]
    assert (found.delta_pct, found.ci95, found.verdict) == (0.0, (0.0, 0.0), "same")


def test_a_slowdown_of_ten_percent_is_found() -> None:
    rows = comparisons(Effect(step=1.1), "slow", seeds=3, n=800)
    found = {(row["scope"], row["metric"]): row for row in rows}
    for metric in ("tpot_ms_p50", "itl_ms_p99"):
        row = found["all", metric]
        assert row["verdict"] == "worse", row
        assert row["ci95"][0] < 10 < row["ci95"][1] or abs(row["delta_pct"] - 10) < 2.5
    assert not [row for row in rows if row["verdict"] == "better"]


def test_a_verdict_never_contradicts_its_interval() -> None:
    rows = comparisons(Effect(step=0.9, short_queue=0.4, reject=0.2, preempt=0.0), "mixed", seeds=2, n=600)
    assert {row["verdict"] for row in rows} == {"better", "worse", "same", "undetermined"}
    for row in rows:
        if row["verdict"] == "same":
            assert -MARGIN_PCT < row["ci95"][0] <= row["ci95"][1] < MARGIN_PCT
        elif row["verdict"] == "undetermined":
            assert row["reason"]
        else:
            low, high = row["ci95"] or (math.copysign(1, row["delta"]),) * 2
            up = METRICS[row["metric"]].better == "higher"
            assert (low > 0) == (up == (row["verdict"] == "better"))
            assert low > 0 or high < 0


def test_no_latency_verdict_where_load_was_shed() -> None:
    rows = comparisons(Effect(short_queue=0.2, long_queue=0.2, reject=0.5), "shed", seeds=2, n=600)
    for row in rows:
        if (
            row["scope"] in ("all", "phase:5")
            and METRICS[row["metric"]].latency
            and row["delta_pct"] is not None
        ):
            assert row["verdict"] == "undetermined"


def test_intervals_are_wider_than_for_independent_requests() -> None:
    """Whole blocks share a level: resampling single requests would claim a far narrower interval."""
    rng = np.random.default_rng(1)
    blocks = np.repeat(np.arange(GRID.size), 100)
    values = rng.normal(100, 1, len(blocks)) + rng.normal(0, 5, GRID.size)[blocks]
    sums = np.bincount(blocks, values, minlength=GRID.size).astype(float)
    counts = np.bincount(blocks, minlength=GRID.size).astype(float)
    found = estimate(Ratio(sums, counts, len(values)), Weights.of(GRID).draws)
    assert found.ci95 is not None
    low, high = found.ci95
    naive = 2 * 1.96 * values.std() / math.sqrt(len(values))
    assert high - low > 3 * naive
    assert high - low > 2 * 1.96 * 5 / math.sqrt(GRID.size) * 0.8


def test_the_draws_depend_on_the_shape_of_the_run_alone() -> None:
    first, again = Weights.of(GRID, 20), Weights.of(GRID, 20)
    assert np.array_equal(first.draws, again.draws)
    # every replicate draws as many blocks of each phase as there are
    edges = GRID.offsets
    for start, end in itertools.pairwise(edges):
        assert set(first.draws[:, start:end].sum(axis=1)) == {float(end - start)}


def test_percentile_replicates_are_those_of_the_expanded_sample() -> None:
    """Against the slow way: repeat each block's values as often as it was drawn, and take the percentile."""
    rng = np.random.default_rng(3)
    values = np.sort(rng.integers(0, 40, 150).astype(float))
    blocks = rng.integers(0, GRID.size, 150)
    draws = Weights.of(GRID, 40).draws
    for percent in (50, 90, 99):
        found = estimate(Percentile(Sample(values, blocks), percent), draws)
        assert found.replicates is not None
        for weights, value in zip(draws, found.replicates, strict=True):
            expanded = np.repeat(values, weights[blocks].astype(int))
            assert value == nearest_rank(expanded, percent)


@pytest.mark.parametrize("percent", [50, 99])
def test_large_samples_take_another_road_to_the_same_place(percent: int) -> None:
    rng = np.random.default_rng(4)
    values = np.sort(rng.lognormal(3, 1, 30_000).round(1))
    blocks = rng.integers(0, GRID.size, len(values))
    draws = Weights.of(GRID, 30).draws
    found = estimate(Percentile(Sample(values, blocks), percent), draws)
    assert found.value == nearest_rank(values, percent)
    assert found.replicates is not None
    exact = [nearest_rank(np.repeat(values, w[blocks].astype(int)), percent) for w in draws]
    assert found.replicates == pytest.approx(exact, rel=0.02)


@given(st.integers(1, 5000), st.sampled_from([50, 90, 99]))
def test_candidate_ranks_hold_the_own_and_the_last_rank(n: int, percent: int) -> None:
    ranks = candidate_ranks(n, percent)
    assert ranks[-1] == n
    assert max(-(-percent * n // 100), 1) in ranks
    assert (np.diff(ranks) > 0).all()
    assert ranks[0] >= 1


@settings(deadline=None)
@given(st.lists(st.none() | st.floats(0, 1), max_size=30))
def test_holm_against_its_definition(p_values: list[float | None]) -> None:
    levels = holm_levels(p_values)
    known = sorted(p for p in p_values if p is not None)
    rejected = 0
    for rank, p in enumerate(known):
        if p >= ALPHA / (len(known) - rank):
            break
        rejected += 1
    assert sum(p is not None and p < level for p, level in zip(p_values, levels, strict=True)) == rejected
    assert all(ALPHA / max(len(known), 1) <= level <= ALPHA for level in levels)


def test_correction_widens_with_the_number_of_comparisons() -> None:
    one = Difference(0.1, 0.03, 17, True, 10.0)
    alone = outcomes([one], ["lower"])[0]
    among = outcomes([one, *(Difference(0.0, 0.1, 17, True, 10.0) for _ in range(99))], ["lower"] * 100)[0]
    assert (alone.verdict, among.verdict) == ("worse", "undetermined")
    assert alone.ci95 is not None
    assert among.ci95 is not None
    assert among.ci95[0] < 0 < alone.ci95[0]


def test_a_difference_that_is_sure_but_small_is_the_same() -> None:
    sure = Difference(0.01, 0.0005, 17, True, 10.0)
    assert outcomes([sure], ["lower"])[0].verdict == "same"


def test_a_baseline_of_zero_has_no_percentage_but_a_verdict() -> None:
    rng = np.random.default_rng(0)
    none, some = (
        Estimate(0.0, np.zeros(200), 9, False, 18),
        Estimate(50.0, rng.normal(50, 5, 200), 9, False, 18),
    )
    found = outcomes([difference(some, none, seeds=3, blocks_a_phase=6)], ["lower"])[0]
    assert (found.delta_pct, found.ci95, found.verdict) == (None, None, "worse")


def test_nothing_falls_by_more_than_all_of_it() -> None:
    """Counts that reach 0 are compared on the plain scale, whose interval may reach below -100%."""
    rng = np.random.default_rng(5)
    base = Estimate(10.0, rng.normal(10, 4, 300).clip(0), 90, False, 18)
    arm = Estimate(0.5, rng.normal(0.5, 1, 300).clip(0), 90, False, 18)
    compared = difference(arm, base, seeds=3, blocks_a_phase=6)
    assert not compared.log
    low, high = compared.at(ALPHA)
    assert low < -10 < high
    found = outcomes([compared], ["lower"])[0]
    assert found.ci95 == (-100.0, 100 * high / 10)
    assert found.verdict == "better"
    # what may be negative keeps its interval
    signed = Estimate(0.5, rng.normal(0.5, 1, 300), 90, False, 18)
    ci = outcomes([difference(signed, base, seeds=3, blocks_a_phase=6)], ["lower"])[0].ci95
    assert ci is not None
    assert ci[0] < -100


def test_few_samples_or_blocks_decide_nothing() -> None:
    sharp = np.full(50, 2.0)
    few = Estimate(2.0, sharp, 50, True, 18)
    short = Estimate(2.0, sharp, 50, False, 3)
    base = Estimate(1.0, np.full(50, 1.0), 500, False, 18)
    for estimate_ in (few, short, Estimate(None, reason="no samples")):
        found = outcomes([difference(estimate_, base, seeds=3, blocks_a_phase=6)], ["lower"])[0]
        assert found.verdict == "undetermined"
        assert found.reason
