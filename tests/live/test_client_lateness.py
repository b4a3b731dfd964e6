"""The client's conduct in numbers, by hand: which tokens a stall may have delayed, and when the verdict falls."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.engines.live.client.lateness import Lateness, lateness_of
from harness.engines.live.client.observed import Observed
from harness.engines.live.client.watch import LoopSamples, Watch

MS = 1_000_000


def seen(intended_ms: float, sent_ms: float | None, first_ms: float | None = None) -> Observed:
    """A request of which only the times matter."""
    blank: dict[str, Any] = dict.fromkeys(Observed.__slots__)
    blank.update(request_id="r", status="ok", reason="", output_tokens=0, tokens_exact=True)
    blank["intended_ns"] = round(intended_ms * MS)
    blank["sent_ns"] = None if sent_ms is None else round(sent_ms * MS)
    blank["first_token_ns"] = None if first_ms is None else round(first_ms * MS)
    return Observed(**blank)


def loop(*samples: tuple[float, float], pauses: tuple[float, ...] = ()) -> LoopSamples:
    due, woke = (np.array([s[i] * MS for s in samples], dtype=np.int64) for i in (0, 1))
    return LoopSamples(due, woke, np.array([p * MS for p in pauses], dtype=np.int64))


def test_figures() -> None:
    late = lateness_of(
        [
            ([seen(0, 1), seen(10, 12), seen(20, None)], loop((5, 6), (11, 11.5), pauses=(2, 3))),
            ([seen(0, 8)], loop((5, 25))),
        ]
    )
    assert (late.requests, late.send_delay_ms_p50, late.send_delay_ms_p99, late.send_delay_ms_max) == (
        3,
        2,
        8,
        8,
    )
    assert (late.loop_lag_ms_p99, late.loop_lag_ms_max) == (20, 20)
    assert (late.gc_pauses, late.gc_total_ms, late.gc_max_ms) == (2, 5, 3)
    assert late.client_stall == ""


def test_only_tokens_read_in_or_right_after_a_stall_are_suspect() -> None:
    stall = loop((5, 5.1), (10, 210), (215, 215.2))
    times = [3.0, 9.0, 10.0, 150.0, 210.0, 213.0, 214.9, 230.0]
    delays = stall.read_delay_ns([seen(0, 0, t) for t in times]) / MS
    assert delays.tolist() == pytest.approx([0, 0.1, 200, 200, 200, 200, 200, 0])
    assert len(stall.read_delay_ns([seen(0, 0)])) == 0
    assert loop().read_delay_ns([seen(0, 0, 5.0)]).tolist() == [0]


@pytest.mark.parametrize(
    ("field", "word"), [("send_delay_ms_p99", "sent late"), ("read_delay_ms_p99", "read first")]
)
def test_the_verdict_falls_above_ten_milliseconds(field: str, word: str) -> None:
    fine = Lateness(9, 0, 10.0, 500.0, 10.0, 0, 500.0, 0, 0, 0)
    assert fine.client_stall == ""
    late: Lateness = replace(fine, **{field: 10.1})  # type: ignore[arg-type]
    assert word in late.client_stall
    assert "10.1 ms" in late.client_stall


def test_one_late_request_in_a_hundred_is_no_stall() -> None:
    def with_late(count: int) -> str:
        requests = [seen(i, i + (200 if i < count else 1)) for i in range(200)]
        return lateness_of([(requests, loop())]).client_stall

    assert with_late(2) == ""
    assert with_late(3)


def test_the_collector_is_off_while_watched_and_its_pauses_are_seen() -> None:
    with Watch() as watch:
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        gc.collect()
        time.sleep(0)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert len(watch.pauses_ns) == 1
    assert watch.pauses_ns[0] > 0
