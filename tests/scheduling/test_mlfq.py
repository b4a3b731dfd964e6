"""Guards `mlfq` in its arithmetic: levels, demotion and promotion, and what the last level may have beside others.

Plain objects only. Not here: real schedulers and engines (test_mlfq_schedulers), how it composes
(test_pairs), default values of the knobs, and what the patch is worth (the experiment).
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from patches.scheduling.mlfq import PATCH, MlfqKnobs
from tests.scheduling.mlfq_policy import BOUNDS, Policy

FAST = settings(max_examples=100, deadline=None, derandomize=True)

# levels


@pytest.mark.parametrize(
    ("consumed", "level"),
    [(0, 0), (1, 0), (128, 0), (129, 1), (512, 1), (513, 2), (2048, 2), (2049, 3), (10**6, 3)],
)
def test_a_bound_belongs_to_its_level(consumed: int, level: int) -> None:
    policy = Policy()
    once, bit = policy.run("once", 0), policy.run("bit", 0)
    policy.serve(once=consumed)
    for _ in range(min(consumed, 3000)):
        policy.serve(bit=1)
    assert policy.level(once) == policy.level(bit) == level


@pytest.mark.parametrize(
    ("prompt_tokens", "level"), [(1, 0), (128, 0), (129, 1), (512, 1), (513, 2), (2048, 2), (2049, 3)]
)
def test_a_prompt_counts_from_the_start(prompt_tokens: int, level: int) -> None:
    policy = Policy()
    request = policy.add("r", prompt_tokens)
    assert policy.level(request) == level
    # Its own prefill changes nothing, then its answer does.
    policy.admit(request)
    for bound in (*BOUNDS.values(), prompt_tokens):
        if bound <= prompt_tokens:
            policy.serve(r=bound - policy.served.get("r", 0))
            assert policy.level(request) == level
    assert policy.context.gauges["mlfq_demotions"]() == 0
    policy.serve(r=5000)
    assert policy.level(request) == 3


EVENTS = st.lists(st.one_of(st.integers(1, 400), st.just("preempt"), st.just("wait")), max_size=40)


PROMPTS = st.sampled_from([1, 128, 129, 600, 2048, 3000])


@FAST
@given(events=EVENTS, prompt_tokens=PROMPTS)
def test_levels_follow_service_and_preemption_and_nothing_else(events: list[Any], prompt_tokens: int) -> None:
    """Against a model: level = what it consumed or is known to, less one for each preemption above level 0."""
    policy = Policy()
    request = policy.admit(policy.add("r", prompt_tokens))
    consumed = lifted = 0
    for number, event in enumerate(events):
        before = policy.level(request, float(number))
        if event == "preempt":
            policy.preempt(request)
            policy.admit(request, resumed=True)
            lifted += before > 0
            assert policy.level(request) == max(0, before - 1)
        elif event == "wait":
            assert policy.level(request, 1e6 * number) == before
        else:
            policy.serve(r=event)
            consumed += event
            assert policy.level(request) >= before
        earned = sum(max(consumed, prompt_tokens) > bound for bound in BOUNDS.values())
        assert policy.level(request) == earned - lifted >= 0
    assert policy.context.gauges["mlfq_promotions"]() == lifted


@FAST
@given(steps=st.lists(st.one_of(st.integers(1, 700), st.just("preempt")), max_size=40), prompt_tokens=PROMPTS)
def test_the_key_is_computed_anew_whenever_a_bound_is_crossed(steps: list[Any], prompt_tokens: int) -> None:
    """Otherwise the running order and the choice of victims would go by a stale level."""
    policy = Policy()
    request = policy.admit(policy.add("r", prompt_tokens))
    crossed = []
    for tokens in steps:
        if tokens == "preempt":
            policy.preempt(request)
            policy.admit(request, resumed=True)
            continue
        before = policy.level(request)
        policy.serve(r=tokens)
        if policy.level(request) != before:
            crossed.append("r")
    assert policy.context.rekeyed == crossed
    assert policy.context.gauges["mlfq_demotions"]() == len(crossed)


def test_promotion_does_not_reset_consumption() -> None:
    policy = Policy()
    request = policy.run("r", 513)
    policy.preempt(request)
    policy.admit(request, resumed=True)
    assert policy.level(request) == 1
    # From 513 it is 1,535 to the bound of level 2 and one more to pass it: then a level lower, as before.
    policy.serve(r=1535)
    assert policy.level(request) == 1
    policy.serve(r=1)
    assert policy.level(request) == 2


def test_finished_requests_are_forgotten() -> None:
    policy = Policy()
    request = policy.run("r", 3000)
    policy.preempt(request)
    policy.finish(request)
    again = policy.run("r", 0)
    assert policy.level(again) == 0
    policy.serve(r=129)
    assert policy.level(again) == 1


def test_knobs_refuse_nonsense_and_have_units() -> None:
    for bad in ({"level1_tokens": 128, "level0_tokens": 128}, {"level0_tokens": 0}, {"level3_tokens": 5}):
        with pytest.raises(ValidationError):
            MlfqKnobs(**bad)
    assert all(PATCH.unit(name) for name in MlfqKnobs.model_fields)


# the last level beside others

LENGTHS = st.sampled_from([1, 128, 129, 512, 600, 2048, 2049, 5000])


@FAST
@given(
    running=st.lists(st.tuples(LENGTHS, st.booleans()), max_size=6),
    waiting=st.lists(LENGTHS, max_size=4),
    share=st.integers(1, 2000),
    at_once=st.integers(1, 3),
    asked=st.integers(1, 4096),
)
def test_cap_and_gate_laws(
    running: list[tuple[int, bool]], waiting: list[int], share: int, at_once: int, asked: int
) -> None:
    """Only the last level is cut or held, never to nothing, and only if somebody better runs or waits."""
    policy = Policy(last_level_step_tokens=share, last_level_prefill_requests=at_once)
    for number, (length, prefills) in enumerate(running):
        policy.run(f"r{number}", 0, prompt_tokens=length, prefills=prefills)
    queued = [policy.add(f"w{number}", length) for number, length in enumerate(waiting)]
    everybody = [*policy.scheduler.running, *queued]
    beside_others = any(policy.level(r) < 3 for r in everybody)
    last = [r for r in policy.scheduler.running if r.is_prefill_chunk and policy.level(r) == 3]
    for held in queued:
        concerned = beside_others and policy.level(held) == 3
        assert (policy.gate(held) is not None) == (concerned and len(last) >= at_once)
    granted = []
    for prefill in policy.scheduler.running:
        if not prefill.is_prefill_chunk:
            continue
        kept = policy.cap(prefill, asked)
        assert 1 <= kept <= asked
        if prefill in last and beside_others:
            granted.append(kept)
        else:
            assert kept == asked
    # What the last level gets is for all of it together; 1 token each is the least.
    assert sum(granted) <= share + len(granted)
    assert not granted or granted[0] == min(asked, share)


def test_what_the_last_level_gets_is_there_anew_in_each_step() -> None:
    policy = Policy(last_level_step_tokens=100)
    policy.run("decode", 40)
    longs = [policy.run(f"long{i}", 0, prompt_tokens=5000, prefills=True) for i in range(2)]
    for _ in range(3):
        assert [policy.cap(long, 80) for long in longs] == [80, 20]
        policy.serve(decode=1, long0=80, long1=20)


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "runs"])
def test_one_short_request_is_enough_to_be_given_room(waits: bool) -> None:
    policy = Policy(last_level_step_tokens=256)
    long = policy.run("long", 0, prompt_tokens=5000, prefills=True)
    assert policy.cap(long, 2048) == 2048
    short = policy.add("short", 100)
    if not waits:
        policy.admit(short)
    assert policy.cap(long, 2048) == 256
    policy.serve(long=256)
    policy.finish(short)
    assert policy.cap(long, 2048) == 2048


def test_by_itself_the_last_level_uses_whole_steps_however_many_it_is() -> None:
    """Also in the pass in which they are let in, one after the other."""
    policy = Policy(last_level_step_tokens=100, last_level_prefill_requests=1, last_level_free_share=0.9)
    longs = [policy.add(f"long{i}", 3000) for i in range(4)]
    for long in longs:
        assert policy.gate(long) is None
        assert policy.cap(long, 3000) == 3000
        policy.enter(long)
    # One of a better level, and it ends.
    policy.add("short", 10)
    assert policy.cap(longs[0], 3000) == 100


def test_the_last_level_is_held_while_enough_of_it_prefill() -> None:
    policy = Policy(last_level_prefill_requests=2)
    longs = [policy.run(f"long{i}", 0, prompt_tokens=5000, prefills=True) for i in range(2)]
    policy.run("decode", 40)
    short, held = policy.add("short", 1), policy.add("held", 4000)
    for prefilling in (2, 1, 0):
        for number, long in enumerate(longs):
            long.is_prefill_chunk = number < prefilling
        policy.serve(decode=1)
        assert policy.gate(short) is None
        assert (policy.gate(held) is not None) == (prefilling == 2)


def test_who_is_let_in_counts_at_once() -> None:
    """The next one in the same pass is held already; a decode of the last level is no prefill."""
    policy = Policy()
    policy.run("decode", 40)
    policy.run("old", 5000)
    first, second = policy.add("first", 4000), policy.add("second", 4000)
    assert policy.gate(first) is None
    policy.cap(first, 4000)
    policy.enter(first)
    assert policy.gate(second) is not None


@pytest.mark.parametrize("how", ["preempt", "finish"])
def test_the_place_of_a_prefill_that_goes_is_free_at_once(how: str) -> None:
    """Without a pass between: whoever looks at the queue first in a pass meets a gate that knows."""
    policy = Policy()
    policy.run("decode", 40)
    prefilling = policy.run("prefilling", 0, prompt_tokens=4000, prefills=True)
    decoding = policy.run("decoding", 0, prompt_tokens=4000)
    held = policy.add("held", 4000)
    assert policy.gate(held) is not None
    getattr(policy, how)(decoding)
    assert policy.gate(held) is not None
    getattr(policy, how)(prefilling)
    assert policy.gate(held) is None


def test_the_last_level_leaves_blocks_to_others() -> None:
    """To the block: 250 for the prompt and a tenth of 1,000 that stay free."""
    policy = Policy(last_level_free_share=0.1)
    policy.run("decode", 40)
    long, short = policy.add("long", 4000), policy.add("short", 10)
    for free, held in ((1000, False), (350, False), (349, True), (0, True)):
        policy.scheduler.free_blocks = free
        assert (policy.gate(long) is not None) == held
        assert policy.gate(short) is None


@FAST
@given(
    # Sixty-fourths of a second: their sums and differences are exact, so the bound itself is no matter of rounding.
    patience=st.integers(32, 1280).map(lambda n: n / 64),
    moves=st.lists(st.tuples(st.integers(1, 640).map(lambda n: n / 64), st.integers(250, 1000)), max_size=40),
)
def test_the_last_level_is_let_in_once_its_patience_is_over(
    patience: float, moves: list[tuple[float, int]]
) -> None:
    """As long as the blocks suffice and nobody of it prefills; before that only if it leaves enough."""
    policy = Policy(last_level_patience_s=patience, last_level_free_share=0.5)
    policy.run("decode", 40)
    policy.add("short", 10)
    admitted_s = 0.0
    for number, (wait_s, free) in enumerate(moves):
        policy.context.now += wait_s
        policy.scheduler.free_blocks = free
        long = policy.add(f"long{number}", 4000)
        patient = policy.context.now - admitted_s <= patience
        assert (policy.gate(long) is not None) == (patient and free < 250 + 500)
        if policy.gate(long) is None:
            policy.admit(long, prefills=True)
            assert policy.gate(policy.add(f"next{number}", 4000)) is not None
            policy.context.now += 3 * patience
            # However long the prefill takes, another one must wait for its place.
            assert policy.gate(policy.scheduler.queued[-1]) is not None
            policy.finish(long)
            policy.finish(policy.scheduler.queued[-1])
            policy.context.now -= 3 * patience
            admitted_s = policy.context.now
        else:
            policy.finish(long)


@settings(FAST, max_examples=200)
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=6),
    consumed=st.lists(st.sampled_from([0, 0, 200, 3000]), min_size=6, max_size=6),
    free=st.integers(0, 1000),
    share=st.sampled_from([0.0, 0.1, 0.9]),
)
def test_the_gate_never_holds_everybody(
    lengths: list[int], consumed: list[int], free: int, share: float
) -> None:
    """If nothing runs the first in line is let pass, whatever it and the others are, lifted ones included."""
    policy = Policy(last_level_free_share=share)
    policy.scheduler.free_blocks = free
    for number, (length, tokens) in enumerate(zip(lengths, consumed, strict=False)):
        if tokens:
            policy.preempt(policy.run(f"r{number}", tokens, prompt_tokens=length, prefills=True))
        else:
            policy.add(f"r{number}", length)
    first = min(policy.scheduler.queued, key=policy.level)
    assert policy.gate(first) is None


@settings(FAST, max_examples=200)
@given(
    running=st.lists(st.tuples(LENGTHS, st.booleans(), st.sampled_from([0, 3000])), min_size=1, max_size=5),
    waiting=st.lists(LENGTHS, min_size=1, max_size=4),
    free=st.integers(0, 1000),
    victims=st.lists(st.integers(0, 4), min_size=1, max_size=3),
)
def test_whoever_is_let_pass_is_let_pass_still_after_room_was_made(
    running: list[tuple[int, bool, int]], waiting: list[int], free: int, victims: list[int]
) -> None:
    """Else the victim, which was lifted, would take the place of the one it made room for."""
    policy = Policy(last_level_free_share=0.1)
    policy.scheduler.free_blocks = free
    for number, (length, prefills, tokens) in enumerate(running):
        policy.run(f"r{number}", 0, prompt_tokens=length, prefills=prefills)
        policy.serve(**{f"r{number}": tokens})
    queued = [policy.add(f"w{number}", length) for number, length in enumerate(waiting)]
    passing = [request for request in queued if policy.gate(request) is None]
    for victim in victims:
        if policy.scheduler.running:
            policy.preempt(policy.scheduler.running[victim % len(policy.scheduler.running)])
    assert all(policy.gate(request) is None for request in passing)


def test_one_that_comes_back_spends_no_patience() -> None:
    """Lifted, it needs none; the first that waits would wait for longer."""
    policy = Policy(last_level_patience_s=5.0, last_level_free_share=0.5)
    policy.run("decode", 40)
    old = policy.run("old", 0, prompt_tokens=4000)
    policy.scheduler.free_blocks = 300
    held = policy.add("held", 4000)
    policy.preempt(old)
    policy.context.now = 4.0
    policy.admit(old, resumed=True)
    policy.context.now = 5.5
    assert policy.gate(held) is None
