"""KeyedRequestQueue against a sorted list: order, agreement of peek and pop, conservation, gates, timers.

Guards the queue's own contract; that vLLM uses it as assumed is for test_seam_engine.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from patches.seam.queue import KeyedRequestQueue


@dataclass(eq=False)
class Stub:
    """All that the queue asks of a request."""

    number: int
    value: float
    num_tokens: int = 3
    period: float | None = None
    gate_of: set[int] = field(default_factory=set)


class World:
    """A clock, gates that can be opened and closed, and the key function."""

    def __init__(self, gates: int = 2) -> None:
        self.now = 0.0
        self.closed = [False] * gates
        self.asked = 0
        self.computed = 0
        self.queue = KeyedRequestQueue(
            self.key_of, lambda: self.now, tuple(self.gate(i) for i in range(gates))
        )

    def key_of(self, request: Stub, now: float) -> tuple[tuple[float, int], float | None]:
        """Ages by 1 each period, as a bucketed ageing patch would."""
        self.computed += 1
        if request.period is None:
            return (request.value, request.number), None
        periods = int(now / request.period)
        return (request.value - periods, request.number), (periods + 1) * request.period

    def gate(self, index: int) -> Any:
        """Refuses requests of this gate while it is closed."""

        def ask(request: Stub, now: float) -> str | None:
            self.asked += 1
            return "no" if self.closed[index] and index in request.gate_of else None

        return ask


class QueueMachine(RuleBasedStateMachine):
    """Random use, compared with what a sorted list would do."""

    @initialize()
    def start(self) -> None:
        self.world = World()
        self.queue = self.world.queue
        self.model: list[Stub] = []
        self.skipped: list[Stub] = []
        self.keys: dict[Stub, tuple[float, int]] = {}
        self.number = 0

    def passes(self, request: Stub) -> bool:
        return not any(self.world.closed[i] for i in request.gate_of)

    @rule(
        value=st.integers(-5, 5),
        period=st.sampled_from([None, None, 1.5, 4.0]),
        gate_of=st.sets(st.integers(0, 1)),
        back=st.booleans(),
    )
    def add(self, value: int, period: float | None, gate_of: set[int], back: bool) -> None:
        self.number += 1
        request = Stub(self.number, value, period=period, gate_of=gate_of)
        (self.queue.prepend_request if back else self.queue.add_request)(request)
        self.model.append(request)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), many=st.booleans())
    def remove(self, data: st.DataObject, many: bool) -> None:
        if many:
            gone = data.draw(st.lists(st.sampled_from(self.model), unique_by=id))
            self.queue.remove_requests(gone)
        else:
            gone = [data.draw(st.sampled_from(self.model))]
            self.queue.remove_request(gone[0])
            with pytest.raises(ValueError):
                self.queue.remove_request(gone[0])
        self.model = [r for r in self.model if r not in gone]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), value=st.integers(-9, 9))
    def rekey(self, data: st.DataObject, value: int) -> None:
        request = data.draw(st.sampled_from(self.model))
        request.value = value
        self.queue.rekey(request)

    @rule(by=st.sampled_from([0.0, 0.5, 1.5, 7.0]), closed=st.tuples(st.booleans(), st.booleans()))
    def step(self, by: float, closed: tuple[bool, bool]) -> None:
        """A new step: what the scan skipped comes back first, then time and gates move on."""
        self.queue.prepend_requests(self.skipped)
        self.model += self.skipped
        self.skipped = []
        self.world.now += by
        self.world.closed = list(closed)
        self.queue.begin_step(self.world.now)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.model:
            self.queue.release(data.draw(st.sampled_from(self.model)))

    @rule(skip=st.booleans())
    def take(self, skip: bool) -> None:
        """Peek and pop agree, and no request that every gate lets pass has a better key than the one offered,
        unless it is held behind one that its gate still refuses."""
        if not self.queue:
            with pytest.raises(IndexError):
                self.queue.peek_request()
            with pytest.raises(IndexError):
                self.queue.pop_request()
            assert all(self.queue.reason(r) for r in self.model)
            return
        peeked = self.queue.peek_request()
        popped = self.queue.pop_request()
        assert peeked is popped
        assert popped in self.model
        assert self.passes(popped)
        order = [r for r in self.queue if not self.queue.reason(r) and self.passes(r)]
        if order:
            assert self.key(popped) < self.key(order[0])
        self.model.remove(popped)
        if skip:
            self.skipped.append(popped)

    def key(self, request: Stub) -> tuple[float, int]:
        if request.period is None:
            return (request.value, request.number)
        return (request.value - int(self.world.now / request.period), request.number)

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert len(self.queue) == len(self.model)
        assert {id(r) for r in self.queue} == {id(r) for r in self.model}
        assert self.queue.tokens == 3 * len(self.model)
        assert self.queue.held == sum(1 for r in self.model if self.queue.reason(r))
        reasons = Counter(self.queue.reason(r) for r in self.model if self.queue.reason(r))
        by_reason = Counter[str]()
        for (_, reason), count in self.queue.held_by.items():
            by_reason[reason] += count
        assert by_reason == reasons
        assert all(self.queue.held_by.values())

    @invariant()
    def ordered(self) -> None:
        if hasattr(self, "queue"):
            keys = [self.key(r) for r in self.queue]
            assert keys == sorted(keys)


QueueMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestQueueMachine = QueueMachine.TestCase


def test_skipped_request_keeps_the_key_that_it_had() -> None:
    world = World(gates=0)
    first, second = Stub(1, 0.0), Stub(2, 1.0)
    world.queue.add_request(first)
    world.queue.add_request(second)
    assert world.queue.pop_request() is first
    computed = world.computed
    first.value = 99.0
    world.queue.prepend_requests([first])
    assert world.computed == computed
    assert world.queue.peek_request() is first


def test_nothing_is_recomputed_while_no_key_expires() -> None:
    world = World(gates=0)
    for i in range(1000):
        world.queue.add_request(Stub(i, float(i % 7), period=100.0))
    computed = world.computed
    for _ in range(50):
        world.now += 1.0
        world.queue.begin_step(world.now)
        world.queue.peek_request()
    assert world.computed == computed == 1000
    assert world.queue.next_due() == 100.0


def test_expired_key_that_repeats_its_own_boundary_does_not_loop() -> None:
    queue = KeyedRequestQueue(lambda request, now: ((request.number,), 5.0), lambda: 0.0)
    queue.add_request(Stub(1, 0.0))
    for step in range(5):
        queue.begin_step(5.0 + step)
    assert queue.pop_request().number == 1


def test_heaps_stay_in_proportion_to_what_is_queued() -> None:
    world = World(gates=1)
    keep = [Stub(i, float(i), period=0.5) for i in range(10)]
    for request in keep:
        world.queue.add_request(request)
    for i in range(5000):
        request = Stub(100 + i, 0.0)
        world.queue.add_request(request)
        world.queue.remove_request(request)
        world.queue.rekey(keep[i % 10])
    inside = vars(world.queue)
    assert sum(len(heap) for heap in inside["_heaps"]) < 200
    assert len(inside["_timers"]) < 200


def test_a_gate_asks_only_the_best_of_those_that_it_holds() -> None:
    world = World(gates=1)
    world.closed[0] = True
    for i in range(500):
        world.queue.add_request(Stub(i, 0.0, gate_of={0}))
    world.queue.begin_step(0.0)
    assert not world.queue
    assert world.queue.held == 500
    world.asked = 0
    for step in range(100):
        world.queue.begin_step(float(step))
        assert not world.queue
    assert world.asked == 100


def test_queue_without_gates_frees_what_was_held() -> None:
    world = World(gates=1)
    world.closed[0] = True
    world.queue.add_request(Stub(1, 0.0, gate_of={0}))
    assert not world.queue
    world.queue.drop_gates()
    assert world.queue.pop_request().number == 1
