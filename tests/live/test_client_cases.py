"""Cases that clients of this kind got wrong, from a server's bytes to the report's figures.

The definitions themselves are tested on hand-made records; here the records come over HTTP.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from harness.engines.live.client.lateness import Lateness, lateness_of
from harness.engines.live.client.observed import Observed
from harness.engines.live.client.open_loop import Replayed, run_loop
from harness.engines.live.client.sends import sends_of
from harness.engines.live.client.target import Options, make_target
from reports.summary import build_summary
from tests.hand_records import figures, plan, record, request
from tests.live.mock_server import MockServer, Scenario
from tests.live.small_workload import many, soon_ns, workload
from workloads.request import PlannedRequest

MS = 1e6


def drive_with(
    scenario: Scenario, *requests: PlannedRequest, block_s: float = 0.0, at_s: float = 0.0
) -> Replayed:
    """Drive in this process; the event loop stands still for `block_s` at `at_s`."""
    with MockServer({"*": scenario}) as mock:
        epoch_ns = soon_ns(0.5)

        def block_later(loop: asyncio.AbstractEventLoop, _: object) -> None:
            if block_s:
                loop.call_later((epoch_ns - time.monotonic_ns()) / 1e9 + at_s, time.sleep, block_s)

        return run_loop(
            sends_of(workload(*requests)),
            make_target(mock.url, "m"),
            Options(total_timeout_s=10),
            epoch_ns,
            attach=block_later,
        )


def row(one: Observed) -> dict[str, object]:
    """As the record of a request is written."""
    chunks = [(t / MS, int(n)) for t, n in zip(one.chunk_ns, one.chunk_tokens, strict=True)]
    assert one.sent_ns is not None
    values: dict[str, object] = {"sent_ms": one.sent_ns / MS, "chunks": chunks, "status": one.status}
    if chunks:
        first = one.first_output_token_ns
        values["first_output_ms"] = None if first is None else first / MS
    return request(one.intended_ns / MS, reason=one.reason, **values)


def lateness(replayed: Replayed) -> Lateness:
    return lateness_of([(replayed.observed, replayed.loop)])


def test_role_event_is_no_first_token(tmp_path: Path) -> None:
    """Role at 0.1 s, content at 0.3 s, the next 50 ms later: the TTFT is the content's, and there is one gap."""
    role = Scenario(chat=True, role_s=0.1, first_s=0.2, interval_s=0.05)
    found = figures(record(tmp_path, [row(one) for one in drive_with(role, *many(1, 1, tokens=2)).observed]))
    assert (found["ttft_ms_p50"].value or 0) >= 300
    assert found["itl_ms_p50"].n == 1


def test_error_object_in_a_stream_of_status_200(tmp_path: Path) -> None:
    """Three tokens, an error object, [DONE]: failed, no sample, a miss."""
    replayed = drive_with(Scenario(error_after=3), *many(2, 10, tokens=9))
    assert [(one.status, one.http_status, one.output_tokens) for one in replayed.observed] == [
        ("failed", 200, 3)
    ] * 2
    found = figures(record(tmp_path, [row(one) for one in replayed.observed]))
    assert found["ttft_ms_p50"].value is None
    assert (found["slo_attainment"].value, found["error_rate"].value) == (0.0, 1.0)


def test_first_chunk_with_many_tokens(tmp_path: Path) -> None:
    """5 of 25 tokens in the first chunk, 20 more 10 ms apart: at least 10 ms a token, where 24 gaps would say 8.3."""
    burst = Scenario(per_chunk=(5, 1), first_s=0.02, interval_s=0.01)
    one = drive_with(burst, *many(1, 1, tokens=25)).observed[0]
    assert one.chunk_tokens[0] >= 5
    assert one.output_tokens == 25
    found = figures(record(tmp_path, [row(one)]))
    assert one.last_token_ns is not None
    assert one.first_token_ns is not None
    spent_ms = (one.last_token_ns - one.first_token_ns) / MS
    assert found["tpot_ms_p50"].value == pytest.approx(spent_ms / (25 - one.chunk_tokens[0]))


def test_client_that_stands_still_is_the_client_and_no_server(tmp_path: Path) -> None:
    """The server answers in 50 ms, the client's loop is blocked for 200 ms: INVALID client_stall."""
    steady = Scenario(first_s=0.05)
    replayed = drive_with(steady, *many(20, 10, tokens=1), block_s=0.2, at_s=0.05)
    late = lateness(replayed)
    assert late.client_stall.startswith("the client sent late")
    assert late.send_delay_ms_max >= 100
    assert late.loop_lag_ms_max >= 150
    run = plan(tmp_path / "run", {"stock": []})
    record(run, [row(one) for one in replayed.observed])
    arm = build_summary(run)["arms"][0]
    assert not arm["valid"]
    assert "client_stall" in [reason["code"] for reason in arm["reasons"]]


def test_standing_still_between_sending_and_reading_is_found_too() -> None:
    """Nothing is due while the loop is blocked, so no send is late; but the answers are read late."""
    replayed = drive_with(Scenario(first_s=0.05), *many(3, 1, tokens=1), block_s=0.4, at_s=0.03)
    delays = [one.send_delay_ns or 0 for one in replayed.observed]
    late = lateness(replayed)
    assert late.read_delay_ms_p99 >= 200
    assert late.client_stall
    if max(delays) < 10 * MS:
        assert late.client_stall.startswith("the client read first tokens late")
    # what the server did in 50 ms cannot have taken less as the client saw it
    assert all((one.first_token_ns or 0) - (one.sent_ns or 0) >= 50 * MS for one in replayed.observed)
