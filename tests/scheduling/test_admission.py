"""Guards `admission` and what it measures with: backlog, drain rate, tiers, floors, and the refusals that follow.

Plain objects; a law of the accounts on real Schedulers is in test_deadline_schedulers. Not here: default
values of the knobs, and what the patch is worth (the experiment).
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patches.scheduling.admission import PATCH
from patches.scheduling.floors import Floors
from patches.scheduling.prefills import Drain
from patches.scheduling.tiers import Tiers
from patches.seam.endings import parse
from tests.scheduling.deadline_policy import Machine

FAST = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def machine(**knobs: Any) -> Machine:
    """A machine that does 1,000 tokens a second, and knows it; no floors unless asked for."""
    made = Machine(PATCH, **{"floor_share": 0.0, "tier_hold_s": 1.0, **knobs})
    made.measure(1000.0)
    return made


def refusal(m: Machine, tokens: int, **more: Any) -> tuple[str, int | None] | None:
    """The code and Retry-After of a request that comes now, or None if it is let in."""
    prompt = m.add(tokens, **more)
    named = m.expire()
    assert set(named) <= {prompt.request_id}
    ending = parse(named.get(prompt.request_id))
    return (ending.code, ending.retry_after_s) if ending else None


# what is measured


@FAST
@given(
    rate=st.integers(1, 10**5),
    gaps=st.lists(st.floats(0.001, 10), min_size=1, max_size=30),
    h=st.floats(0.1, 60),
)
def test_a_constant_rate_is_met_exactly_at_any_interval(rate: int, gaps: list[float], h: float) -> None:
    drain = Drain(h)
    for gap in gaps:
        drain.add(rate * gap, gap)
    assert drain.per_s == pytest.approx(rate)


def test_what_a_level_got_long_ago_is_forgotten() -> None:
    """A level that was once shut out for a moment is not taken for a slow one for ever."""
    m = machine()
    state = m.hooks.on_add.__self__  # type: ignore[union-attr]
    gold, bronze = m.add(1000, priority=0), m.add(50_000, priority=2)
    for _ in range(20):
        m.step((bronze, 100))
    shut_out = state._prefills.per_s_for(0)
    assert shut_out < 400
    m.step((gold, 1000), seconds=1.0)
    for _ in range(60):
        m.step((bronze, 1000), seconds=1.0)
    assert state._prefills.per_s_for(0) > 1.7 * shut_out


def test_a_slow_line_is_forgotten_once_it_is_gone() -> None:
    """It may have stood for want of memory; that nobody stands in it any more says nothing of how fast it would go."""
    m = machine()
    slow = m.add(10**6, slo_s=1e6)
    for _ in range(30):
        m.step((slow, 50), seconds=1.0)
    rate = m.gauges["admission_drain_tokens_per_s"]
    assert rate() < 250
    m.finish(slow)
    for _ in range(30):
        m.step(seconds=1.0)
    assert rate() > 900


def test_idle_time_does_not_make_it_slow() -> None:
    m = machine()
    m.now += 1000
    short = m.add(10)
    m.step((short, 10), seconds=0.5)
    m.step()
    assert m.gauges["admission_drain_tokens_per_s"]() == pytest.approx(1000)


@FAST
@given(
    asks=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 5000), st.floats(0, 5)), min_size=5, max_size=60
    ),
    share=st.floats(0.05, 1.0),
)
def test_floors_can_all_be_kept(asks: list[tuple[str, int, float]], share: float) -> None:
    """Whatever came: not all tenants are below their floors at once, and the sums agree."""
    floors = Floors(share, 10.0)
    weights = {"a": 4.0, "b": 2.0, "c": 1.0}
    now = 0.0
    for tenant, tokens, gap in asks:
        now += gap
        floors.ask(tenant, weights[tenant], now)
        floors.admit(tenant, tokens)
        assert not all(floors.ask(t, weights[t], now) for t in weights)
        assert sum(floors.share_of(t) for t in weights) == pytest.approx(1.0)


@FAST
@given(
    drawn=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.floats(0, 0.7)), min_size=1, max_size=60)
)
def test_no_level_is_refused_within_the_hold_of_letting_a_worse_one_in(
    drawn: list[tuple[int, bool, float]],
) -> None:
    tiers, now = Tiers(1.0), 0.0
    admitted: dict[int, float] = {}
    late_at: dict[int, float] = {}
    for level, late, gap in drawn:
        now += gap
        refused = tiers.refuse(level, late, False, now)
        if late:
            late_at[level] = now
        reason = late or any(other < level and now - at < 1.0 for other, at in late_at.items())
        worse_in = any(other > level and now - at < 1.0 for other, at in admitted.items())
        assert refused == (reason and not worse_in)
        if not refused:
            tiers.admitted(level, now)
            admitted[level] = now


# refusals


def test_nobody_is_refused_before_a_rate_is_known() -> None:
    m = Machine(PATCH)
    assert all(refusal(m, 10**6, slo_s=0.1, priority=5) is None for _ in range(50))


@FAST
@given(backlog=st.integers(0, 20_000), tokens=st.integers(1, 5000), slo_s=st.floats(0.2, 20))
def test_predicted_late_is_backlog_over_rate(backlog: int, tokens: int, slo_s: float) -> None:
    m = machine()
    if backlog:
        assert refusal(m, backlog, slo_s=1e5) is None
    found = refusal(m, tokens, slo_s=slo_s)
    wait_s = (backlog + tokens) / 1000
    if abs(wait_s - slo_s) > 1e-6:
        assert (found is not None) == (wait_s > slo_s)
    if found:
        code, retry_s = found
        assert code == "predicted_late"
        # After that long it would be let in, had nobody come in between.
        assert retry_s is not None
        assert (backlog + tokens) / 1000 - retry_s <= slo_s + 1e-6
        assert retry_s <= max(1, wait_s - slo_s + 1)


def test_what_is_cached_or_stands_behind_does_not_count() -> None:
    m = machine()
    assert refusal(m, 5000, priority=2, slo_s=10.0) is None
    # The five seconds before it are of a worse priority.
    assert refusal(m, 800, priority=0, slo_s=1.0) is None
    assert refusal(m, 8000, priority=0, slo_s=1.0, cached=7900) is None


def test_a_prompt_is_looked_up_once_and_a_short_one_never() -> None:
    m = machine()
    m.probed.clear()
    long, short = m.add(2000), m.add(100)
    m.step((short, 100), (long, 900))
    m.step((long, 1100))
    assert m.probed == [long.request_id]


def test_a_low_tier_is_closed_before_a_high_one_is_refused() -> None:
    m = machine()
    bronze = m.add(500, priority=2, slo_s=9.0)
    assert refusal(m, 950, priority=0, slo_s=1.0) is None
    # Gold would be late now; bronze was let in a moment ago, so gold is not refused but bronze closed.
    assert refusal(m, 950, priority=0, slo_s=1.0) is None
    assert refusal(m, 10, priority=2, slo_s=9.0) == ("predicted_late", 1)
    m.now += 1.1
    # Bronze is not through yet.
    assert refusal(m, 950, priority=0, slo_s=1.0) is None
    m.step((bronze, 500), seconds=0.5)
    assert refusal(m, 950, priority=0, slo_s=1.0) == ("predicted_late", 3)


def test_red_memory_admits_high_priorities_only() -> None:
    m = machine(kv_red_share=0.85, high_priority_rank=1)
    m.usage = 0.849
    assert refusal(m, 10, priority=2) is None
    m.usage, m.free_blocks = 0.85, 0
    # Nobody is known to give blocks back.
    assert refusal(m, 10, priority=2) == ("kv_red", 1)
    assert refusal(m, 10, priority=1) is None
    assert m.gauges["admission_kv_red"]() == 1


def test_red_is_no_reason_where_blocks_come_back_in_time() -> None:
    """And `watermark` holds who waits for them. 100 blocks a second; one prompt of 50 blocks waits."""
    m = machine(others=("watermark",), kv_red_share=0.85, high_priority_rank=1, late_slo_factor=1.0)
    m.usage, m.free_blocks = 0.9, 10
    for _ in range(100):
        ends = m.add(16)
        ends.num_computed_tokens = 1600
        m.finish(ends)
        m.step(seconds=1.0)
    m.add(800, priority=0)
    # 50 + 60 blocks are wanted, and 10 are free.
    assert refusal(m, 960, priority=2, slo_s=0.9) == ("kv_red", 2)
    assert refusal(m, 960, priority=2, slo_s=1.8) is None


def test_depth_in_seconds_and_in_requests() -> None:
    m = machine(max_backlog_s=5.0, max_waiting_requests=3, high_priority_rank=0)
    assert refusal(m, 8000) is None
    assert refusal(m, 10, priority=1) == ("queue_depth", 4)
    assert refusal(m, 10) is None
    m.finish(m.waiting[0])
    assert refusal(m, 10, priority=1) is None
    assert refusal(m, 10, priority=1) is None
    assert refusal(m, 10, priority=1) == ("queue_depth", 1)


def test_a_tenant_below_its_floor_is_let_in() -> None:
    m = machine(floor_share=0.5, floor_horizon_s=5.0)
    for _ in range(10):
        refusal(m, 1000, tenant="big", weight=1.0, slo_s=100.0)
    # Half of its half of what was admitted is 2,500 tokens or a bit more: it gets as much, and is then refused.
    got = [refusal(m, 1000, tenant="late", weight=1.0, slo_s=0.1) for _ in range(6)]
    assert got[:3] == [None] * 3
    assert all(got[4:])
    assert m.gauges["admission_by_floor"]() >= 3


def test_refused_and_ended_ones_owe_nothing() -> None:
    m = machine()
    for number in range(40):
        prompt = m.add(100 + number, slo_s=0.5)
        if number % 3 == 0 and prompt.request_id not in m.expire():
            m.finish(prompt)
    m.expire()
    for prompt in list(m.waiting):
        m.finish(prompt)
    state = m.hooks.on_add.__self__  # type: ignore[union-attr]
    assert state._prefills.total == 0
    assert not state._refused
