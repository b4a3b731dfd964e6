"""TenantQueue against a model: tenants by rank, then requests by key; held and asked tenant by tenant.

Also the seam `tenant_rank` on real Schedulers, with a toy that takes turns. Not here: the flat queue's
contract (test_seam_queue), and whether a policy's ranks are fair (tests of the patches).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from patches.seam import adapter
from patches.seam.plan import resolve
from patches.seam.runtime import RUNTIME_ATTR
from patches.seam.tenant_queue import TenantLine, TenantQueue
from tests.drive import make_config, make_request, make_scheduler, run_to_end
from tests.scheduling.clocked import prompt

BOTH = pytest.mark.parametrize("async_scheduling", [False, True])
TURNS = "tests.seam.toys.turns"
TENANTS = "abcd"


@dataclass(eq=False)
class Stub:
    """All that the queue asks of a request."""

    number: int
    tenant: str
    value: float = 0.0
    num_tokens: int = 3
    gate_of: set[int] = field(default_factory=set)


class World:
    """Ranks that a test sets, gates that it opens and closes, and what was asked and told."""

    def __init__(self, gates: int = 2) -> None:
        self.now = 0.0
        self.closed = [False] * gates
        self.ranks: dict[str, float] = {}
        self.asked: list[Stub] = []
        self.ranked = 0
        self.picked: list[Stub] = []
        self.put_back: list[Stub] = []
        self.queue = TenantQueue(
            lambda request, now: ((request.value, request.number), None),
            lambda: self.now,
            tuple(self.gate(i) for i in range(gates)),
            (lambda request, now: self.picked.append(request),),
            (lambda request, now: self.put_back.append(request),),
            tenant_of=lambda request: request.tenant,
            rank=self.rank,
        )

    def rank(self, tenant: str, now: float) -> float:
        """What the test says; 0 for a tenant that it does not speak of."""
        self.ranked += 1
        return self.ranks.get(tenant, 0.0)

    def gate(self, index: int) -> Any:
        """Refuses requests of this gate while it is closed."""

        def ask(request: Stub, now: float) -> str | None:
            self.asked.append(request)
            return "no" if self.closed[index] and index in request.gate_of else None

        return ask


class TenantMachine(RuleBasedStateMachine):
    """Random use, compared with what sorting would do."""

    @initialize()
    def start(self) -> None:
        self.world = World()
        self.queue = self.world.queue
        self.model: list[Stub] = []
        self.skipped: list[Stub] = []
        self.number = 0

    def passes(self, request: Stub) -> bool:
        return not any(self.world.closed[i] for i in request.gate_of)

    def place(self, request: Stub) -> tuple[float, float, int]:
        return self.world.ranks.get(request.tenant, 0.0), request.value, request.number

    @rule(
        tenant=st.sampled_from(TENANTS),
        value=st.integers(-3, 3),
        gate_of=st.sets(st.integers(0, 1)),
        back=st.booleans(),
    )
    def add(self, tenant: str, value: int, gate_of: set[int], back: bool) -> None:
        self.number += 1
        request = Stub(self.number, tenant, value, gate_of=gate_of)
        (self.queue.prepend_request if back else self.queue.add_request)(request)
        self.model.append(request)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = data.draw(st.lists(st.sampled_from(self.model), unique_by=id))
        self.queue.remove_requests(gone)
        self.model = [r for r in self.model if r not in gone]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), value=st.integers(-9, 9))
    def rekey(self, data: st.DataObject, value: int) -> None:
        request = data.draw(st.sampled_from(self.model))
        request.value = value
        self.queue.rekey(request)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.queue.release(data.draw(st.sampled_from(self.model)))

    @rule(tenant=st.sampled_from(TENANTS), by=st.sampled_from([1.0, 2.5]))
    def rank_rises(self, tenant: str, by: float) -> None:
        """Nobody is told; between two picks it may not happen to a head that was named already."""
        self.world.ranks[tenant] = self.world.ranks.get(tenant, 0.0) + by
        self.queue.begin_step(self.world.now)
        self.skipped = []

    @rule(tenant=st.sampled_from(TENANTS), by=st.sampled_from([1.0, 2.5]))
    def rank_falls(self, tenant: str, by: float) -> None:
        self.world.ranks[tenant] = self.world.ranks.get(tenant, 0.0) - by
        self.queue.rerank(tenant)

    @rule(closed=st.tuples(st.booleans(), st.booleans()))
    def step(self, closed: tuple[bool, bool]) -> None:
        told = len(self.world.put_back)
        self.queue.prepend_requests(self.skipped)
        assert self.world.put_back[told:] == self.skipped
        self.model += self.skipped
        self.skipped = []
        self.world.now += 1.0
        self.world.closed = list(closed)
        self.queue.begin_step(self.world.now)

    @rule(skip=st.booleans())
    def take(self, skip: bool) -> None:
        """Peek and pop agree; what they offer passes, and nobody who may be offered has a better place."""
        if not self.queue:
            with pytest.raises(IndexError):
                self.queue.peek_request()
            with pytest.raises(IndexError):
                self.queue.pop_request()
            assert all(self.queue.reason(r) for r in self.model)
            return
        peeked = self.queue.peek_request()
        assert self.queue.pop_request() is peeked
        assert self.world.picked[-1] is peeked
        assert peeked in self.model
        assert self.passes(peeked)
        for request in self.model:
            if self.passes(request) and not self.queue.reason(request):
                assert self.place(peeked) <= self.place(request)
        self.model.remove(peeked)
        if skip:
            self.skipped.append(peeked)

    @rule(most=st.integers(1, 5))
    def look_at_lines(self, most: int) -> None:
        """Tenants with something ready, by rank and best request; looking changes nothing."""
        before = list(self.queue)
        lines = self.queue.lines(most)
        ready: dict[str, list[Stub]] = {}
        for request in self.model:
            if not self.queue.reason(request):
                ready.setdefault(request.tenant, []).append(request)
        assert len(lines) == min(most, len(ready)) or len(ready) > most
        for line in lines:
            assert line == TenantLine(line.tenant, len(ready[line.tenant]), 3 * len(ready[line.tenant]))
            assert self.queue.line(line.tenant) == line
        ranks = [self.world.ranks.get(line.tenant, 0.0) for line in lines]
        assert ranks == sorted(ranks)
        assert list(self.queue) == before

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert len(self.queue) == len(self.model)
        assert list(self.queue) == sorted(self.model, key=self.place)
        assert self.queue.tokens == 3 * len(self.model)
        assert self.queue.held == sum(1 for r in self.model if self.queue.reason(r))
        reasons = Counter(self.queue.reason(r) for r in self.model if self.queue.reason(r))
        by_reason = Counter[str]()
        for (_, reason), count in self.queue.held_by.items():
            by_reason[reason] += count
        assert by_reason == reasons
        assert all(self.queue.held_by.values())


TenantMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestTenantMachine = TenantMachine.TestCase


def test_a_pick_does_not_ask_for_every_tenants_rank() -> None:
    world = World(gates=0)
    for i in range(20_000):
        world.queue.add_request(Stub(i, f"t{i % 10_000}"))
    served: dict[str, int] = {}
    world.queue.begin_step(0.0)
    world.ranked = 0
    for _ in range(3000):
        tenant = world.queue.pop_request().tenant
        served[tenant] = served.get(tenant, 0) + 1
        world.ranks[tenant] = world.ranks.get(tenant, 0.0) + 1.0
    assert max(served.values()) == 1
    assert world.ranked <= 3 * 3000


def test_a_refusal_shuts_one_tenant_only_and_is_repeated_once_a_step() -> None:
    world = World(gates=1)
    for i in range(100):
        world.queue.add_request(Stub(i, "held", gate_of={0}))
    world.queue.add_request(Stub(100, "other", gate_of={0}))
    world.closed[0] = True
    world.queue.begin_step(0.0)
    assert not world.queue
    world.asked.clear()
    for step in range(10):
        world.queue.begin_step(float(step))
        assert not world.queue
    assert [r.number for r in world.asked] == [0, 100] * 10


def by_tenant() -> World:
    """Two tenants with 100 requests each and a gate that answers by tenant: a is refused while it is closed."""
    world = World(gates=1)
    world.queue = TenantQueue(
        lambda request, now: ((request.value, request.number), None),
        lambda: world.now,
        (world.gate(0),),
        tenant_of=lambda request: request.tenant,
        rank=world.rank,
        by_tenant=(True,),
    )
    for i in range(200):
        world.queue.add_request(Stub(i, "ab"[i % 2], gate_of={0} if i % 2 == 0 else set()))
    world.closed[0] = True
    return world


def test_a_gate_that_answers_by_tenant_is_asked_once_a_step_for_a_whole_line() -> None:
    world = by_tenant()
    for step in range(5):
        world.queue.begin_step(float(step))
        assert world.queue.pop_request().tenant == "b"
        assert world.queue.held == 1
        assert world.queue.line("a").requests == 0
        assert [line.tenant for line in world.queue.lines(9)] == ["b"]
    # One of a, one of b.
    assert len(world.asked) == 10
    # Open again, all of a are there, in order, those of b between them.
    world.closed[0] = False
    world.queue.begin_step(5.0)
    assert [world.queue.pop_request().number for _ in range(10)] == [0, 2, 4, 6, 8, 10, 11, 12, 13, 14]
    assert world.queue.held == 0


def test_a_line_that_was_not_asked_again_counts_again() -> None:
    world = by_tenant()
    world.queue.begin_step(0.0)
    assert world.queue.pop_request().tenant == "b"
    world.queue.begin_step(1.0)
    assert world.queue.line("a").requests == 0
    world.queue.begin_step(2.0)
    # All but the one that was asked and is held.
    assert world.queue.line("a").requests == 99


def test_of_many_held_tenants_each_is_asked_in_turn() -> None:
    world = World(gates=1)
    world.closed[0] = True
    for i in range(200):
        world.queue.add_request(Stub(i, f"t{i}", gate_of={0}))
    world.queue.begin_step(0.0)
    assert not world.queue
    world.asked.clear()
    for step in range(4):
        before = len(world.asked)
        world.queue.begin_step(float(step))
        assert not world.queue
        assert len(world.asked) - before <= 64
    assert {r.number for r in world.asked} == set(range(200))


def test_heaps_stay_in_proportion_to_what_is_queued() -> None:
    world = World(gates=1)
    keep = [Stub(i, f"k{i}") for i in range(10)]
    for request in keep:
        world.queue.add_request(request)
    for i in range(5000):
        request = Stub(100 + i, f"t{i % 7}", -1.0)
        world.queue.add_request(request)
        world.queue.rekey(keep[i % 10])
        world.queue.rerank(f"k{i % 10}")
        world.queue.remove_request(request)
    inside: Any = world.queue
    assert len(inside._order) < 200
    assert set(inside._lanes) == {f"k{i}" for i in range(10)}
    assert sum(len(heap) for lane in inside._lanes.values() for heap in lane.heaps) < 400


def test_queue_without_gates_frees_what_was_held() -> None:
    world = World(gates=1)
    world.closed[0] = True
    world.queue.add_request(Stub(1, "a", gate_of={0}))
    assert not world.queue
    world.queue.drop_gates()
    assert world.queue.pop_request().number == 1


# on real Schedulers


@BOTH
def test_admissions_of_one_pass_go_to_different_tenants(async_scheduling: bool) -> None:
    config = make_config(async_scheduling=async_scheduling)
    installation = adapter.install(resolve(TURNS))
    try:
        requests = [
            make_request(config, f"{tenant}{i}", prompt(10 * n + i, 20), max_tokens=2, tenant=tenant)
            for n, tenant in enumerate("abc")
            for i in range(3)
        ]
        trace = run_to_end(make_scheduler(config, 200), requests)
    finally:
        installation.undo()
    assert trace.order() == [f"{tenant}{i}" for i in range(3) for tenant in "abc"]
    assert {trace.first_step[name] for name in trace.order()} == {0}
    assert installation.tallies["turns"].by_hook["tenant_rank"] >= 9


def test_rank_orders_running_prefills_and_victims_before_the_key_does() -> None:
    config = make_config(max_num_batched_tokens=256)
    installation = adapter.install(resolve(TURNS))
    try:
        scheduler = make_scheduler(config, 400)
        requests = [
            make_request(config, name, prompt(i, 100), max_tokens=8, tenant=name[0])
            for i, name in enumerate(["a0", "b0", "a1"])
        ]
        for request in requests:
            scheduler.add_request(request)
        scheduler.schedule()
        runtime = scheduler.__dict__[RUNTIME_ATTR]
        # Tenant a was picked twice, b once.
        assert runtime.tenant_rank("a", 0.0) == 2.0
        place = runtime.running_order.place_key()
        assert sorted(scheduler.running, key=place)[0].request_id == "b0"
        assert max(scheduler.running, key=runtime.running_order.badness).request_id == "a1"
    finally:
        installation.undo()


def test_lines_need_a_queue_that_keeps_tenants_apart() -> None:
    from patches.seam.kinds import HookError

    installation = adapter.install(resolve("tests.seam.toys.reverse"))
    try:
        runtime = make_scheduler(make_config(), 100).__dict__[RUNTIME_ATTR]
        with pytest.raises(HookError, match="by_tenant"):
            runtime.tenant_queue()
    finally:
        installation.undo()
