"""Guards eviction in `qos`: just enough victims, only those that the rules allow, and only when it pays.

Plain objects only. Not here: the choice among several (test_qos_choose), ageing (test_qos_ageing),
real schedulers and engines (test_qos), and default values of the knobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from patches.scheduling.qos import Victim, choose
from tests.scheduling.fakes import FakeBlock, FakeRequest
from tests.scheduling.qos_policy import TOKENS_PER_S, Policy

FAST = settings(max_examples=60, deadline=None, derandomize=True)

# how many, and whom


def test_one_large_victim_is_found_behind_many_small_ones() -> None:
    policy = Policy(preempt_class_gap_levels=1, ageing_floor_s=1e6, preempt_max_requests=2)
    for name, blocks in (("a", 3), ("b", 4), ("c", 20)):
        policy.run(FakeRequest(name, 3, num_computed_tokens=16 * blocks))
    policy.wait(FakeRequest("head", 0, num_tokens=320), 2.0)
    policy.evict(2.0)
    assert policy.evict(100.0) == ["c"]


def test_of_several_the_worst_class_and_the_least_progress_come_first() -> None:
    policy = Policy(preempt_class_gap_levels=1, preempt_max_requests=9, ageing_floor_s=1e6)
    for name, priority, computed in (("a", 2, 160), ("b", 4, 320), ("c", 4, 160), ("d", 3, 16)):
        policy.run(FakeRequest(name, priority, num_computed_tokens=computed))
    # All but one block of theirs: who is least worth it stays, here nobody.
    policy.wait(FakeRequest("head", 0, num_tokens=16 * 41), 2.0)
    policy.evict(2.0)
    assert policy.evict(1000.0) == ["c", "b", "d", "a"]


@pytest.mark.parametrize("held", [8, 320], ids=["part of a block", "20 blocks"])
def test_a_full_house_costs_one_seat_whatever_the_victim_holds(held: int) -> None:
    policy = Policy(preempt_class_gap_levels=1, ageing_floor_s=1e6, preempt_max_requests=9)
    for name, computed in (("a", held), ("b", 320), ("c", 320)):
        policy.run(FakeRequest(name, 3, num_computed_tokens=computed))
    policy.scheduler.max_num_active_reqs = 3
    policy.scheduler.free_blocks = 500
    policy.wait(FakeRequest("head", 0, num_tokens=320), 2.0)
    policy.evict(2.0)
    assert policy.evict(100.0) == ["a"]


# whom the rules allow


@dataclass(frozen=True)
class Running:
    """A running request as hypothesis draws it; shared blocks are held by somebody else as well."""

    priority: int
    computed: int
    admitted_s: float
    preemptions: int
    prompt_tokens: int
    shared: bool


RUNNING = st.lists(
    st.builds(
        Running,
        st.integers(0, 6),
        st.integers(0, 2000),
        st.sampled_from([0.0, 3.0, 7.5]),
        st.integers(0, 3),
        st.sampled_from([50, 100]),
        st.sampled_from([False, False, True]),
    ),
    min_size=2,
    max_size=12,
)


@settings(FAST, max_examples=200)
@given(
    runs=RUNNING,
    free=st.integers(0, 60),
    head_tokens=st.integers(100, 2500),
    cached=st.integers(0, 10),
    waited_s=st.floats(0.1, 30),
    gap=st.integers(1, 3),
    gain=st.floats(1, 4),
    cooldown=st.sampled_from([0.0, 1.0, 5.0]),
    most=st.integers(1, 6),
    times=st.integers(2, 4),
    least=st.sampled_from([0, 100]),
    seats=st.sampled_from([0, 64]),
)
def test_victims_are_those_that_every_rule_allows(
    runs: list[Running],
    free: int,
    head_tokens: int,
    cached: int,
    waited_s: float,
    gap: int,
    gain: float,
    cooldown: float,
    most: int,
    times: int,
    least: int,
    seats: int,
) -> None:
    """Against the rules as one reads them, with `choose` on what they leave."""
    policy = Policy(
        short_prompt_tokens=10**6,
        ageing_floor_s=1e9,
        preempt_class_gap_levels=gap,
        preempt_gain_factor=gain,
        preempt_cooldown_s=cooldown,
        preempt_max_requests=most,
        preempt_max_times=times,
        victim_prompt_tokens=least,
    )
    for number, drawn in enumerate(runs):
        victim = FakeRequest(
            f"r{number}",
            drawn.priority,
            drawn.prompt_tokens,
            num_computed_tokens=drawn.computed,
            num_preemptions=drawn.preemptions,
        )
        for block in victim.blocks:
            block.ref_cnt += drawn.shared
        policy.run(victim, drawn.admitted_s)
    policy.serve(10 * TOKENS_PER_S, 8.0)
    policy.scheduler.free_blocks = free
    policy.scheduler.max_num_active_reqs = seats or len(runs)
    head = FakeRequest("head", 0, num_tokens=head_tokens, queued_s=8.0)
    # Blocks of the cache that somebody uses, and as many that nobody does.
    head.cached = [FakeBlock(1) for _ in range(cached)] + [FakeBlock(0) for _ in range(cached)]
    policy.wait(head, 8.0)
    # The first look starts the wait. Who has no progress costs nothing and would go at once.
    running = policy.scheduler.running = [r for r in policy.scheduler.running if r.num_computed_tokens]
    policy.scheduler.max_num_active_reqs = seats or len(running)
    if running:
        assert policy.evict(8.0) == []
    now = 8.0 + waited_s
    tokens_per_s = rate_of(policy, now)
    allowed = []
    for request in running:
        drawn = runs[int(request.request_id[1:])]
        weighted_s, price_s = waited_s * gain**drawn.priority, drawn.computed / tokens_per_s
        assume(abs(weighted_s - price_s) > 1e-6 * price_s)
        if (
            drawn.priority >= gap
            and drawn.preemptions < times
            and drawn.prompt_tokens >= least
            and now - drawn.admitted_s >= cooldown
            and weighted_s >= price_s
        ):
            freed = 0 if drawn.shared else -(-drawn.computed // 16)
            allowed.append(Victim((-drawn.priority, drawn.computed, request.request_id), freed, request))
    shortage = max(0, -(-head_tokens // 16) - free - cached)
    expected = []
    if shortage or len(running) >= policy.scheduler.max_num_active_reqs:
        expected = [victim.request.request_id for victim in choose(allowed, shortage, most)]
    assert policy.evict(now) == (expected if running else [])


def rate_of(policy: Policy, now: float) -> float:
    """The service rate, as the ageing period of a request that comes now shows it."""
    line = policy.line(10**18, now)
    period_s = policy.period_s(now)
    policy.finish(line, now)
    return 10**18 * policy.knobs.ageing_backlog_factor / period_s


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ["v"]),
        ({"priority": 2}, []),
        ({"admitted_s": 9.5}, []),
        ({"preemptions": 2}, []),
        ({"computed": 15 * 16}, []),
        ({"shared": True}, []),
        ({"victim_prompt_tokens": 101}, []),
        ({"preempt": False}, []),
    ],
    ids=[
        "allowed",
        "gap too small",
        "restored just now",
        "preempted too often",
        "not enough",
        "held by others too",
        "prompt too short",
        "switched off",
    ],
)
def test_one_rule_at_a_time(change: dict[str, Any], expected: list[str]) -> None:
    """The same victim with one thing changed."""
    drawn = {
        "priority": 3,
        "admitted_s": 0.0,
        "preemptions": 1,
        "computed": 320,
        "shared": False,
        "preempt": True,
        "victim_prompt_tokens": 100,
        **change,
    }
    policy = Policy(
        preempt=drawn["preempt"],
        victim_prompt_tokens=drawn["victim_prompt_tokens"],
        preempt_class_gap_levels=3,
        preempt_gain_factor=2,
        preempt_cooldown_s=2.0,
        preempt_max_times=2,
        ageing_floor_s=1e6,
    )
    victim = FakeRequest(
        "v", drawn["priority"], num_computed_tokens=drawn["computed"], num_preemptions=drawn["preemptions"]
    )
    for block in victim.blocks:
        block.ref_cnt += drawn["shared"]
    policy.run(victim, drawn["admitted_s"])
    policy.serve(10 * TOKENS_PER_S, 10.0)
    policy.wait(FakeRequest("head", 0, num_tokens=320), 10.0)
    policy.scheduler.free_blocks = 4
    assert policy.evict(10.0) == []
    assert policy.evict(11.0) == expected


@pytest.mark.parametrize(("in_use_by_others", "expected"), [(12, []), (11, ["v"])])
def test_cached_blocks_in_use_cost_the_head_nothing(in_use_by_others: int, expected: list[str]) -> None:
    """Twenty are needed and eight are free."""
    policy = Policy(preempt_class_gap_levels=1, ageing_floor_s=1e6)
    policy.run(FakeRequest("v", 3, num_computed_tokens=320))
    head = FakeRequest("head", 0, num_tokens=320)
    head.cached = [FakeBlock(2) for _ in range(in_use_by_others)]
    policy.scheduler.free_blocks = 8
    policy.wait(head, 2.0)
    policy.evict(2.0)
    assert policy.evict(100.0) == expected


@pytest.mark.parametrize(("own", "expected"), [(7, []), (8, ["v"])])
def test_blocks_that_head_and_victim_share_are_not_gained_by_eviction(own: int, expected: list[str]) -> None:
    """Thirty are needed, twelve are free, ten it shares with the victim alone: eight more are to be gained."""
    policy = Policy(preempt_class_gap_levels=1, ageing_floor_s=1e6)
    common = [FakeBlock() for _ in range(10)]
    victim = FakeRequest("v", 3, num_computed_tokens=16 * (10 + own))
    victim.blocks = [*common, *(FakeBlock() for _ in range(own))]
    policy.run(victim)
    head = FakeRequest("head", 0, num_tokens=480, cached=common)
    policy.scheduler.free_blocks = 12
    policy.wait(head, 2.0)
    policy.evict(2.0)
    assert policy.evict(100.0) == expected
    assert not expected or policy.scheduler.free_blocks >= 30


def test_nothing_happens_while_the_head_fits_or_nobody_waits() -> None:
    policy = Policy(preempt_class_gap_levels=1, ageing_floor_s=1e6)
    policy.run(FakeRequest("v", 6, num_computed_tokens=320))
    assert policy.evict(500.0) == []
    policy.wait(FakeRequest("head", 0, num_tokens=320), 500.0)
    policy.scheduler.free_blocks = 20
    assert policy.evict(500.0) == policy.evict(900.0) == []


# when it pays


@FAST
@given(gap=st.integers(1, 4), gain=st.floats(1, 3), computed=st.integers(320, 8000))
def test_a_victim_is_bought_only_once_the_rent_has_reached_its_price(
    gap: int, gain: float, computed: int
) -> None:
    """The first pass that evicts is the first at which weighted wait >= restore cost, to the step."""
    policy = Policy(preempt_class_gap_levels=1, preempt_gain_factor=gain, ageing_floor_s=1e6)
    policy.run(FakeRequest("v", gap, num_computed_tokens=computed))
    policy.wait(FakeRequest("head", 0, num_tokens=320), 1.0)
    price_s = computed / TOKENS_PER_S
    for step in range(2000):
        waited_s = step * 0.01
        if policy.evict(1.0 + waited_s):
            break
        assert waited_s * gain**gap < price_s * (1 + 1e-6)
    assert waited_s * gain**gap >= price_s * (1 - 1e-6)


@pytest.mark.parametrize("gain", [1.0, 2.0, 1000.0])
def test_a_head_that_has_gained_thousands_of_classes_is_weighed_like_any_other(gain: float) -> None:
    """Behind a short line a class is gained every quarter of a second; an hour is more than a float's exponent."""
    policy = Policy(ageing_floor_s=0.25, preempt_gain_factor=gain)
    policy.run(FakeRequest("v", 3, num_computed_tokens=160))
    head = policy.wait(FakeRequest("head", 0, num_tokens=320, queued_s=1.0), 1.0)
    assert policy.evict(1.0) == []
    assert policy.key(head, 3601.0)[0] < -10_000
    # Ten blocks would not do, twenty do.
    assert policy.evict(3601.0) == []
    policy.run(FakeRequest("w", 3, num_computed_tokens=160))
    assert policy.evict(3602.0) == ["v", "w"]


