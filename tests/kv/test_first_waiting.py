"""Looking ahead in the waiting queue: `first_waiting` on our queues and on vLLM's own, and when it says "as before".

Guards the order, that nothing is changed by looking, and that no change goes unnoticed. Not here: what is done with it.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from patches.seam.queue import KeyedRequestQueue, in_order
from patches.seam.runtime import RUNTIME_ATTR
from patches.seam.tenant_queue import TenantQueue
from tests.drive import make_config, make_request, make_scheduler
from tests.scheduling.clocked import patched, prompt


class Stub:
    """All that a queue asks of a request."""

    num_tokens = 3

    def __init__(self, number: int, value: float, tenant: str = "") -> None:
        self.number, self.value, self.tenant = number, value, tenant
        self.gated = False

    def __repr__(self) -> str:
        return f"{self.tenant}{self.number}"


def key_of(request: Stub, now: float) -> tuple[tuple[float, int], None]:
    return (request.value, request.number), None


def gate(request: Stub, now: float) -> str | None:
    return "no" if request.gated else None


def drain(queue: Any) -> list[Any]:
    """Everything that the queue offers, in its order."""
    out = []
    while queue:
        out.append(queue.pop_request())
    return out


def test_the_items_of_a_heap_in_order_and_no_more_than_asked() -> None:
    rng = random.Random(1)
    import heapq

    heap = [(rng.random(),) for _ in range(500)]
    heapq.heapify(heap)
    before = list(heap)
    assert list(in_order(heap, 40)) == sorted(heap)[:40]
    assert heap == before
    assert list(in_order([], 3)) == list(in_order(heap, 0)) == []


@pytest.mark.parametrize("seed", range(20))
def test_first_is_what_would_be_offered_and_changes_tell_when_it_may_be_another(seed: int) -> None:
    rng = random.Random(seed)
    queue = KeyedRequestQueue(key_of, lambda: 0.0, (gate,))
    inside: list[Stub] = []
    most = rng.choice([1, 3, 8])
    known: list[Any] | None = None
    seen = -1
    unchanged = 0
    for number in range(400):
        what = rng.randrange(4)
        if what < 2 or not inside:
            inside.append(Stub(number, rng.randint(0, 20)))
            queue.add_request(inside[-1])
        elif what == 2:
            queue.remove_request(inside.pop(rng.randrange(len(inside))))
        else:
            request = rng.choice(inside)
            request.value = rng.randint(0, 20)
            queue.rekey(request)
        if known is not None and queue.changes == seen:
            unchanged += 1
            assert queue.first(most) == known
        known, seen = queue.first(most), queue.changes
        assert known == sorted(inside, key=lambda r: (r.value, r.number))[:most]
    assert unchanged > 20, "what happens behind the first ones must not count as a change"
    assert queue.first(2 * most) == sorted(inside, key=lambda r: (r.value, r.number))[: 2 * most]
    expected = queue.first(1000)
    assert drain(queue) == expected == sorted(inside, key=lambda r: (r.value, r.number))


def test_held_requests_are_left_out_and_gates_not_asked() -> None:
    queue = KeyedRequestQueue(key_of, lambda: 0.0, (gate,))
    requests = [Stub(i, i) for i in range(4)]
    requests[0].gated = requests[2].gated = True
    for request in requests:
        queue.add_request(request)
    assert queue.first(9) == requests, "not known to be held yet"
    assert queue.peek_request() is requests[1]
    seen = queue.changes
    assert queue.first(9) == requests[1:]
    queue.pop_request()
    assert queue.changes != seen
    assert queue.peek_request() is requests[3]
    assert queue.first(9) == [requests[3]]
    requests[0].gated = False
    queue.release(requests[0])
    assert queue.first(9) == [requests[0], requests[3]]


@pytest.mark.parametrize("seed", range(10))
def test_tenants_without_ranks_are_one_queue_and_with_ranks_take_turns(seed: int) -> None:
    rng = random.Random(seed)
    ranks = {"a": 0.0, "b": 0.0, "c": 0.0}
    queue = TenantQueue(
        key_of,
        lambda: 0.0,
        tenant_of=lambda request: request.tenant,
        rank=lambda tenant, now: ranks[tenant],
    )
    inside = [Stub(i, rng.randint(0, 9), rng.choice("abc")) for i in range(40)]
    for request in inside:
        queue.add_request(request)
    in_key_order = sorted(inside, key=lambda r: (r.value, r.number))
    assert queue.first(12) == in_key_order[:12]
    ranks.update(a=2.0, b=1.0, c=3.0)
    queue.rerank("b")
    by = {tenant: [r for r in in_key_order if r.tenant == tenant] for tenant in "bac"}
    turns = [line[i] for i in range(40) for line in by.values() if i < len(line)]
    assert queue.first(12) == turns[:12]
    assert queue.first(100) == turns
    seen = queue.changes
    queue.begin_step(0.0)
    assert queue.changes != seen, "ranks may have moved"
    assert len(drain(queue)) == 40


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_vllms_own_queues_are_looked_into_as_well(policy: str) -> None:
    config = make_config(policy=policy)
    with patched("shield"):
        scheduler = make_scheduler(config, 50)
        runtime = scheduler.__dict__[RUNTIME_ATTR]
        assert runtime.first_waiting(3) == []
        seen = runtime.waiting_changes()
        requests = [
            make_request(config, f"r{i}", prompt(i, 20), priority=(7 * i) % 5, arrival_time=float(i))
            for i in range(12)
        ]
        for request in requests:
            scheduler.add_request(request)
        assert runtime.waiting_changes() != seen
        by = (lambda r: r.priority) if policy == "priority" else (lambda r: 0)
        ordered = sorted(requests, key=by)
        assert runtime.first_waiting(5) == ordered[:5]
        assert runtime.first_waiting(99) == ordered
        seen = runtime.waiting_changes()
        assert runtime.waiting_changes() == seen


def test_two_who_look_ahead_are_both_told_of_changes() -> None:
    queue = KeyedRequestQueue(key_of, lambda: 0.0)
    requests = [Stub(i, float(i)) for i in range(20)]
    for request in requests:
        queue.add_request(request)
    assert queue.first(0) == []
    assert queue.first(10) == requests[:10]
    assert queue.first(2) == requests[:2]
    before = queue.changes
    queue.remove_request(requests[15])
    assert queue.changes == before, "beyond what anybody looks at"
    queue.remove_request(requests[7])
    assert queue.changes != before, "the one who looks less far asked last"
    assert queue.first(10) == [*requests[:7], *requests[8:11]]
