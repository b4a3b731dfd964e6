"""A choice among the first few of the queue: it is offered what it should be, and the queue stays a queue.

Guards the seam `prefer` in both queues, whatever the choice; what `cacheaware` chooses is for its own tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from patches.seam.queue import KeyedRequestQueue
from patches.seam.tenant_queue import TenantQueue
from patches.seam.window import OFFERED, Choice


@dataclass(eq=False)
class Stub:
    """All that the queue asks of a request."""

    number: int
    level: int
    tenant: str = "a"
    gated: bool = False
    num_tokens: int = 3


class Desk:
    """A queue whose first requests are offered to a choice that follows no rule."""

    def __init__(self, by_tenant: bool) -> None:
        self.closed = False
        self.offered: list[Stub] | None = None
        self.seed = 1
        choice = Choice(self.prefer, lambda key: key[0])
        args: Any = (lambda r, now: ((r.level, r.number), None), lambda: 0.0, (self.gate,), (), (), choice)
        self.ranks = {"a": 0.0, "b": 0.0}
        self.queue: KeyedRequestQueue = (
            TenantQueue(*args, tenant_of=lambda r: r.tenant, rank=lambda tenant, now: self.ranks[tenant])
            if by_tenant
            else KeyedRequestQueue(*args)
        )

    def prefer(self, requests: Sequence[Stub], now: float) -> int:
        self.offered = list(requests)
        self.seed = self.seed * 48271 % 2147483647
        return self.seed % len(requests)

    def gate(self, request: Stub, now: float) -> str | None:
        return "no" if self.closed and request.gated else None


class ChoiceMachine(RuleBasedStateMachine):
    """Random use: what is offered is the head of what a sorted list would hold."""

    by_tenant = False

    @initialize()
    def start(self) -> None:
        self.desk = Desk(self.by_tenant)
        self.queue = self.desk.queue
        self.waiting: list[Stub] = []
        self.skipped: list[Stub] = []
        self.number = 0

    @rule(
        level=st.integers(0, 2),
        tenant=st.sampled_from("ab"),
        gated=st.booleans(),
        many=st.sampled_from([1, 1, 7, 150]),
    )
    def add(self, level: int, tenant: str, gated: bool, many: int) -> None:
        for _ in range(many):
            self.number += 1
            request = Stub(self.number, level, tenant, gated and self.number % 3 == 0)
            self.queue.add_request(request)
            self.waiting.append(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), level=st.one_of(st.none(), st.integers(0, 2)))
    def remove_or_rekey(self, data: st.DataObject, level: int | None) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        if level is None:
            self.queue.remove_request(request)
            self.waiting.remove(request)
        else:
            request.level = level
            self.queue.rekey(request)

    @rule(closed=st.booleans(), first=st.sampled_from("ab"))
    def step(self, closed: bool, first: str) -> None:
        self.queue.prepend_requests(self.skipped)
        self.waiting += self.skipped
        self.skipped = []
        self.desk.closed = closed
        for tenant in self.desk.ranks:
            self.desk.ranks[tenant] = float(tenant != first)
            self.queue.rerank(tenant)
        self.queue.begin_step(0.0)

    @rule(picks=st.integers(1, 40), skip=st.booleans())
    def take(self, picks: int, skip: bool) -> None:
        for _ in range(picks):
            self.desk.offered = None
            self.queue.begin_step(0.0)
            if not self.queue:
                assert all(self.queue.reason(request) for request in self.waiting)
                return
            peeked = self.queue.peek_request()
            ready = [r for r in self.waiting if not self.queue.reason(r)]
            offered = self.desk.offered
            assert self.queue.pop_request() is peeked
            self.waiting.remove(peeked)
            if skip:
                self.skipped.append(peeked)
            if offered is None or peeked not in offered:
                # One that its gate held and lets pass now is not put to the choice.
                assert peeked.gated
                continue
            if self.by_tenant:
                ready = [r for r in ready if r.tenant == peeked.tenant]
            level = min(r.level for r in ready)
            due = sorted((r for r in ready if r.level == level), key=lambda r: r.number)
            assert offered == due[: len(offered)]
            assert OFFERED >= len(offered) >= min(len(due), OFFERED // 2)

    @invariant()
    def nobody_is_lost(self) -> None:
        if hasattr(self, "queue"):
            assert len(self.queue) == len(self.waiting)
            assert set(self.queue) == set(self.waiting)


class TenantChoiceMachine(ChoiceMachine):
    """The same, tenant by tenant."""

    by_tenant = True


TestChoice = ChoiceMachine.TestCase
TestTenantChoice = TenantChoiceMachine.TestCase
TestChoice.settings = TestTenantChoice.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, derandomize=True, database=None
)


@pytest.mark.parametrize("by_tenant", [False, True])
def test_nobody_is_asked_while_no_pick_can_come_of_it(by_tenant: bool) -> None:
    desk = Desk(by_tenant)
    seats = 0
    assert desk.queue._choice is not None
    desk.queue._choice.useful = lambda: seats > 0
    for number in range(5):
        desk.queue.add_request(Stub(number, 0))
    desk.queue.begin_step(0.0)
    assert desk.queue and desk.queue.peek_request().number == 0
    assert desk.offered is None
    seats = 1
    desk.queue.begin_step(0.0)
    assert desk.queue and desk.offered is not None and len(desk.offered) == 5


class Counted(int):
    """A number that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: Any) -> bool:
        Counted.compared += 1
        return int.__lt__(self, other)

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return int.__eq__(self, other)

    __hash__ = int.__hash__


@pytest.mark.parametrize("waiting", [1_000, 30_000])
def test_a_pick_costs_no_more_in_a_long_queue(waiting: int) -> None:
    """Comparisons of keys for each pick, arrivals in between, are bounded whatever the length."""
    seen = 0

    def prefer(requests: Sequence[Stub], now: float) -> int:
        nonlocal seen
        seen = max(seen, len(requests))
        return len(requests) // 2

    queue = KeyedRequestQueue(
        lambda r, now: ((r.level, Counted(r.number)), None),
        lambda: 0.0,
        choice=Choice(prefer, lambda key: key[0]),
    )
    for number in range(waiting):
        queue.add_request(Stub(number, 0))
    Counted.compared = 0
    for number in range(300):
        queue.begin_step(0.0)
        queue.pop_request()
        queue.add_request(Stub(waiting + number, 0))
    assert seen <= OFFERED
    assert Counted.compared / 300 < 250
