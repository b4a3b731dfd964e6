"""Guards `edf` in its arithmetic: who is late when, the order that follows, and whom it ends.

Plain objects only. Not here: real schedulers and engines (test_edf_schedulers), default values of the
knobs, and what the patch is worth (the experiment).
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patches.scheduling.deadlines import LATE_S
from patches.scheduling.edf import PATCH
from tests.scheduling.deadline_policy import Machine

FAST = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def machine(**knobs: Any) -> Machine:
    """A machine that does 1,000 tokens a second, and knows it."""
    made = Machine(PATCH, **knobs)
    made.measure(1000.0)
    return made


@FAST
@given(
    drawn=st.lists(
        st.tuples(st.integers(1, 3000), st.floats(0.1, 10), st.floats(0, 3)), min_size=1, max_size=12
    ),
    later_s=st.floats(0, 12),
)
def test_the_order_is_by_deadline_with_the_late_behind(
    drawn: list[tuple[int, float, float]], later_s: float
) -> None:
    """Against the definition: slack = deadline - now - uncached tokens / rate; late from 0 on."""
    m = machine()
    prompts = [m.add(tokens, slo_s=slo, at_s=m.now - age) for tokens, slo, age in drawn]
    m.now += later_s
    want = sorted(
        prompts,
        key=lambda p: (
            p.arrival_s + p.slo_s - m.now - p.num_prompt_tokens / 1000 <= 1e-6,
            p.arrival_s + p.slo_s,
        ),
    )
    got = sorted(prompts, key=lambda p: (m.key(p), prompts.index(p)))
    assert [m.key(p) for p in got] == [m.key(p) for p in want]


@FAST
@given(tokens=st.integers(1, 3000), slo_s=st.floats(0.1, 10), waits=st.lists(st.floats(0.01, 2), max_size=8))
def test_a_key_changes_once_and_when_it_said(tokens: int, slo_s: float, waits: list[float]) -> None:
    m = machine()
    prompt = m.add(tokens, slo_s=slo_s)
    assert m.hooks.request_key
    values = []
    for wait in [0.0, *waits]:
        before, until = m.hooks.request_key(prompt, m.now)
        values.append(before)
        m.now += wait
        after, _ = m.hooks.request_key(prompt, m.now)
        assert (after != before) == (until is not None and until <= m.now)
    assert len(set(values)) <= 2
    assert values == sorted(values)


def test_what_is_cached_leaves_slack() -> None:
    m = machine()
    bare, cached = m.add(2000, slo_s=1.0), m.add(2000, slo_s=1.0, cached=1500)
    assert m.key(bare) > LATE_S > m.key(cached)


def test_before_a_rate_is_known_only_the_deadline_itself_makes_late() -> None:
    m = Machine(PATCH)
    prompt = m.add(10**6, slo_s=1.0)
    assert m.key(prompt) < LATE_S
    m.now += 1.0
    assert m.key(prompt) > LATE_S


def test_one_that_becomes_late_while_it_runs_is_put_back_and_is_the_first_victim() -> None:
    m = machine()
    prompt = m.add(1000, slo_s=2.0)
    m.step((prompt, 100), seconds=1.2)
    assert m.hooks.victim_hint
    assert m.hooks.victim_hint(prompt) == 0
    m.expire()
    # 900 tokens are left at 1,000 a second (or less by now), and 0.8 s.
    assert m.rekeyed == [prompt.request_id]
    assert m.key(prompt) > LATE_S
    assert m.hooks.victim_hint(prompt) == 4
    assert not m.ended


def test_a_first_token_in_time_makes_it_punctual_for_good() -> None:
    m = machine()
    prompt = m.add(1000, slo_s=1.0)
    m.now += 0.5
    m.expire()
    assert m.key(prompt) > LATE_S
    m.step((prompt, 1000), seconds=0.3)
    assert m.key(prompt) < LATE_S
    m.now += 100
    m.expire()
    assert m.key(prompt) < LATE_S
    assert m.gauges["edf_feasible_missed"]() == 0


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.5])
def test_what_has_not_started_is_ended_at_its_time_and_not_before(factor: float) -> None:
    m = machine(expire_slo_factor=factor)
    waits, runs = m.add(100, slo_s=2.0), m.add(100, slo_s=2.0)
    m.step((runs, 50), seconds=2.0 * factor - 0.01)
    assert not m.expire()
    m.now += 0.01
    assert m.expire() == {waits.request_id: "deadline_expired"}
    assert not m.expire()
    assert m.gauges["edf_expired"]() == 1


def test_misses_count_only_where_the_promise_could_be_kept() -> None:
    m = machine()
    before = m.gauges["edf_feasible"]()
    hopeless, possible, kept = m.add(5000, slo_s=1.0), m.add(500, slo_s=1.0), m.add(500, slo_s=9.0)
    m.step((possible, 500), (kept, 500), (hopeless, 1), seconds=1.5)
    m.step((hopeless, 4999), seconds=5.0)
    assert m.gauges["edf_feasible"]() - before == 2
    assert m.gauges["edf_feasible_missed"]() == 1
    # 0.5 of a promise late; 0.83 of one left; 5.5 promises late.
    buckets = {name: gauge() for name, gauge in m.gauges.items() if "slack" in name}
    assert buckets == {
        "edf_slack_below_minus_1": 1,
        "edf_slack_below_0": 1,
        "edf_slack_below_0_25": 0,
        "edf_slack_below_0_5": 0,
        "edf_slack_below_0_75": 0,
        "edf_slack_above": 1,
    }


def test_expired_and_cancelled_ones_are_forgotten() -> None:
    m = machine()
    for number in range(300):
        prompt = m.add(100, slo_s=5.0)
        if number % 2:
            m.finish(prompt)
    m.now += 100
    m.expire()
    state = m.hooks.on_add.__self__  # type: ignore[union-attr]
    assert not state._due
    assert state._prefills.total == 0
    # Left is what the machine was measured with, far off.
    assert len(state._late_at) + len(state._expire_at) <= 2
