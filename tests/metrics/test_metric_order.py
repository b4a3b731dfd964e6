"""Overtaking, first seconds, restores, moved bytes and the return of hits, on records made by hand.

Not here: what an engine puts into the records.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UserError
from harness.metrics import moved
from harness.metrics.derive import overtakes
from harness.metrics.pool import pool_of
from harness.metrics.scope import Scope
from harness.metrics.switch import returns
from harness.records import arm_dir, load_arm, write_arm
from tests.hand_records import MS, S, figures, papers, record, request, tables_of, value

_ADMITTED = st.one_of(st.none(), st.integers(0, 8))


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 8), _ADMITTED), max_size=14))
def test_overtakes_are_counted_in_each_priority(rows: list[tuple[str, int, int | None]]) -> None:
    frame = pd.DataFrame(
        {
            "tenant": [tenant for tenant, _, _ in rows],
            "sent_ns": [float(sent) for _, sent, _ in rows],
            "scheduled_ns": [np.nan if at is None else float(at) for _, _, at in rows],
        }
    )
    found = overtakes(frame, {"a": 0, "b": 1})
    for i, (tenant, sent, at) in enumerate(rows):
        if at is None:
            assert np.isnan(found[i])
            continue
        assert found[i] == sum(
            (sent, i) < (other_sent, j) and other_at < at
            for j, (other, other_sent, other_at) in enumerate(rows)
            if other == tenant and other_at is not None
        )


def test_the_longest_wait_and_the_most_overtaken(tmp_path: Path) -> None:
    rows = [
        request(0, chunks=[(900, 1)], scheduled_ms=800),
        request(100, chunks=[(300, 1)], scheduled_ms=200),
        request(200, chunks=[(400, 1)], scheduled_ms=300),
    ]
    one = record(tmp_path, rows)
    assert value(one, "overtakes_max") == 2
    assert value(one, "queue_wait_ms_max") == 800
    rejected = record(tmp_path / "b", [request(status="rejected", reason="x", scheduled_ms=None)])
    assert figures(rejected)["overtakes_max"].value is None


def test_the_first_ten_seconds_and_the_finished(tmp_path: Path) -> None:
    rows = [
        request(9_999, chunks=[(10_099, 1)]),
        request(10_000, chunks=[(10_900, 1)]),
        request(20_000, chunks=[(20_020, 1)], status="cancelled"),
    ]
    one = record(tmp_path, rows)
    assert value(one, "cold_ttft_ms_p90") == 100
    assert figures(one)["cold_ttft_ms_p99"].n == 1
    assert value(one, "finished_ttft_ms_p50") == 100
    assert value(one, "ttft_ms_p50") == 100
    assert figures(one)["finished_ttft_ms_p50"].n == 2


def test_recovery_without_the_queue(tmp_path: Path) -> None:
    """Preempted at 100 ms, back at 600 ms, next token at 640 ms; a second time with its blocks fetched from 800 ms on."""
    row = request(chunks=[(50, 1), (640, 1), (900, 1)], preemptions=2)

    def event(kind: str, ms: int) -> dict[str, object]:
        return {"t_ns": ms * MS, "kind": kind, "request": 0, "detail": ""}

    events = [event("preempt", 100), event("resume", 600), event("preempt", 700), event("resume", 850)]
    one = record(tmp_path / "a", [row], events=events)
    assert value(one, "preempt_restore_ms_p99") == 50
    assert value(one, "preempt_recovery_ms_p99") == 540
    loaded = record(tmp_path / "b", [row], events=[*events, event("load", 800)])
    assert value(loaded, "preempt_restore_ms_p99") == 100
    none = figures(record(tmp_path / "c", [row]))["preempt_restore_ms_p99"]
    assert none.value is None and none.reason


def test_bytes_moved_are_those_of_measured_time(tmp_path: Path) -> None:
    transfers = pd.DataFrame(
        {
            "begin_ns": [S, 30 * S, 61 * S],
            "end_ns": [2 * S, 31 * S, 62 * S],
            "link": ["d2h", "h2d", "d2h"],
            "size_bytes": [100, 20, 7000],
        }
    )
    for seed, table in ((0, transfers), (1, transfers.iloc[:1])):
        place = arm_dir(tmp_path, "kv", seed)
        write_arm(place, {**tables_of([request()]), "transfers": table}, *papers("kv", seed))
    both = [load_arm(arm_dir(tmp_path, "kv", seed)) for seed in (0, 1)]
    pool = pool_of(both)
    assert pool.moved_bytes is not None and pool.moved_bytes.sum() == 220
    assert value(both[0], "tier_bytes_moved") == 120
    assert "tier_bytes_moved" not in figures(record(tmp_path / "none", [request()]))
    (arm_dir(tmp_path, "kv", 0) / moved.TRANSFERS).write_bytes(b"no")
    with pytest.raises(UserError, match=r"transfers\.parquet"):
        pool_of(both)
    assert "tier_bytes_moved" not in figures(both[1], Scope(tenant="gold-a"))


def _chat(at_s: float, cached: int) -> dict[str, object]:
    return {
        "tenant": "gold-a",
        "scheduled_ns": at_s * S,
        "prompt_tokens": 100,
        "cached_tokens": float(cached),
    }


def test_when_hits_are_back_after_a_switch() -> None:
    """80 of 100 tokens before; nothing from 10 s to 13 s; then as before, and better after the second switch."""
    at = [0.5 * i for i in range(40)]
    seed = pd.DataFrame([_chat(t, 0 if 10 <= t < 13 else 80) for t in at])
    other = seed.assign(tenant="silver-0", cached_tokens=0.0)
    one, two = returns([seed, pd.concat([seed, other])], "gold-a", 0.0, [10.0, 15.0], 20.0)
    # The first two seconds without a miss begin right behind the last one.
    assert (one.before, one.back_s, one.back) == (0.8, 2.75, True)
    assert (two.back_s, two.back) == (0.0, True)
    never = seed.assign(cached_tokens=[0 if t >= 10 else 80 for t in at])
    (gone,) = returns([never], "gold-a", 0.0, [10.0], 20.0)
    assert (gone.back_s, gone.back) == (10.0, False)
