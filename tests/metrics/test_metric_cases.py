"""Cases that tools of this kind got wrong, with the right numbers.

They guard the definitions on hand-made records; they say nothing about how an engine fills records.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.metrics.derive import chunks_of
from harness.metrics.pool import View, pool_of
from harness.metrics.scope import Scope, parse_scope
from reports.summary import build_summary
from tests.hand_records import S, figures, plan, record, request, value


def test_several_tokens_in_one_chunk(tmp_path: Path) -> None:
    """Cumulative tokens 1, 4, 7 at 100, 130, 160 ms: TTFT 100, TPOT 10, gaps [30, 30], peak not below the mean."""
    one = record(tmp_path, [request(chunks=[(100, 1), (130, 3), (160, 3)])], window_s=0.2)
    found = figures(one)
    assert found["ttft_ms_p50"].value == 100.0
    assert found["tpot_ms_p50"].value == 10.0
    owner, gaps, tokens = chunks_of(one.tokens).gaps()
    assert (owner.tolist(), gaps.tolist(), tokens.tolist()) == ([0, 0], [30.0, 30.0], [3, 3])
    assert found["itl_ms_p50"].value == found["itl_ms_p99"].value == 30.0
    peak, mean = found["output_tok_per_s_peak"].value, found["output_tok_per_s"].value
    assert mean == pytest.approx(7 / 0.2)
    assert peak is not None
    assert mean is not None
    assert peak >= mean


def test_first_chunk_with_many_tokens(tmp_path: Path) -> None:
    """First chunk 5 of 105 tokens, the rest ends 1,000 ms later: 10.0 ms a token, not 9.62."""
    chunks = [(50.0, 5), *((50.0 + 10 * i, 1) for i in range(1, 101))]
    one = record(tmp_path, [request(chunks=chunks)])
    assert value(one, "tpot_ms_p50") == 10.0


def test_reasoning_counts_as_first_token(tmp_path: Path) -> None:
    """Reasoning from 100 ms, content from 2,100 ms; all budget in reasoning: no time to first output, not 0."""
    chunks = [(100, 1), (1100, 1), (2100, 1)]
    both = record(tmp_path / "a", [request(chunks=chunks, first_output_ms=2100)])
    assert value(both, "ttft_ms_p50") == 100.0
    assert value(both, "ttft_output_ms_p50") == 2100.0
    none = record(tmp_path / "b", [request(chunks=chunks, first_output_ms=None)])
    assert value(none, "ttft_ms_p50") == 100.0
    output = figures(none)["ttft_output_ms_p50"]
    assert output.value is None
    assert output.reason


def test_failed_after_tokens_is_no_sample_and_a_miss(tmp_path: Path) -> None:
    good = request(chunks=[(500, 1), (600, 1)])
    broken = request(chunks=[(10, 1), (20, 1), (30, 1)], status="failed", reason="error object in the stream")
    found = figures(record(tmp_path, [good, broken]))
    assert (found["ttft_ms_p50"].value, found["ttft_ms_p50"].n) == (500.0, 1)
    assert found["itl_ms_p50"].n == 1
    assert found["slo_attainment"].value == 0.5
    assert found["error_rate"].value == 0.5


def test_shedding_wins_nothing(tmp_path: Path) -> None:
    """A serves 100 at 2 s; B rejects 50 and serves 50 at 1 s; SLO 1.5 s: 0% and 50% of offered, no latency winner."""
    times = [600.0 * i for i in range(100)]

    def at(i: int, delay: float) -> list[tuple[float, int]]:
        return [(times[i] + delay, 1), (times[i] + delay + 20, 1)]

    slow = [request(t, slo_ttft_ms=1500.0, chunks=at(i, 2000)) for i, t in enumerate(times)]
    shed = [
        request(t, slo_ttft_ms=1500.0, chunks=at(i, 1000))
        if i % 2
        else request(t, slo_ttft_ms=1500.0, status="rejected", reason="queue_full", end_ms=t)
        for i, t in enumerate(times)
    ]
    run = plan(tmp_path / "run", {"stock": [], "b": []})
    a = record(run, slow, arm="stock", window_s=62.0)
    b = record(run, shed, arm="b", window_s=62.0)
    assert (value(a, "slo_attainment"), value(b, "slo_attainment")) == (0.0, 0.5)
    assert (value(a, "error_rate"), value(b, "error_rate")) == (0.0, 0.5)
    assert (value(b, "offered"), value(b, "rejected")) == (100.0, 50.0)
    rows = [c for c in build_summary(run)["comparisons"] if c["arm"] == "b" and c["scope"] == "all"]
    by_metric = {c["metric"]: c for c in rows}
    for metric in ("ttft_ms_p50", "ttft_ms_p99", "e2e_ms_p99", "short_ttft_ms_p99"):
        assert by_metric[metric]["verdict"] == "undetermined", metric
    assert "different shares" in by_metric["ttft_ms_p50"]["reason"]
    # the case must bite: without the shedding the same latencies do have a winner
    kept = [request(t, slo_ttft_ms=1500.0, chunks=at(i, 1000)) for i, t in enumerate(times)]
    record(run, kept, arm="b", window_s=62.0)
    again = {c["metric"]: c for c in build_summary(run)["comparisons"] if c["scope"] == "all"}
    assert again["ttft_ms_p50"]["verdict"] == "better"


def test_latency_counts_from_the_intended_time(tmp_path: Path) -> None:
    """Eight requests at 10/s, 0.5 s of service, one at a time: mean 1.9 s, max 3.3 s; from sending it is 0.5 s."""
    rows = []
    for i in range(8):
        begin, done = 500.0 * i, 500.0 * (i + 1)
        rows.append(request(100.0 * i, sent_ms=begin, chunks=[(done, 1)], scheduled_ms=begin))
    one = record(tmp_path, rows)
    found = figures(one)
    assert found["e2e_ms_mean"].value == pytest.approx(1900.0)
    assert found["e2e_ms_p99"].value == 3300.0
    assert found["send_delay_ms_p99"].value == 2800.0
    sending = (one.requests["last_token_ns"] - one.requests["sent_ns"]) / 1e6
    assert sending.tolist() == [500.0] * 8


def test_tokens_belong_to_the_window_that_receives_them(tmp_path: Path) -> None:
    """Window opens at 10 s; tokens every 0.1 s from 9.5 s to 11.5 s: 16 are credited to it, the TTFT is not."""
    chunks = [(9500.0 + 100 * i, 1) for i in range(21)]
    one = record(tmp_path, [request(9000.0, chunks=chunks)], phases=[(1, 0.0, 10.0), (2, 10.0, 20.0)])
    second = figures(one, Scope(phases=(2,)))
    assert second["output_tok_per_s"].n == 16
    assert second["output_tok_per_s"].value == pytest.approx(1.6)
    assert second["ttft_ms_p50"].value is None
    first = figures(one, Scope(phases=(1,)))
    assert (first["output_tok_per_s"].n, first["ttft_ms_p50"].value) == (5, 500.0)


@pytest.mark.parametrize(("counted", "valid"), [(100, True), (101, False)])
def test_server_counts_other_prompt_tokens(tmp_path: Path, counted: int, valid: bool) -> None:
    run = plan(tmp_path / "run", {"stock": []})
    record(run, [request(chunks=[(10, 1)], prompt_tokens_counted=counted)])
    summary = build_summary(run)
    codes = [reason["code"] for reason in summary["arms"][0]["reasons"]]
    assert summary["valid"] is summary["arms"][0]["valid"] is valid
    assert ("token_mismatch" in codes) is not valid


def test_client_stall_is_never_a_server_latency(tmp_path: Path) -> None:
    run = plan(tmp_path / "run", {"stock": []})
    record(
        run, [request(100.0 * i, sent_ms=100.0 * i + 200, chunks=[(100.0 * i + 250, 1)]) for i in range(20)]
    )
    arm = build_summary(run)["arms"][0]
    assert not arm["valid"]
    assert "client_stall" in [reason["code"] for reason in arm["reasons"]]


def test_patch_that_the_traffic_never_reached(tmp_path: Path) -> None:
    rows = [request(600.0 * i, chunks=[(600.0 * i + 50, 1), (600.0 * i + 70, 1)]) for i in range(90)]
    run = plan(tmp_path / "run", {"stock": [], "qos": ["qos"], "qos+slru": ["qos", "slru"]})
    record(run, rows, arm="stock")
    record(run, rows, arm="qos", patches=["qos"], hooks={"qos": {"hits": 0}})
    record(
        run, rows, arm="qos+slru", patches=["qos", "slru"], hooks={"qos": {"hits": 5}, "slru": {"hits": 0}}
    )
    summary = build_summary(run)
    alone, both = summary["arms"][1], summary["arms"][2]
    assert (alone["valid"], alone["hooks"]) == (True, {"qos": {"hits": 0}})
    assert [r["text"] for r in both["reasons"] if r["code"] == "never_fired"] == [
        "patch slru never fired: the traffic did not reach its hooks"
    ]
    verdicts = {c["verdict"] for c in summary["comparisons"] if c["arm"] == "qos"}
    reasons = {c["reason"] for c in summary["comparisons"] if c["arm"] == "qos"}
    assert verdicts == {"undetermined"}
    assert all(reason.startswith("never fired") for reason in reasons)
    assert "same" in {c["verdict"] for c in summary["comparisons"] if c["arm"] == "qos+slru"}


def test_cancelled_requests(tmp_path: Path) -> None:
    """Seen a first token: a sample. Not seen: censored, and a miss only if it had waited past its promise."""
    rows = [
        request(chunks=[(300, 1), (310, 1)], status="cancelled", end_ms=320, slo_ttft_ms=200.0),
        request(chunks=[(100, 1), (110, 1)], status="cancelled", end_ms=320, slo_ttft_ms=200.0),
        request(status="cancelled", end_ms=150, cancel_ms=150, slo_ttft_ms=200.0),
        request(status="cancelled", end_ms=250, cancel_ms=250, slo_ttft_ms=200.0),
    ]
    found = figures(record(tmp_path, rows))
    assert found["ttft_ms_p99"].n == 2
    assert found["tpot_ms_p50"].value is None
    assert found["slo_attainment"].value == 0.5
    assert found["goodput_rps"].value == pytest.approx(1 / 60)
    assert (found["cancelled"].value, found["cancelled_unserved"].value) == (4.0, 2.0)


def test_recovery_is_preemption_to_the_next_token_after_resumption(tmp_path: Path) -> None:
    """Output of a step that was in flight at the preemption is no recovery."""
    chunks = [(100, 1), (210, 1), (900, 1), (920, 1)]
    events = [
        {"t_ns": int(0.2 * S), "kind": "preempt", "request": 0},
        {"t_ns": int(0.8 * S), "kind": "resume", "request": 0},
        {"t_ns": int(0.95 * S), "kind": "preempt", "request": 0},
        {"t_ns": int(0.3 * S), "kind": "preempt", "request": 1},
    ]
    rows = [request(chunks=chunks), request(chunks=[(100, 1), (350, 1)])]
    pool = pool_of([record(tmp_path, rows, events=events)])
    assert sorted(View(pool, Scope()).points("recoveries").values.tolist()) == [50.0, 700.0]


def test_hit_rate_and_jitter_and_cost(tmp_path: Path) -> None:
    rows = [
        request(
            chunks=[(100, 1), (110, 1), (130, 1)],
            prompt_tokens=300,
            prompt_tokens_counted=300,
            cached_tokens=150,
        ),
        request(chunks=[(100, 1)], cached_tokens=0, short=False),
        request(status="rejected", cached_tokens=None, prompt_tokens_counted=None),
    ]
    # one step reaches out of the window by half: only what lies inside it is counted
    steps = [
        {"t_ns": 0, "start_ns": 0, "end_ns": 1 * S, "kv_usage": 0.5},
        {"t_ns": int(1.5 * S), "start_ns": int(1.5 * S), "end_ns": int(2.5 * S), "kv_usage": 0.7},
    ]
    found = figures(record(tmp_path, rows, steps=steps, window_s=2.0))
    assert found["prefix_hit_rate"].value == pytest.approx(150 / 400)
    assert found["short_tpot_jitter_ms"].value == pytest.approx(5.0)
    assert found["gpu_busy_share"].value == pytest.approx(0.75)
    assert found["gpu_s_per_1k_tokens"].value == pytest.approx(1.5 / 0.004)
    assert found["kv_usage_p99"].value == 0.7
    assert found["step_ms_p50"].value == 1000.0


def test_jain_only_over_tenants_that_wait_all_through_a_window(tmp_path: Path) -> None:
    """Service over weight 10 and 10 and, for a tenant that did not wait, nothing: fair. 10 and 30: 0.8."""

    def waiting(tenant: str, weight: int) -> dict[str, object]:
        return {
            "tenant": tenant,
            "weight": weight,
            "scheduled_ms": 6000.0,
            "prompt_tokens": 0,
            "prompt_tokens_counted": 0,
        }

    def served(tenant: str, tokens: int) -> dict[str, object]:
        chunks = [(1000.0 + i, 1) for i in range(tokens)]
        return request(
            -1000.0, tenant=tenant, chunks=chunks, scheduled_ms=-900.0, prompt_tokens=0, prompt_tokens_counted=0,
            weight={"gold-a": 4, "silver-0": 2, "bronze-0": 1}[tenant],
        )  # fmt: skip

    def index(gold: int, silver: int) -> float | None:
        rows = [
            request(0.0, chunks=[(7000, 1)], **waiting("gold-a", 4)),
            request(0.0, chunks=[(7000, 1)], **waiting("silver-0", 2)),
            served("gold-a", gold),
            served("silver-0", silver),
            served("bronze-0", 100),
        ]
        return value(record(tmp_path / f"{gold}-{silver}", rows, window_s=5.0), "jain_index")

    assert index(40, 20) == pytest.approx(1.0)
    assert index(40, 60) == pytest.approx(0.8)
    alone = [request(0.0, chunks=[(7000, 1)], **waiting("gold-a", 4)), served("silver-0", 5)]
    nobody = figures(record(tmp_path / "alone", alone, window_s=5.0))["jain_index"]
    assert nobody.value is None
    assert "5 s window" in nobody.reason


def test_few_samples_are_marked(tmp_path: Path) -> None:
    def rows(n: int) -> list[dict[str, object]]:
        return [request(i, chunks=[(i + 50.0 + i % 7, 1)]) for i in range(n)]

    for n, marked in ((458, True), (459, False)):
        found = figures(record(tmp_path / str(n), rows(n)))
        assert found["ttft_ms_p99"].few_samples is marked
        assert not found["ttft_ms_p90"].few_samples


def test_unmeasured_requests_are_not_offered(tmp_path: Path) -> None:
    rows = [
        request(1000.0, measured=False, chunks=[(11_000, 1)]),
        request(10_500.0, phase=2, chunks=[(10_600, 1)]),
    ]
    one = record(tmp_path, rows, phases=[(2, 10.0, 20.0)])
    found = figures(one)
    assert (found["offered"].value, found["ttft_ms_p50"].n) == (1.0, 1)
    assert found["output_tok_per_s"].n == 2


def test_scopes_are_read_as_they_are_written() -> None:
    texts = ("all", "phase:3", "phase:3-5", "tier:gold", "tenant:silver-0", "tenant:silver-0/phase:3")
    assert [str(parse_scope(text)) for text in texts] == list(texts)
    assert parse_scope("phase:3-5").phases == (3, 4, 5)
    for wrong in ("phase:x", "tenant:", "gold", "phase:5-3", "tier:gold/tenant:a", ""):
        with pytest.raises(Exception, match="scope"):
            parse_scope(wrong)


def test_scope_of_a_tenant_in_a_phase(tmp_path: Path) -> None:
    rows = [
        request(100.0, chunks=[(150, 1)]),
        request(100.0, tenant="silver-0", tier="silver", chunks=[(190, 1)]),
        request(10_100.0, tenant="silver-0", tier="silver", phase=2, chunks=[(10_400, 1)]),
    ]
    one = record(tmp_path, rows, phases=[(1, 0.0, 10.0), (2, 10.0, 20.0)])
    expected = {"all": 90.0, "phase:1": 50.0, "tier:silver": 90.0, "tenant:silver-0/phase:2": 300.0}
    assert {text: value(one, "ttft_ms_p50", parse_scope(text)) for text in expected} == expected
    assert np.isnan(one.requests["cancel_ns"].to_numpy(float)).all()


def test_a_request_belongs_to_its_phase_even_when_sent_at_its_very_end(tmp_path: Path) -> None:
    """A session that begins in a phase may send its last keystroke just after the phase's end."""
    rows = [request(10_000.0 + 50 * i, phase=1, chunks=[(10_200.0 + 50 * i, 1)]) for i in range(3)]
    found = figures(record(tmp_path, rows, phases=[(1, 0.0, 10.0)]))
    assert (found["offered"].value, found["ttft_ms_p50"].n) == (3.0, 3)
