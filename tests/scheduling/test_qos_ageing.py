"""Guards the order of `qos`: classes, ageing by the line that stands before a request, and the lines' bookkeeping.

Plain objects only. Not here: eviction (test_qos_victims), real schedulers and engines (test_qos), and
default values of the knobs.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from patches.scheduling.qos import PATCH, QosKnobs
from tests.scheduling.fakes import FakeContext, FakeRequest, FakeScheduler
from tests.scheduling.qos_policy import TOKENS_PER_S, Policy

FAST = settings(max_examples=60, deadline=None, derandomize=True)


def test_class_is_priority_and_prompt_length() -> None:
    policy = Policy(short_prompt_tokens=200, long_prompt_penalty_levels=3)
    for prompt_tokens, expected in ((1, 5), (199, 5), (200, 8), (4000, 8)):
        assert policy.key(FakeRequest(f"r{prompt_tokens}", 5, prompt_tokens), 0.0)[0] == expected


def test_knobs_refuse_nonsense_and_have_units() -> None:
    for bad in ({"ageing_floor_s": 0}, {"preempt_gain_factor": 0.5}, {"preempt_max_times": 0}, {"speed": 1}):
        with pytest.raises(ValidationError):
            QosKnobs(**bad)
    assert all(PATCH.unit(name) for name in QosKnobs.model_fields if name != "preempt")


def test_finished_requests_are_forgotten() -> None:
    policy = Policy()
    gone = policy.run(FakeRequest("r", priority=-5))
    policy.finish(gone, 2.0)
    # The same id later is a new request, with a class of its own.
    assert policy.key(FakeRequest("r", priority=7, queued_s=3.0), 3.0)[0] == 7


# ageing


@FAST
@given(
    floor=st.floats(0.1, 30),
    factor=st.floats(0, 4),
    moves=st.lists(
        st.tuples(st.floats(0, 20), st.integers(1, 10**6), st.integers(0, 5000)), min_size=1, max_size=30
    ),
)
def test_effective_class_never_rises_and_its_change_lies_ahead(
    floor: float, factor: float, moves: list[tuple[float, int, int]]
) -> None:
    """Whatever the line and the rate do in between."""
    policy = Policy(ageing_floor_s=floor, ageing_backlog_factor=factor)
    waiting = FakeRequest("w", priority=4, queued_s=1.0)
    before, now = math.inf, 1.0
    for wait_s, tokens, served in moves:
        now += wait_s
        line = policy.line(tokens, now)
        policy.serve(served, now)
        value, until = policy.key(waiting, now)
        assert value <= before
        assert until > now
        before = value
        policy.finish(line, now)


@FAST
@given(
    floor=st.floats(0.1, 30),
    factor=st.floats(0.1, 4),
    lines=st.lists(
        st.tuples(st.integers(-3, 3), st.one_of(st.integers(1, 500), st.integers(1, 10**6))), max_size=10
    ),
    own=st.integers(-3, 3),
)
def test_ageing_period_follows_the_line_before_the_request_above_its_floor(
    floor: float, factor: float, lines: list[tuple[int, int]], own: int
) -> None:
    """Its own class and better ones stand before it, worse ones do not, nor does itself."""
    policy = Policy(ageing_floor_s=floor, ageing_backlog_factor=factor)
    for priority, tokens in lines:
        policy.line(tokens, 2.0, priority)
    before = sum(tokens for priority, tokens in lines if priority <= own)
    # Seen as a difference of times, which costs some digits.
    assert policy.period_s(2.0, own) == pytest.approx(
        max(floor, factor * before / TOKENS_PER_S), rel=1e-6, abs=1e-9
    )


def test_ageing_period_is_the_floor_before_anything_was_served() -> None:
    context = FakeContext(FakeScheduler())
    hooks = PATCH.build(QosKnobs.model_validate({"ageing_floor_s": 3.0}), context)  # type: ignore[arg-type]
    assert hooks.request_key
    hooks.request_key(FakeRequest("line", num_tokens=10**9), 0.0)
    assert hooks.request_key(FakeRequest("r"), 0.0) == (0, 3.0)


@FAST
@given(
    floor=st.floats(0.5, 10),
    lines=st.lists(st.integers(1, 50_000), min_size=1, max_size=40),
    levels=st.integers(1, 6),
)
def test_no_request_starves_while_the_line_is_bounded(floor: float, lines: list[int], levels: int) -> None:
    """Asked only when its key expires, as the queue does, a request rises a class a period, plus one period."""
    policy = Policy(ageing_floor_s=floor, ageing_backlog_factor=1.0)
    longest_s = max(floor, max(lines) / TOKENS_PER_S)
    waiting = FakeRequest("w", priority=levels, queued_s=1.0)
    now, asked = 1.0, 0
    while True:
        line = policy.line(lines[asked % len(lines)], now)
        value, until = policy.key(waiting, now)
        policy.finish(line, now)
        if value <= 0:
            break
        now = math.nextafter(max(until, now), math.inf)
        asked += 1
    assert now <= 1.0 + (levels + 1) * longest_s * (1 + 1e-9)


def test_what_runs_does_not_age() -> None:
    """Its key may be asked for all the same: another patch has a part in it."""
    policy = Policy(ageing_floor_s=1.0)
    running = policy.run(FakeRequest("r", 5, queued_s=1.0), 1.5)
    assert policy.key(running, 40.0)[0] == 5
    policy.preempt(running, 50.0)
    assert policy.key(running, 50.0)[0] == 5
    assert policy.key(running, 52.5)[0] == 3


@FAST
@given(waits=st.lists(st.integers(0, 9), min_size=2, max_size=6))
def test_a_preempted_request_ages_anew_from_the_class_it_had(waits: list[int]) -> None:
    policy = Policy(ageing_floor_s=1.0)
    request = FakeRequest("r", 50, queued_s=1.0)
    now, expected = 1.0, 50
    policy.key(request, now)
    for whole_s in waits:
        now += whole_s + 0.5
        expected -= whole_s
        assert policy.key(request, now)[0] == expected
        policy.admit(request, now)
        now += 100.0
        policy.preempt(request, now)
        assert policy.key(request, now)[0] == expected


# the lines

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["add", "add", "admit", "admit", "preempt", "finish", "age", "age", "pass", "decode"]
        ),
        st.integers(0, 5),
        st.integers(1, 4000),
    ),
    max_size=60,
)


@settings(FAST, max_examples=150)
@given(operations=OPERATIONS, gain=st.sampled_from([1.0, 1000.0]))
def test_the_lines_hold_what_waits_and_nothing_else(
    operations: list[tuple[str, int, int]], gain: float
) -> None:
    """At any time, in each class."""
    policy = Policy(ageing_floor_s=0.5, preempt_gain_factor=gain, preempt_max_times=100)
    scheduler, context = policy.scheduler, policy.context
    now = 1.0
    for number, (what, which, size) in enumerate(operations):
        now += 0.25
        context.now = now
        chosen: Any = None
        if what in ("admit", "preempt", "finish", "decode"):
            places = {"admit": scheduler.queued, "finish": [*scheduler.queued, *scheduler.running]}
            place = places.get(what, scheduler.running)
            if not place:
                continue
            chosen = place[which % len(place)]
        if what == "add":
            new = FakeRequest(f"r{number}", which, size, size, queued_s=now)
            policy.key(new, now)
            scheduler.queued.append(new)
        elif what == "admit":
            chosen.num_computed_tokens = chosen.num_tokens
            policy.admit(chosen, now, resumed=bool(chosen.num_preemptions))
        elif what == "preempt":
            policy.preempt(chosen, now)
        elif what == "finish":
            policy.finish(chosen, now)
        elif what == "decode":
            chosen.num_tokens += size
        elif what == "age":
            now += size / 1000
            for request in [*scheduler.queued, *scheduler.running][which:]:
                policy.key(request, now)
        else:
            scheduler.queued.sort(key=lambda r: policy.key(r, now)[0])
            policy.evict(now)
            policy.serve(size, now)
        expected: dict[int, int] = {}
        state: Any = policy.hooks.request_key.__self__  # type: ignore[union-attr]
        for request in scheduler.queued:
            level = state._standing[request.request_id].effective
            expected[level] = expected.get(level, 0) + request.num_tokens
        assert policy.line_tokens() == expected
    for request in [*scheduler.queued, *scheduler.running]:
        policy.finish(request, now)
    assert policy.line_tokens() == {}
