"""Guards `overload` in its arithmetic: when it is overload, whom it refuses then, floors, and long prefills' budget.

Plain objects only. Not here: real schedulers and engines (test_deadline_schedulers), default values of the
knobs, and what the patch is worth (the experiment).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from patches.fixes.overload import PATCH, OverloadKnobs
from patches.scheduling.misses import Capacity, Demand, MissShare, Tightest
from patches.seam.endings import parse
from tests.scheduling.deadline_policy import Machine, Prompt

FAST = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def machine(**knobs: Any) -> Machine:
    """A machine that does 1,000 tokens a second, and knows it; limits of its own, no floors unless asked for."""
    own = {
        "enter_slo_factor": 4.0,
        "standing_slo_factor": 4.0,
        "accept_slo_factor": 1.0,
        "floor_share": 0.0,
        "floor_horizon_s": 5.0,
        "tier_hold_s": 1.0,
        "long_prompt_tokens": 2000,
        "long_step_least_tokens": 50,
        "step_slo_share": 0.1,
        "step_slo_least_share": 0.1,
        "full_load_slo_share": 1.0,
        "capacity_horizon_s": 1e9,
    }
    made = Machine(PATCH, **{**own, **knobs})
    made.measure(1000.0)
    made.now += 20.0
    made.step()
    return made


def code(m: Machine, tokens: int, **more: Any) -> str:
    """The code with which a request that comes now is refused; "" if it is let in."""
    prompt = m.add(tokens, **more)
    ending = parse(m.expire().get(prompt.request_id))
    return ending.code if ending else ""


# load


@FAST
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 5)), max_size=60))
def test_a_miss_share_is_one_and_forgets(drawn: list[tuple[bool, float]]) -> None:
    share, now = MissShare(10.0), 0.0
    for missed, gap in drawn:
        now += gap
        before = share.at(now)
        share.add(missed, now)
        after = share.at(now)
        assert 0 <= after < 1
        assert (after >= before) if missed else (after <= before)
    assert share.at(now + 1e6) < 1e-3


def test_the_tightest_target_is_of_those_that_came_lately() -> None:
    tightest = Tightest(10.0)
    tightest.see(0.2, 0.0)
    tightest.see(3.0, 5.0)
    assert tightest.slo_s == 0.2
    tightest.see(3.0, 10.1)
    assert tightest.slo_s == 3.0
    for number in range(1000):
        tightest.see(1.0 + number, 10.2)
    assert tightest.slo_s == 1.0
    assert len(tightest._seen_s) <= 64


@FAST
@given(st.lists(st.tuples(st.integers(0, 500), st.floats(0.01, 2)), max_size=40))
def test_demand_is_the_line_that_there_would_be(drawn: list[tuple[int, float]]) -> None:
    """Against Lindley's recursion, at 100 tokens a second."""
    demand, now, line = Demand(), 0.0, 0.0
    demand.drain(100.0, now)
    for tokens, gap in drawn:
        demand.add(tokens)
        now += gap
        demand.drain(100.0, now)
        line = max(0.0, line + tokens / 100.0 - gap)
        assert demand.seconds == pytest.approx(line, abs=1e-6)
    demand.bound(1.0)
    assert demand.seconds == pytest.approx(min(line, 1.0), abs=1e-6)


def test_capacity_is_the_best_rate_and_fades() -> None:
    capacity = Capacity(10.0)
    capacity.see(100.0, 0.0)
    capacity.see(20.0, 10.0)
    assert capacity.per_s == pytest.approx(50.0)
    capacity.see(70.0, 10.0)
    assert capacity.per_s == 70.0


def test_it_is_overload_from_a_long_line_and_until_it_was_calm() -> None:
    m = machine(calm_s=5.0, floor_horizon_s=50.0)
    line = [m.add(1000, slo_s=60.0, priority=2) for _ in range(5)]
    m.expire()
    assert m.gauges["overload_periods"]() == 0
    # Five seconds are no long line until somebody comes who is owed a token in one.
    gold = m.add(100, slo_s=1.0)
    m.expire()
    assert m.gauges["overload_periods"]() == 1
    assert code(m, 100, slo_s=5.0, priority=2) == "overload"
    for prompt in [*line, gold]:
        m.finish(prompt)
    # The real line is gone, the one that there would be takes 5.2 s, and is well below after 3.2 of them.
    m.now += 3.1
    m.expire()
    m.now += 4.9
    m.expire()
    assert code(m, 4100, slo_s=4.0) == "overload"
    # That was one more for the line.
    m.now += 2.2
    m.expire()
    m.now += 5.1
    m.expire()
    assert code(m, 3950, slo_s=3.9) == ""
    assert not m.ended.keys() & {prompt.request_id for prompt in line}


