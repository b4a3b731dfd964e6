"""Is the traffic what the table says: rates, lengths, order, tenants. Bounds are four standard errors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from workloads.five_phase import PHASES, TENANTS, build
from workloads.five_phase.phases import NS_PER_S
from workloads.request import PlannedRequest, Workload


def sent_by(workload: Workload, tenant: str, phase: int | None = None) -> list[PlannedRequest]:
    """A tenant's requests, in one phase or in all."""
    return [r for r in workload.requests if r.tenant == tenant and phase in (None, r.phase)]


def test_requests_are_in_order_and_within_their_phase(thin: Workload) -> None:
    assert [request.index for request in thin.requests] == list(range(len(thin.requests)))
    keys = [(request.intended_ns, request.tenant) for request in thin.requests]
    assert keys == sorted(keys)
    assert len({request.request_id for request in thin.requests}) == len(thin.requests)
    phases = {phase.number: phase for phase in thin.phases}
    for request in thin.requests:
        phase = phases[request.phase]
        assert phase.start_ns <= request.intended_ns < phase.end_ns
    assert thin.phases[-1].end_ns == 300 * NS_PER_S


@pytest.mark.parametrize("tenant", [t.name for t in TENANTS if t.kind != "completion"])
def test_arrivals_are_poisson_at_the_tables_rate(dense: Workload, tenant: str) -> None:
    times = np.array([request.intended_ns for request in sent_by(dense, tenant)]) / NS_PER_S
    expected = 120 * PHASES[0].rates_rps[tenant]
    assert abs(len(times) - expected) < 4 * math.sqrt(expected)
    gaps = np.diff(times)
    # Exponential gaps: as much spread as mean, and a share of 1/e longer than the mean.
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1, abs=4 / math.sqrt(len(gaps)))
    assert np.mean(gaps > np.mean(gaps)) == pytest.approx(1 / math.e, abs=2 / math.sqrt(len(gaps)))


def test_bursts_are_where_the_table_has_them(thin: Workload) -> None:
    for spec in PHASES:
        for tenant in TENANTS:
            expected = 60 * 0.1 * spec.rates_rps[tenant.name]
            # Completions come in sessions, so their number varies about twice as much.
            spread = 2 if tenant.kind == "completion" else 1
            count = len(sent_by(thin, tenant.name, spec.number))
            assert abs(count - expected) < 4 * spread * math.sqrt(expected), (tenant.name, spec.number)


@pytest.mark.parametrize("spec", TENANTS, ids=lambda spec: spec.name)
def test_outputs_vary_around_the_tables_mean(dense: Workload, spec: object) -> None:
    tenant = next(t for t in TENANTS if t is spec)
    by_session: dict[str, int] = {}
    for request in sent_by(dense, tenant.name):
        # The keystrokes of one session ask for the same completion: they count once.
        key = request.session if tenant.kind == "completion" else request.request_id
        by_session[key] = len(request.output)
    lengths = np.array(list(by_session.values()))
    # The standard deviation of a log-normal with sigma 0.5 is 0.53 of its mean.
    assert np.mean(lengths) == pytest.approx(
        tenant.output_tokens, rel=4 * 0.53 / math.sqrt(len(lengths)) + 0.01
    )
    assert np.std(lengths) > 0.35 * tenant.output_tokens
    assert 1 <= lengths.min() <= lengths.max() <= 4 * tenant.output_tokens


def test_tiers_weights_and_slos(thin: Workload) -> None:
    rows = {t.name: (t.tier, t.weight, t.priority, t.slo_ttft_ms, t.short) for t in thin.tenants}
    assert rows == {
        "gold-a": ("gold", 4, 0, 200, True),
        "gold-b": ("gold", 4, 0, 200, True),
        "silver-0": ("silver", 2, 1, 500, True),
        "silver-1": ("silver", 2, 1, 500, True),
        "silver-2": ("silver", 2, 1, 500, True),
        "bronze-0": ("bronze", 1, 2, 3000, False),
        "bronze-1": ("bronze", 1, 2, 3000, False),
    }
    relaxed = build(0, phases="1", rate_scale=0.02, slo_factor=2.5)
    assert [t.slo_ttft_ms for t in relaxed.tenants] == [2.5 * t.slo_ttft_ms for t in thin.tenants]


def test_scales(thin: Workload) -> None:
    short = build(0, rate_scale=0.1, length_scale=0.25)
    for tenant in thin.tenants:
        for part in ("prompt", "output"):
            before = np.mean([len(getattr(r, part)) for r in sent_by(thin, tenant.name)])
            after = np.mean([len(getattr(r, part)) for r in sent_by(short, tenant.name)])
            assert after / before == pytest.approx(0.25, rel=0.2), (tenant.name, part)
    assert len(build(0, phases="1", rate_scale=0.2).requests) == pytest.approx(
        2 * len([r for r in thin.requests if r.phase == 1]), rel=0.2
    )


def test_small_vocabularies_and_lengths_still_give_a_workload() -> None:
    tiny = build(0, phases="1", rate_scale=0.05, length_scale=0.02, vocab_size=4_000)
    assert len(tiny.requests) > 50
    for request in tiny.requests:
        assert request.prompt.size and request.output.size
        assert max(request.prompt.max(), request.output.max()) < 4_000