def test_the_wait_counts_from_when_the_head_was_blocked() -> None:
    """A new head starts its own wait, however long the one before it had stood there."""
    policy = Policy(preempt_class_gap_levels=1, preempt_gain_factor=2, ageing_floor_s=1e6)
    policy.run(FakeRequest("v", 1, num_computed_tokens=3200))
    policy.wait(FakeRequest("first", 0, num_tokens=320), 1.0)
    assert policy.evict(1.0) == policy.evict(2.0) == []
    policy.wait(FakeRequest("second", 0, num_tokens=320), 2.5)
    assert policy.evict(2.6) == policy.evict(4.0) == []
    assert policy.evict(4.3) == ["v"]


def test_the_wait_starts_anew_after_an_admission() -> None:
    """Admitted, preempted and back at the head: what it waited before it ran, and while it ran, is no rent."""
    policy = Policy(preempt_class_gap_levels=1, preempt_gain_factor=2, ageing_floor_s=1e6)
    policy.run(FakeRequest("v", 1, num_computed_tokens=3200))
    head = policy.wait(FakeRequest("head", 0, num_tokens=320), 1.0)
    assert policy.evict(1.0) == []
    policy.scheduler.free_blocks = 20
    assert policy.evict(1.1) == []
    policy.scheduler.free_blocks = 0
    policy.admit(head, 1.1)
    assert policy.evict(1.2) == []
    policy.preempt(head, 50.0)
    policy.wait(head, 50.0)
    assert policy.evict(50.0) == []