def test_misses_make_it_overload() -> None:
    m = machine(enter_miss_share=0.1)
    for _ in range(4):
        late = m.add(100, slo_s=0.5)
        m.step((late, 100), seconds=0.6)
    m.expire()
    assert m.gauges["overload_periods"]() == 1
    with pytest.raises(ValidationError, match="leave_miss_share"):
        OverloadKnobs.model_validate({"enter_miss_share": 0.01, "leave_miss_share": 0.02})


def overloaded(m: Machine) -> Prompt:
    """Put a line of 5 s of the worst priority into it, then one whose target makes that too long."""
    line = m.add(5000, slo_s=100.0, priority=3, tenant="line")
    m.add(10, slo_s=1.0, tenant="gold")
    m.expire()
    assert m.gauges["overload_periods"]() == 1
    return line


@FAST
@given(tokens=st.integers(1, 6000), slo_s=st.floats(1, 20), cached=st.integers(0, 6000), bursts=st.booleans())
def test_who_can_be_in_time_is_let_in(tokens: int, slo_s: float, cached: int, bursts: bool) -> None:
    """Against the definition: its uncached tokens behind those of its own and better levels, within its limit."""
    m = machine(others=("watermark",) if bursts else ())
    m.finish(overloaded(m))
    m.now += 0.1
    uncached = tokens - (min(cached, tokens - 1) if tokens >= 128 else 0)
    wait_s, limit_s = (10 + uncached) / 1000, min(slo_s, max(4.0, slo_s - 0.1) if bursts else 4.0)
    if abs(wait_s - limit_s) > 1e-6:
        assert bool(code(m, tokens, slo_s=slo_s, cached=cached, priority=1)) == (wait_s > limit_s)


def test_a_burst_within_the_own_target_is_no_standing_line_until_it_has_lasted_so_long() -> None:
    m = machine(others=("watermark",))
    overloaded(m)
    assert code(m, 100, slo_s=20.0, priority=3) == ""
    load = m.hooks.on_add.__self__.load  # type: ignore[union-attr]
    limits = [load.burst_s(20.0, m.now + lasted_s) for lasted_s in (0.0, 10.0, 16.5)]
    assert limits == pytest.approx([20.0, 10.0, 4.0])
    load._since_s -= 100.0
    assert code(m, 100, slo_s=20.0, priority=4) == "overload"
    # Nor is there room for a burst while better ones miss their targets.
    load._since_s = m.now
    for _ in range(2):
        load.count(0, True, m.now)
    assert load.room_for(8, m.now) < 1
    assert code(m, 100, slo_s=20.0, priority=4) == "overload"


def test_the_worst_level_gives_way_to_misses_first() -> None:
    m = machine(enter_miss_share=0.05, leave_miss_share=0.01)
    state = m.hooks.on_add.__self__  # type: ignore[union-attr]
    for level in (0, 2, 4):
        state.load.count(level, False, m.now)
    for _ in range(2):
        state.load.count(0, True, m.now)
    # 2 of 23: 0.087. The first band of 0.04 is over, the second nearly.
    assert state.load.room_for(4, m.now) == 0
    assert 0 < state.load.room_for(2, m.now) < 0.2
    assert state.load.room_for(0, m.now) == 1


def test_a_tenant_below_its_floor_is_let_in_if_it_could_be_in_time() -> None:
    m = machine(floor_share=1.0, floor_horizon_s=50.0)
    overloaded(m)
    # A third of what was admitted is its floor, and it has had nothing.
    assert code(m, 1600, slo_s=20.0, priority=3, tenant="small") == ""
    assert m.gauges["overload_by_floor"]() == 0
    assert code(m, 3000, slo_s=9.0, priority=3, tenant="small") == ""
    assert m.gauges["overload_by_floor"]() == 1
    assert code(m, 3000, slo_s=9.0, priority=3, tenant="small") == "overload"
    assert code(m, 30_000, slo_s=20.0, priority=3, tenant="other") == "overload"


def test_what_waits_in_vain_is_refused_only_in_overload() -> None:
    m = machine()
    calm = m.add(1000, slo_s=1.5)
    m.now += 0.6
    assert m.expire() == {}
    assert m.key(calm) > 0
    m.finish(calm)
    m = machine()
    waits = m.add(1000, slo_s=3.0)
    started = m.add(1000, slo_s=3.0)
    m.step((started, 10))
    overloaded(m)
    m.now += 2.0
    named = m.expire()
    assert waits.request_id in named
    assert started.request_id not in named
    assert parse(named[waits.request_id]).code == "overload"  # type: ignore[union-attr]
    assert m.hooks.victim_hint
    assert m.hooks.victim_hint(started) == 4


