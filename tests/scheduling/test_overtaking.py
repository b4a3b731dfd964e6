"""Guards each scheduling patch's bound on overtaking and holding: nobody is passed by later ones beyond it.

Streams of requests on real schedulers, synchronous and asynchronous, with cancellations, few seats and a pool that is
too small. Each patch is alone here: in a set the outermost order decides, and each bound holds within what that leaves.
Overtaken means: first admitted after one that came later. Not here: what happens after admission, and each patch's policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings

from patches.scheduling.deadlines import LATE_S
from tests.scheduling.overtaking import SEATS, STEP_S, STEP_TOKENS, STREAMS, Came, Stream, Watched, watch

BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
# One pass, and what a sum of steps loses to rounding.
SLACK_S = STEP_S + 1e-6

QOS = {
    "short_prompt_tokens": 200,
    "ageing_floor_s": 0.2,
    "victim_prompt_tokens": 0,
    "preempt_cooldown_s": 0.1,
}
MLFQ = {
    "level0_tokens": 64,
    "level1_tokens": 128,
    "level2_tokens": 256,
    "last_level_step_tokens": 64,
    "last_level_patience_s": 0.5,
    "wait_lift_s": 0.3,
}
WFQ = {"burst_tokens": 60, "room_patience_s": 0.0}
WATERMARK = {"short_prompt_tokens": 0, "patience_s": 0.3}
PREFILLBUDGET = {
    "long_prompt_tokens": 128,
    "short_prefill_tokens": 16,
    "least_tokens": 16,
    "late_turn_requests": 3,
}
RATELIMIT = {"burst_tokens": 128, "most_rate_tokens": 16, "least_rate_tokens": 4}
OVERLOAD = {
    "long_prompt_tokens": 128,
    "long_step_least_tokens": 16,
    "long_patience_s": 0.5,
    # A step takes 20 ms whatever is in it: too long for this, so long prompts have their budget and wait in line.
    "step_slo_share": 0.01,
    "step_slo_least_share": 0.01,
}


def qos(run: Watched) -> None:
    """While it waited less than so many of its ageing periods as the other's class was better, and had risen."""

    def arrived(one: Came) -> int:
        return one.sender.priority + (one.prompt_tokens >= QOS["short_prompt_tokens"])

    for made, one, later in run.overtakes():
        longest_s = 0.0
        for parts, until in run.keyed[one.name]:
            if until is not None:
                longest_s = max(longest_s, (until - one.queued_s) / (arrived(one) - parts[0] + 1))
        better = arrived(one) - arrived(later)
        risen = arrived(later) - made.keys[later.name][0]
        assert made.now_s - one.queued_s <= (better + risen) * longest_s + SLACK_S


def qos_at_the_floor(run: Watched) -> None:
    """With periods all alike: only by one that came within a period for each class between them."""
    qos(run)
    for _, one, later in run.overtakes():
        between = one.sender.priority - later.sender.priority + 1
        assert later.queued_s - one.queued_s <= between * QOS["ageing_floor_s"] + SLACK_S


def mlfq(run: Watched) -> None:
    """Only by better levels, within the time that lifts it to them; the last level while it is held as well."""

    def level(one: Came) -> int:
        return sum(one.prompt_tokens > bound for bound in (64, 128, 256))

    last_s, seen = run.passes[0].now_s, 0
    for made, one, later in run.overtakes():
        for before in run.passes[seen : made.number]:
            if any(level(run.came[name]) == 3 for name in (*before.admitted, *before.resumed)):
                last_s = before.now_s
        seen = made.number
        between = level(one) - level(later)
        assert between > 0
        if later.queued_s - one.queued_s > between * MLFQ["wait_lift_s"] + SLACK_S:
            assert level(one) == 3
            # Who is preempted computes its answer again as well.
            prefills = (*made.prefilling, *made.resumed, *made.admitted)
            busy = any(run.came[name].total_tokens > 256 for name in prefills)
            assert busy or made.now_s - last_s <= MLFQ["last_level_patience_s"] + SLACK_S