# afterwards

TIMES = st.lists(st.tuples(st.floats(0.01, 30), st.integers(0, 5).map(lambda n: 10**n)), max_size=15)


@settings(FAST, max_examples=300)
@given(early=TIMES, later=TIMES)
def test_a_victim_never_stands_before_the_one_it_made_room_for(
    early: list[tuple[float, int]], later: list[tuple[float, int]]
) -> None:
    """As long as that one waits, whatever the line does; keys are computed when they expire, as in the queue."""
    policy = Policy(ageing_floor_s=0.25, preempt_class_gap_levels=1, preempt_gain_factor=1000.0)
    victim = policy.run(FakeRequest("v", 3, num_computed_tokens=320))
    head = policy.wait(FakeRequest("head", 2, num_tokens=320, queued_s=1.0), 1.0)
    policy.evict(1.0)
    due = {head: policy.key(head, 1.0)[1]}
    classes: dict[FakeRequest, float] = {}
    now = 1.0
    for number, (wait_s, tokens) in enumerate([*early, (10.0, 1), *later]):
        now += wait_s
        if number == len(early):
            assert policy.evict(now) == ["v"]
            due[victim] = -1.0
        line = policy.line(tokens, now)
        for request in sorted(due, key=lambda r: due[r]):
            if due[request] <= now:
                classes[request], due[request] = policy.key(request, now)
        if victim in due:
            assert classes.get(head, 2) < classes[victim]
        policy.finish(line, now)
    # Once that one is in, it ages like any other.
    policy.admit(head, now)
    assert policy.key(victim, now + 1000.0)[0] < classes.get(head, 2) - 100
