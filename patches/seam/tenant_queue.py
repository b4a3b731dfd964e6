"""The waiting queue as a queue of tenants around queues: who is served next is decided first, what of theirs then."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

from patches.seam.queue import (
    _DEAD,
    _READY,
    Gate,
    Key,
    KeyedRequestQueue,
    KeyOf,
    Notice,
    _Entry,
    _Item,
    in_order,
)
from patches.seam.window import Choice, Window

# Tenants whose held requests get another chance in one step. Of more than that, the longest unasked go first.
_REOPENED_PER_STEP = 64


# Before any step, and before the step before that.
_NEVER = -2


class TenantLine(NamedTuple):
    """What a tenant has waiting that no gate holds."""

    tenant: str
    requests: int
    tokens: int


class _Lane:
    """One tenant's waiting requests: a heap of ready ones, then one for each gate's held ones."""

    __slots__ = (
        "closed",
        "heaps",
        "key",
        "live",
        "ready",
        "ready_tokens",
        "refused_at",
        "reopen",
        "stamp",
        "tenant",
        "window",
    )

    def __init__(self, tenant: str, heaps: int) -> None:
        self.tenant = tenant
        self.heaps: list[list[_Item]] = [[] for _ in range(heaps)]
        self.closed = [False] * heaps
        self.live = self.ready = self.ready_tokens = 0
        # Its place among the tenants: the key of its best request when it was put there.
        self.key: Key = ()
        self.stamp = _DEAD
        # The step in which the whole of it was refused, unless it passed since.
        self.refused_at = _NEVER
        # Whether some heap was closed and is to be opened again.
        self.reopen = False
        self.window = Window()

    def best(self) -> _Entry | None:
        """Its next request to ask the gates for; None if all were refused in this step."""
        best: _Item | None = None
        for heap, closed in zip(self.heaps, self.closed, strict=True):
            while heap and heap[0][2].stamp != heap[0][1]:
                heapq.heappop(heap)
            if heap and not closed and (best is None or heap[0] < best):
                best = heap[0]
        return None if best is None else best[2]


_Place = tuple[float, Key, int, _Lane]


def live_requests(heap: Sequence[_Item], most: int) -> Iterator[tuple[Key, Any]]:
    """Key and request of the first live items of a heap; fewer than `most` if they are under many that are not."""
    for key, stamp, entry in in_order(heap, 64 + 4 * most):
        if entry.stamp == stamp:
            yield key, entry.request


class TenantQueue(KeyedRequestQueue):
    """Requests in order of (their tenant's rank now, key); gates hold and are asked tenant by tenant.

    Args:
        tenant_of: the tenant of a request, which never changes.
        by_tenant: for each gate whether it answers by tenant. Its refusal then shuts the tenant's whole line for
            the step: only the one that was asked counts as held, and the others are not asked one by one.
        rank: (tenant, now) -> rank, smaller first. It may rise at any time, which is noticed when the
            tenant comes to the head; a fall must be told by `rerank`.

    A pick costs O(log tenants + log requests of the tenant), however many tenants wait. The best
    request that a gate holds of each tenant is asked again in each step, for at most 64 tenants; once more
    if nobody is left to offer and the gates held somebody new in this step.
    """

    def __init__(
        self,
        key_of: KeyOf,
        clock: Callable[[], float],
        gates: tuple[Gate, ...] = (),
        on_pick: tuple[Notice, ...] = (),
        on_put_back: tuple[Notice, ...] = (),
        choice: Choice | None = None,
        *,
        tenant_of: Callable[[Any], str],
        rank: Callable[[str, float], float],
        by_tenant: tuple[bool, ...] = (),
    ) -> None:
        super().__init__(key_of, clock, gates, on_pick, on_put_back, choice)
        self._tenant_of = tenant_of
        self._rank = rank
        self._by_tenant = by_tenant or (False,) * len(gates)
        self._step = 0
        self._lanes: dict[str, _Lane] = {}
        self._order: list[_Place] = []
        self._reopen: deque[_Lane] = deque()
        # In this step: whether a gate held someone who was ready, and whether the held ones were asked twice.
        self._shifted = self._asked_twice = False

    def __iter__(self) -> Iterator[Any]:
        """All requests by rank and key, held ones included; the queue is not disturbed."""
        ranks = {tenant: self._rank(tenant, self._now) for tenant in self._lanes}
        entries = sorted(self._entries.values(), key=lambda e: (ranks[e.lane.tenant], e.key))
        return iter([entry.request for entry in entries])

    def begin_step(self, now: float) -> None:
        """Start a scan at `now`: ranks may have changed, keys expired, and held requests get another chance."""
        super().begin_step(now)
        self._head = None
        self._step += 1
        self._shifted = self._asked_twice = False
        self._changes += 1  # ranks may have moved
        self._open_again()

    def rerank(self, tenant: str) -> None:
        """The tenant's rank has changed; must be called when it has become smaller."""
        lane = self._lanes.get(tenant)
        if lane is not None:
            self._head = None
            self._place(lane)

    def drop_gates(self) -> None:
        """Use no gates: for requests that hold blocks, which must never wait for anything but the scan."""
        super().drop_gates()
        for lane in self._lanes.values():
            lane.heaps, lane.closed = lane.heaps[:1], [False]
            self._place(lane)

    def line(self, tenant: str) -> TenantLine:
        """What the tenant has waiting that no gate holds, or held in this step or the one before."""
        lane = self._lanes.get(tenant)
        if lane is None or self._refused(lane):
            return TenantLine(tenant, 0, 0)
        return TenantLine(tenant, lane.ready, lane.ready_tokens)

    def lines(self, most: int) -> list[TenantLine]:
        """The lines of the first tenants by rank that have one (see `line`), at most `most` of them."""
        found: list[TenantLine] = []
        seen: list[_Place] = []
        while len(found) < most and len(seen) < 4 * most and self._first() is not None:
            place = heapq.heappop(self._order)
            seen.append(place)
            lane = place[3]
            if lane.ready and not self._refused(lane):
                found.append(TenantLine(lane.tenant, lane.ready, lane.ready_tokens))
        for place in seen:
            heapq.heappush(self._order, place)
        return found

    def first(self, most: int) -> list[Any]:
        """The first `most` requests that no gate holds; gates are not asked. O(most log n).

        By key where the first tenants' ranks are all equal; else in turns, one of each tenant in order of rank.
        """
        seen: list[_Place] = []
        lanes: list[_Lane] = []
        while len(lanes) < most and len(seen) < 4 * most and self._first() is not None:
            place = heapq.heappop(self._order)
            seen.append(place)
            if place[3].ready and not self._refused(place[3]):
                lanes.append(place[3])
        for place in seen:
            heapq.heappush(self._order, place)
        lines = [live_requests(lane.heaps[_READY], most) for lane in lanes]
        if len({place[0] for place in seen}) <= 1:
            return [request for _, request in islice(heapq.merge(*lines, key=itemgetter(0)), most)]
        found: list[Any] = []
        while lines and len(found) < most:
            # Of those that had one in this turn, each is asked again in the next.
            turn = [(line, next(line, None)) for line in lines[: most - len(found)]]
            found += [item[1] for _, item in turn if item is not None]
            lines = [line for line, item in turn if item is not None]
        return found

    # inside

    def _first(self) -> _Entry | None:
        """The best request of the first tenant, gates not asked; sets stale places right on the way."""
        order = self._order
        while order:
            rank, key, stamp, lane = order[0]
            if stamp != lane.stamp:
                heapq.heappop(order)
                continue
            entry = lane.best()
            if entry is None:
                heapq.heappop(order)
                lane.stamp = _DEAD
                continue
            current = self._rank(lane.tenant, self._now)
            if current == rank and entry.key == key:
                return entry
            heapq.heapreplace(order, self._new_place(lane, entry, current))
        return None

    def _settle(self) -> _Entry | None:
        if self._head is None:
            while True:
                entry = self._first()
                if entry is not None:
                    if self._choice is not None and entry.where == _READY and self._choice.useful():
                        lane: _Lane = entry.lane
                        entry = self._choice.of(lane.window.first(lane.heaps[_READY]), self._now)
                    if self._passes(entry):
                        self._head = entry
                        break
                elif self._shifted and not self._asked_twice:
                    # Some were held for the sake of others that by now are held themselves.
                    self._asked_twice = True
                    self._open_again()
                else:
                    break
        return self._head

    def _passes(self, entry: _Entry) -> bool:
        lane: _Lane = entry.lane
        for index, gate in enumerate(self._gates, start=1):
            reason = gate(entry.request, self._now)
            if reason is None:
                continue
            if self._by_tenant[index - 1]:
                self._refuse_all(entry, index)
                self._set_cause(entry, (index, reason))
                return False
            # Once the best of the tenant's that a gate holds was refused, its others are not asked in this step.
            if entry.where == index:
                self._close(lane, index)
            else:
                self._shifted = True
                self._move(entry, index)
                if lane.heaps[index][0][2] is entry:
                    self._close(lane, index)
            self._set_cause(entry, (index, reason))
            return False
        lane.refused_at = _NEVER
        return True

    def _refused(self, lane: _Lane) -> bool:
        return lane.refused_at >= self._step - 1

    def _refuse_all(self, entry: _Entry, index: int) -> None:
        lane: _Lane = entry.lane
        # Its line has just vanished for those who were held for its sake.
        self._shifted = self._shifted or not self._refused(lane)
        lane.refused_at = self._step
        if entry.where != index:
            self._move(entry, index)
        self._close(lane, index)
        lane.closed = [True] * len(lane.closed)

    def _open_again(self) -> None:
        for _ in range(min(len(self._reopen), _REOPENED_PER_STEP)):
            lane = self._reopen.popleft()
            lane.reopen = False
            lane.closed = [False] * len(lane.closed)
            self._place(lane)

    def _close(self, lane: _Lane, index: int) -> None:
        lane.closed[index] = True
        if not lane.reopen:
            lane.reopen = True
            self._reopen.append(lane)

    def _new_place(self, lane: _Lane, entry: _Entry, rank: float) -> _Place:
        self._stamps += 1
        lane.stamp, lane.key = self._stamps, entry.key
        return rank, entry.key, lane.stamp, lane

    def _place(self, lane: _Lane) -> None:
        entry = lane.best()
        if entry is None:
            return
        heapq.heappush(self._order, self._new_place(lane, entry, self._rank(lane.tenant, self._now)))
        if len(self._order) > 64 + 2 * len(self._lanes):
            self._order = [place for place in self._order if place[3].stamp == place[2]]
            heapq.heapify(self._order)

    def _insert(self, entry: _Entry) -> None:
        tenant = self._tenant_of(entry.request)
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._lanes[tenant] = _Lane(tenant, 1 + len(self._gates))
        entry.lane = lane
        lane.live += 1
        lane.ready += 1
        lane.ready_tokens += entry.tokens
        super()._insert(entry)

    def _note(self, entry: _Entry) -> None:
        self._changes += 1

    def _push(self, entry: _Entry) -> None:
        self._changes += 1
        lane: _Lane = entry.lane
        self._stamps += 1
        entry.stamp = self._stamps
        heap = lane.heaps[entry.where]
        item = (entry.key, entry.stamp, entry)
        heapq.heappush(heap, item)
        if self._choice is not None and entry.where == _READY:
            lane.window.pushed(item)
        self._head = None
        if len(heap) > 16 + 2 * lane.live:
            lane.heaps = [[item for item in h if item[2].stamp == item[1]] for h in lane.heaps]
            for h in lane.heaps:
                heapq.heapify(h)
        # Behind its tenant's best it changes nothing; a place that has become too good is set right at the head.
        if not lane.closed[entry.where] and (lane.stamp == _DEAD or entry.key < lane.key):
            self._place(lane)

    def _move(self, entry: _Entry, where: int) -> None:
        change = (where == _READY) - (entry.where == _READY)
        entry.lane.ready += change
        entry.lane.ready_tokens += change * entry.tokens
        super()._move(entry, where)

    def _discard(self, entry: _Entry) -> None:
        lane: _Lane = entry.lane
        if entry.where == _READY:
            lane.ready -= 1
            lane.ready_tokens -= entry.tokens
        super()._discard(entry)
        lane.live -= 1
        if not lane.live:
            lane.stamp = _DEAD
            del self._lanes[lane.tenant]