def edf(run: Watched) -> None:
    """In time it is passed by earlier deadlines only; and nobody waits for more than twice its promise."""
    for made, one, later in run.overtakes():
        late = made.keys[one.name][0] > LATE_S / 2 + one.queued_s
        assert late or later.queued_s + later.sender.slo_s <= one.queued_s + one.sender.slo_s + 1e-6
    for made in run.passes:
        for name in made.waiting:
            one = run.came[name]
            assert made.now_s - one.queued_s <= 2 * one.sender.slo_s + SLACK_S


def wfq(run: Watched) -> None:
    """While it waits no other tenant gets more per weight than its own, but for a burst and what is outstanding."""
    largest = sorted((one.total_tokens for one in run.came.values()), reverse=True)
    outstanding = STEP_TOKENS + sum(largest[:SEATS])
    had: dict[str, dict[str, float]] = {}
    for made in run.passes:
        for name in made.waiting:
            had.setdefault(name, {})
        for name, tokens in made.tokens.items():
            sender = run.came[name].sender
            for waiting in made.waiting:
                of = had[waiting]
                of[sender.name] = of.get(sender.name, 0.0) + tokens / sender.weight
        for name in made.waiting:
            own = run.came[name].sender
            for other, service in had[name].items():
                behind = service - had[name].get(own.name, 0.0)
                assert behind <= 2 * outstanding + WFQ["burst_tokens"], (name, other)


def watermark(run: Watched) -> None:
    """Who is first in line and held is passed by its own class and worse ones for the patience only."""
    since: dict[str, float] = {}
    for made, one, later in run.overtakes():
        if made.resuming or one.name != made.waiting[0]:
            continue
        first_s = since.setdefault(one.name, made.now_s)
        if (later.sender.priority, -later.sender.weight) >= (one.sender.priority, -one.sender.weight):
            assert made.now_s - first_s <= WATERMARK["patience_s"] + SLACK_S


def tenant(run: Watched) -> None:
    """Only while its tenant has something that runs; never by its own tenant's."""
    for made, one, later in run.overtakes():
        assert later.sender is not one.sender
        before = made.admitted[: made.admitted.index(later.name)]
        assert any(run.came[name].sender is one.sender for name in (*made.running, *made.resumed, *before))


def prefillbudget(run: Watched) -> None:
    """Long ones only, and by no more other long ones than the turns of those that are late allow."""
    long_from = PREFILLBUDGET["long_prompt_tokens"]
    before: dict[str, int] = {}
    for made in run.passes:
        for place, name in enumerate(made.waiting):
            earlier = made.waiting[:place]
            before.setdefault(name, sum(run.came[n].prompt_tokens >= long_from for n in earlier))
    passed = dict.fromkeys(run.came, 0)
    for _, one, later in run.overtakes():
        assert one.prompt_tokens >= long_from
        if later.prompt_tokens >= long_from:
            passed[one.name] += 1
            most = (before[one.name] + 1) * PREFILLBUDGET["late_turn_requests"]
            assert passed[one.name] <= most


def ratelimit(run: Watched) -> None:
    """Those that are limited only, by none that is as large and of its class."""
    for _, one, later in run.overtakes():
        assert one.prompt_tokens > RATELIMIT["burst_tokens"]
        assert later.sender.priority < one.sender.priority or later.prompt_tokens <= RATELIMIT["burst_tokens"]


def overload(run: Watched) -> None:
    """In time it is passed only if it is long, by others that are not, and for the patience."""
    long_from = OVERLOAD["long_prompt_tokens"]
    for made, one, later in run.overtakes():
        if made.keys[one.name][0] >= LATE_S:
            continue
        assert one.prompt_tokens >= long_from > later.prompt_tokens
        assert made.now_s - one.queued_s <= OVERLOAD["long_patience_s"] + SLACK_S


def admission(run: Watched) -> None:
    """By nobody."""
    assert not list(run.overtakes())


@dataclass(frozen=True)
class Law:
    """A patch, its knobs (small, so that small traffic meets them), and what must hold of any run."""

    patch: str
    holds: Callable[[Watched], None]
    knobs: dict[str, Any] = field(default_factory=dict)


