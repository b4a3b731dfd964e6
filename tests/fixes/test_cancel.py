"""`cancel`: returns, and what is spared, on real Schedulers. Not here: what it is worth."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches.fixes.returns import Returns
from tests.drive import cancel, free_blocks, make_config, make_request, make_scheduler
from tests.kv.test_warmup import cached, run_some
from tests.scheduling.clocked import NS, patched, prompt

BOTH = pytest.mark.parametrize("async_scheduling", [False, True])
FILE = prompt(1, 640)


@given(st.lists(st.floats(0.01, 500), max_size=100), st.floats(1, 60))
def test_waiting_is_bounded_and_covers_nine_of_ten(intervals: list[float], most_s: float) -> None:
    returns = Returns(2.0, most_s)
    for each in intervals:
        returns.returned(each)
    spare_s = returns.spare_s()
    assert 0 < spare_s <= most_s
    latest = intervals[-64:]
    if len(latest) >= 8:
        covered = sum(each <= 2 * spare_s for each in latest)
        assert spare_s == most_s or covered >= 0.9 * len(latest)


def type_on(config: Any, key: int, tenant: str = "editor") -> Any:
    """One keystroke more in the same file."""
    return make_request(config, f"k{key}", FILE + prompt(2, key), max_tokens=30, tenant=tenant)


def broken_off(scheduler: Any, request: Any, passes: int = 3) -> None:
    """Serve a request for some passes, then cancel it."""
    scheduler.add_request(request)
    run_some(scheduler, passes)
    cancel(scheduler, request.request_id)
    run_some(scheduler, None)


def documents(config: Any, scheduler: Any, count: int, first: int) -> None:
    """Documents that nobody asks for again, 40 blocks each."""
    for i in range(count):
        scheduler.add_request(
            make_request(
                config, f"doc{first + i}", prompt(100 + first + i, 640), max_tokens=1, tenant="reader"
            )
        )
        run_some(scheduler, None)


@BOTH
def test_a_cancelled_file_outlives_documents(async_scheduling: bool) -> None:
    config = make_config(async_scheduling=async_scheduling)

    def left(enable: str) -> int:
        with patched(enable) as (_, clock):
            scheduler = make_scheduler(config, 200)
            start = free_blocks(scheduler)
            broken_off(scheduler, type_on(config, 3))
            documents(config, scheduler, 6, 0)
            clock.advance_to(NS)
            found = cached(scheduler, type_on(config, 9))
            assert free_blocks(scheduler) == start
            return found

    assert left("") == 0
    assert left("cancel") == left("cancel,slru") == 640


@BOTH
def test_it_is_spared_no_longer_than_its_user_takes(async_scheduling: bool) -> None:
    config = make_config(async_scheduling=async_scheduling)
    with patched("cancel") as (installation, clock):
        scheduler = make_scheduler(config, 200)
        # It comes back after 0.3 s, a dozen times.
        for key in range(12):
            broken_off(scheduler, type_on(config, key))
            clock.advance_to(clock.now_ns + 3 * NS // 10)
        metrics = installation.receipt()["metrics"]["cancel"]
        assert metrics["returned"] == 11
        assert metrics["spared_endings"] == 1
        clock.advance_to(clock.now_ns + NS)
        documents(config, scheduler, 1, 0)
        metrics = installation.receipt()["metrics"]["cancel"]
        assert metrics["expired"] == 1
        assert metrics["spared_blocks"] == 0
        documents(config, scheduler, 6, 1)
        assert cached(scheduler, type_on(config, 9)) == 0


@BOTH
def test_spared_blocks_are_bounded_and_still_free(async_scheduling: bool) -> None:
    config = make_config(async_scheduling=async_scheduling)
    with patched("cancel", {"cancel": {"pool_share": 0.25, "first_s": 60}}) as (installation, _):
        scheduler = make_scheduler(config, 200)
        start = free_blocks(scheduler)
        for i in range(8):
            mine = make_request(config, f"f{i}", prompt(50 + i, 320), max_tokens=30, tenant="editor")
            broken_off(scheduler, mine)
            assert installation.receipt()["metrics"]["cancel"]["spared_blocks"] <= 50
        # One that needs the whole pool gets it.
        huge = make_request(config, "huge", prompt(99, 16 * 198), max_tokens=1, tenant="reader")
        scheduler.add_request(huge)
        run_some(scheduler, None)
        assert free_blocks(scheduler) == start
        assert cached(scheduler, make_request(config, "again", prompt(99, 16 * 198))) > 3000