def test_what_was_late_before_an_overload_is_refused_as_it_begins() -> None:
    m = machine()
    late, started, gone, in_time = (m.add(100, slo_s=slo_s) for slo_s in (1.5, 1.5, 1.5, 60.0))
    m.step((started, 10))
    m.now += 1.5
    assert m.expire() == {}
    assert m.gauges["overload_late"]() == 3
    m.finish(gone)
    overloaded(m)
    assert set(m.ended) == {late.request_id}
    assert parse(m.ended[late.request_id]).code == "overload"  # type: ignore[union-attr]
    assert {started, in_time} <= {*m.running, *m.waiting}
    # It counts once, as a promise that was broken; and nothing is looked at a second time.
    assert m.gauges["overload_refused_hopeless"]() == 1
    assert m.expire() == {}


# long prefills


def budget(m: Machine) -> float:
    """What long prefills get in a step now."""
    state = m.hooks.on_add.__self__  # type: ignore[union-attr]
    return float(state._long.budget(state.load.pressure(m.now)))


def long_beside(m: Machine, tokens: Callable[[int], float], passes: int) -> list[int]:
    """What a long prompt gets in each of so many passes beside a decode; a pass lasts what `tokens` says of it."""
    assert m.hooks.token_cap
    long = m.add(10**6, slo_s=1e5)
    decode = m.add(10, slo_s=1.0)
    m.step((decode, 10), (long, 1))
    got = []
    for _ in range(passes):
        got.append(m.hooks.token_cap(long, 1, 1000, m.now))
        m.step((long, got[-1]), seconds=tokens(got[-1]))
    return got


@pytest.mark.parametrize(("us_per_token", "fixed_s"), [(200, 0.02), (400, 0.0), (100, 0.05)])
def test_under_load_steps_last_their_part_of_the_tightest_target(us_per_token: float, fixed_s: float) -> None:
    """And no less: a budget that follows the rate would shrink itself."""
    m = machine(step_slo_share=0.1)
    got = long_beside(m, lambda tokens: fixed_s + tokens * us_per_token / 1e6, 150)
    fits = (0.1 - fixed_s) / us_per_token * 1e6
    assert got[0] == 1000
    for tokens in got[60:]:
        assert 0.75 * fits <= tokens <= 1.1 * fits


def test_where_nothing_fits_they_get_the_least() -> None:
    m = machine(step_slo_share=0.1, long_step_least_tokens=50)
    got = long_beside(m, lambda tokens: 0.2 + tokens / 1e4, 100)
    assert got[-1] == 50


def test_the_budget_of_long_prefills_shrinks_with_the_line() -> None:
    m = machine(step_slo_share=0.1, long_step_least_tokens=50)
    long_beside(m, lambda tokens: 0.2 + tokens / 1e4, 100)
    for prompt in [*m.waiting, *m.running]:
        m.finish(prompt)
    m.add(10, slo_s=1.0)
    m.now += 1000.0
    budgets = []
    for _ in range(400):
        budgets.append(budget(m))
        m.add(100, slo_s=1.0)
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > 900
    assert budgets[-1] == pytest.approx(50)


def test_long_prefills_share_it_one_at_a_time_and_only_beside_others() -> None:
    m = machine()
    assert m.hooks.token_cap
    assert m.hooks.waiting_gate
    first, second = m.add(3000, slo_s=50.0), m.add(3000, slo_s=50.0)
    # Nobody else: whole steps, and both at once.
    m.step((first, 10))
    assert m.hooks.token_cap(first, 10, 900, m.now) == 900
    assert m.hooks.waiting_gate(second, m.now) is None
    short = m.add(10, slo_s=1.0)
    for _ in range(20):
        m.hooks.token_cap(first, 10, 900, m.now)
        m.step((short, 1), (first, 10), seconds=0.3)
    assert m.hooks.token_cap(short, 0, 700, m.now) == 700
    assert m.hooks.waiting_gate(second, m.now)
    assert 50 <= budget(m) < 900
    assert m.hooks.token_cap(first, 20, 900, m.now) == int(budget(m))
    # The rest of the pass: the budget is gone, and a waiting one keeps the one token that it must have.
    assert m.hooks.token_cap(first, 20, 900, m.now) == 1
    m.now += 10.1
    assert m.hooks.waiting_gate(second, m.now) is None
    m.now -= 10.1
    m.finish(first)
    assert m.hooks.waiting_gate(second, m.now) is None


def test_long_ones_keep_the_pace_that_their_own_target_needs() -> None:
    """Steps take too long whatever is in them, yet the line is to be through in half of 20 s."""
    m = machine(long_drain_slo_share=0.5, enter_slo_factor=1e6)
    assert m.hooks.token_cap
    long = m.add(4000, slo_s=20.0)
    decode = m.add(10, slo_s=1.0)
    m.step((decode, 10), (long, 1))
    for _ in range(60):
        granted = m.hooks.token_cap(long, 1, 1000, m.now)
        m.step((long, granted), seconds=0.5)
        owed = m.hooks.on_add.__self__._prefills.total  # type: ignore[union-attr]
    # From 4,000 tokens at that pace: less than a third after three halves of the target.
    assert owed < 4000 / 3