LAWS = {
    "qos": Law("qos", qos, QOS),
    "qos_at_the_floor": Law("qos", qos_at_the_floor, QOS | {"ageing_backlog_factor": 0.0}),
    "mlfq": Law("mlfq", mlfq, MLFQ),
    "edf": Law("edf", edf),
    "wfq": Law("wfq", wfq, WFQ),
    "watermark": Law("watermark", watermark, WATERMARK),
    "tenant": Law("tenant", tenant),
    "prefillbudget": Law("prefillbudget", prefillbudget, PREFILLBUDGET),
    "ratelimit": Law("ratelimit", ratelimit, RATELIMIT),
    "overload": Law("overload", overload, OVERLOAD),
    "admission": Law("admission", admission),
}


@BOTH
@pytest.mark.parametrize("name", LAWS)
@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(streams=STREAMS)
def test_nobody_is_overtaken_beyond_the_bound(
    name: str, async_scheduling: bool, streams: list[Stream]
) -> None:
    law = LAWS[name]
    law.holds(watch(law.patch, {law.patch: law.knobs}, async_scheduling, streams))


# What takes each bound away (a knob of the patch, or another patch in its place), and traffic that shows it.
CONTROLS: dict[str, tuple[str, dict[str, Any], list[Stream]]] = {
    "qos_at_the_floor": (
        "qos",
        QOS | {"ageing_backlog_factor": 0.0, "ageing_floor_s": 1e6},
        [Stream(2, 17, 2, 12, 310, 21), Stream(2, 0, 4, 9, 36, 23, 30)],
    ),
    "mlfq": (
        "mlfq",
        MLFQ | {"wait_lift_s": 1e6},
        [Stream(2, 11, 5, 1, 54, 21), Stream(0, 11, 4, 28, 16, 19), Stream(2, 6, 4, 9, 393, 6)],
    ),
    "edf": ("edf", {"expire_slo_factor": 1e6}, [Stream(0, 2, 3, 27, 377, 9)]),
    "wfq": ("", {}, [Stream(0, 14, 4, 18, 4, 17), Stream(2, 29, 5, 3, 121, 17), Stream(2, 5, 3, 29, 281, 3)]),
    "watermark": (
        "watermark",
        WATERMARK | {"patience_s": 1e6},
        [Stream(1, 15, 2, 13, 27, 21, 12), Stream(1, 17, 2, 6, 238, 27, 24)],
    ),
    "tenant": ("mlfq", MLFQ, [Stream(2, 17, 2, 12, 310, 21), Stream(2, 0, 4, 9, 36, 23, 30)]),
    "prefillbudget": (
        "prefillbudget",
        PREFILLBUDGET | {"late_turn_requests": 10**6},
        [Stream(0, 16, 4, 19, 237, 19), Stream(1, 16, 5, 7, 29, 9), Stream(1, 11, 5, 14, 284, 6)],
    ),
    "ratelimit": (
        "mlfq",
        MLFQ,
        [Stream(1, 24, 1, 3, 358, 12, 2), Stream(2, 5, 5, 12, 137, 20), Stream(1, 30, 5, 13, 15, 17)],
    ),
    "overload": (
        "overload",
        OVERLOAD | {"long_patience_s": 1e6, "step_slo_share": 0.01, "step_slo_least_share": 0.01},
        [Stream(2, 0, 1, 10, 366, 1), Stream(0, 6, 1, 30, 27, 5)],
    ),
    "admission": ("mlfq", MLFQ, [Stream(2, 17, 2, 12, 310, 21), Stream(2, 0, 4, 9, 36, 23, 30)]),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_without_what_gives_it_the_bound_is_broken(name: str) -> None:
    """So the laws above can fail; with the patch as it is the same traffic keeps its law."""
    patch, knobs, streams = CONTROLS[name]
    law = LAWS[name]
    law.holds(watch(law.patch, {law.patch: law.knobs}, False, streams))
    with pytest.raises(AssertionError):
        law.holds(watch(patch, {patch: knobs} if patch else {}, False, streams))
