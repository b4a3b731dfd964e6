"""Guards `prefillbudget` in its arithmetic: what long prefills get, who of them is held, and for how long at most.

Plain objects only. Not here: real schedulers and engines (test_prefillbudget_schedulers), how step times are learned
(scheduling/test_steptime), default values of the knobs, and what the patch is worth (the experiment).
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from patches.fixes.prefillbudget import PATCH, PrefillBudgetKnobs
from tests.scheduling.capacity_policy import Bench, Sized

FAST = settings(max_examples=100, deadline=None, derandomize=True)
LONG = 4000


def bench(**knobs: Any) -> Bench:
    """The patch; a prompt of 1,000 tokens is long."""
    return Bench(PATCH, PrefillBudgetKnobs(**{"long_prompt_tokens": 1000, **knobs}))


def prefilling(b: Bench, name: str = "long", tokens: int = LONG, **identity: Any) -> Sized:
    """A long prompt whose first half is computed."""
    return b.run(name, tokens, prefills=True, **identity)


# what long prefills get


def test_alone_it_gets_whole_steps_and_nobody_is_held() -> None:
    b = bench()
    first = prefilling(b)
    assert b.cap(first) == 2000
    second = b.add("second", LONG)
    assert b.gate(second) is None
    assert b.cap(b.enter(second)) == LONG


@pytest.mark.parametrize("beside", ["decode", "waiting"])
def test_beside_others_it_gets_what_the_target_leaves(beside: str) -> None:
    """20 ms without prefill and 0.1 ms a token: 40 ms have room for 200 tokens."""
    b = bench(target_step_ms=40, reserved_share=0.5, short_prefill_tokens=100)
    decode = b.run("decode", 50)
    b.learn(0.020, 1e-4, decode)
    long = prefilling(b)
    if beside == "waiting":
        b.finish(decode)
        b.add("short", 60)
        # What waits is expected to need what it has, and gets it from the reserve.
        assert b.cap(long) == pytest.approx(200 - 60, abs=5)
    else:
        assert b.cap(long) == pytest.approx(200, abs=5)


def test_short_prompts_claim_at_most_their_reserve_and_only_while_they_move() -> None:
    b = bench(target_step_ms=40, reserved_share=0.75, short_prefill_tokens=100, least_tokens=10)
    b.learn(0.020, 1e-4, b.run("decode", 50))
    long = prefilling(b, slo_s=1000.0)
    for number in range(3):
        b.add(f"short{number}", 100)
    assert b.cap(long) == pytest.approx(50, abs=5)
    # Nobody was admitted in that pass: what is kept for them would be idle.
    b.end_pass({"long": 50, "decode": 1})
    assert b.cap(long) == pytest.approx(200, abs=5)
    b.end_pass({"long": 50, "decode": 1})
    b.add("another", 10)
    assert b.cap(long) == pytest.approx(50, abs=5)


@FAST
@given(
    target_ms=st.floats(5, 100),
    reserved=st.floats(0, 1),
    least=st.integers(1, 300),
    decodes=st.integers(0, 60),
    shorts=st.lists(st.integers(1, 900), max_size=5),
    longs=st.integers(1, 3),
    asked=st.integers(1, 2048),
    waited_s=st.floats(0, 30),
)
def test_cap_laws(
    target_ms: float,
    reserved: float,
    least: int,
    decodes: int,
    shorts: list[int],
    longs: int,
    asked: int,
    waited_s: float,
) -> None:
    """All long ones together stay within the budget; the first always gets some; decodes keep their tokens; shorts are not cut."""
    b = bench(target_step_ms=target_ms, reserved_share=reserved, least_tokens=least)
    b.scheduler.max_num_scheduled_tokens = 400
    for number in range(decodes):
        b.run(f"d{number}", 10)
    running = [prefilling(b, f"long{i}", slo_s=10.0) for i in range(longs)]
    waiting = [b.add(f"s{i}", tokens) for i, tokens in enumerate(shorts)]
    b.context.now += waited_s
    granted = [b.cap(long, asked) for long in running]
    for short in waiting:
        assert b.cap(short) == short.num_tokens
    assert all(0 <= tokens <= asked for tokens in granted)
    if not decodes and not shorts:
        assert granted == [asked] * longs
        return
    assert granted[0] >= 1
    assert granted[0] >= min(least, asked, max(1, 400 - decodes))
    assert sum(granted) <= max(least, 256)
    assert sum(granted) <= max(1, 400 - decodes)


def test_it_grows_old() -> None:
    """The reserve for short prompts goes as its time does: 2,000 tokens are left, 5,000 can be had in a second."""
    b = bench(target_step_ms=40, reserved_share=1.0, least_tokens=10, step_stretch_factor=9)
    b.learn(0.020, 1e-4, b.run("decode", 50))
    long = prefilling(b, slo_s=10.0)
    start = b.context.now
    seen = []
    for waited_s in (0.0, 9.2, 9.6, 9.99, 1000.0):
        b.context.now = start + waited_s
        b.add(f"short{waited_s}", 900)
        seen.append(b.cap(long))
        b.end_pass({"decode": 1})
    assert seen == pytest.approx([10, 100, 200, 200, 200], abs=8)


@pytest.mark.parametrize(
    ("line_tokens", "expected"),
    [(0, 200), (3125, 300), (6250, 400), (18_750, 400), (28_125, 300), (37_500, 200), (250_000, 200)],
)
def test_steps_are_longer_for_a_line_that_can_still_be_served(line_tokens: int, expected: int) -> None:
    """5,000 tokens a second in steps of 40 ms, and 5 s are allowed: up to some 25,000 tokens longer steps help."""
    b = bench(target_step_ms=40, least_tokens=10, step_stretch_factor=9, aged_stretch_factor=1.5)
    b.learn(0.020, 1e-4, b.run("decode", 50))
    long = prefilling(b, slo_s=5.0)
    # Late ones do not count.
    b.add("late", 9000, slo_s=0.001)
    b.context.now += 0.01
    if line_tokens:
        for number in range(line_tokens // 3125):
            b.add(f"line{number}", 3125, slo_s=5.0)
    assert b.cap(long) == pytest.approx(expected, abs=8)


# who is held


def test_one_at_a_time_beside_others_and_the_next_in_the_same_pass() -> None:
    b = bench()
    b.run("decode", 50)
    long = b.run("long", 1100, prefills=True)
    first, second = b.add("first", LONG), b.add("second", LONG)
    assert b.gate(first) is not None
    b.end_pass({"long": 400})
    # Its last 150 tokens: what the step has left is for the next one.
    assert b.cap(long) == 150
    assert b.context.released[-1:] == ["first"]
    assert b.gate(first) is None
    assert 1 <= b.cap(first) <= 106
    b.enter(first)
    assert b.gate(second) is not None


def test_what_is_nearly_cached_counts_as_short() -> None:
    b = bench(short_prefill_tokens=512)
    b.run("decode", 50)
    prefilling(b)
    waiting = b.add("waiting", LONG)
    assert b.gate(waiting) is not None
    other = b.add("other", LONG)
    other.cached = list(other.blocks) + [object()] * 220  # type: ignore[list-item]
    assert b.gate(other) is None
    assert b.hooks.token_cap
    assert b.hooks.token_cap(other, 220 * 16, LONG - 220 * 16, 0.0) == LONG - 220 * 16


def test_the_late_stand_back_but_every_so_often() -> None:
    """Of four admissions one is of the first in line; the others can be in time."""
    b = bench(late_turn_requests=4)
    b.run("decode", 50)
    late = b.add("late", LONG, slo_s=1.0)
    b.context.now = 5.0
    b.finish(prefilling(b, "before", slo_s=0.001))
    order = []
    for number in range(9):
        waiting = b.add(f"r{number}", LONG, slo_s=1000.0)
        # A place became free a moment ago.
        b.context.now += 0.01
        chosen = waiting
        if late in b.scheduler.queued and b.gate(late) is None:
            chosen = late
        assert b.gate(chosen) is None
        b.cap(chosen)
        b.admit(chosen, 100)
        order.append(chosen.request_id)
        b.finish(chosen)
        if chosen is late:
            late = b.add(f"late{number}", LONG, slo_s=0.001)
    assert [name.startswith("late") for name in order] == [False] * 3 + [True] + [False] * 3 + [True] + [
        False
    ]


def test_a_late_one_does_not_wait_for_one_that_never_comes() -> None:
    """The one that could be in time is held by something else: the place is not left empty for long."""
    b = bench()
    b.run("decode", 50)
    late = b.add("late", LONG, slo_s=0.5)
    b.context.now = 1.0
    b.add("held by another", LONG, slo_s=1000.0)
    b.finish(prefilling(b, "before"))
    assert b.gate(late) is not None
    b.context.now += 0.2
    assert b.gate(late) is None


@settings(FAST, max_examples=200)
@given(
    lengths=st.lists(st.sampled_from([10, 999, 1000, 5000]), min_size=1, max_size=6),
    slos=st.lists(st.sampled_from([0.1, 5.0, 1000.0]), min_size=6, max_size=6),
    wait_s=st.floats(0, 20),
)
def test_the_gate_never_holds_when_nothing_runs(lengths: list[int], slos: list[float], wait_s: float) -> None:
    b = bench()
    for number, (length, slo_s) in enumerate(zip(lengths, slos, strict=False)):
        b.add(f"r{number}", length, slo_s=slo_s)
    b.context.now += wait_s
    assert all(b.gate(request) is None for request in b.scheduler.queued)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["preempt", "finish"])
def test_the_place_of_one_that_goes_is_free_at_once(how: str) -> None:
    b = bench()
    b.run("decode", 50)
    long = prefilling(b)
    held = b.add("held", LONG)
    assert b.gate(held) is not None
    if how == "preempt":
        b.context.preempt(long)
    else:
        b.finish(long)
    assert b.gate(held) is None
    assert "held" in b.context.released


def test_knobs_refuse_nonsense_and_have_units() -> None:
    for bad in ({"reserved_share": 1.5}, {"least_tokens": 0}, {"budget_tokens": 5}):
        with pytest.raises(ValidationError):
            PrefillBudgetKnobs(**bad)
    assert all(PATCH.unit(name) for name in PrefillBudgetKnobs.model_fields)
