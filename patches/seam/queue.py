"""The waiting queue: a heap by composite key with lazy deletion, timed re-keying and gates.

It keeps upstream's contract (`RequestQueue`): peek and pop name the same request, a request that the
scan skipped comes back with the key it had, and removal ignores nothing silently.

What it costs: add, pop, re-key O(log n) amortised; removal O(1) each, paid for when its heap entry
surfaces; a step in which nothing changes O(number of gates). The order is never rebuilt per step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue

from patches.seam.window import Choice, Window

Key = tuple[Any, ...]
KeyOf = Callable[[Any, float], tuple[Key, float | None]]
Gate = Callable[[Any, float], str | None]
Notice = Callable[[Any, float], None]
#: Number of a gate, from 1, and the reason that it gave.
Cause = tuple[int, str]

_READY = 0
_DEAD = -1


class _Entry:
    """One queued request. A heap item is live while it carries the entry's current stamp."""

    __slots__ = ("cause", "due", "key", "lane", "request", "stamp", "timer_stamp", "tokens", "where")

    def __init__(self, request: Any, key: Key, due: float | None) -> None:
        self.request = request
        self.key = key
        self.due = due
        self.tokens: int = request.num_tokens
        self.where = _READY
        self.stamp = _DEAD
        self.timer_stamp = _DEAD
        # Which gate holds it, and why.
        self.cause: Cause | None = None
        # Which tenant's requests it is among, where the queue keeps them apart.
        self.lane: Any = None


_Item = tuple[Key, int, _Entry]
_Timer = tuple[float, int, _Entry]


def in_order(heap: Sequence[Any], looks: int, key: Callable[[Any], Any] = itemgetter(0)) -> Iterator[Any]:
    """The items of a heap by `key`, smallest first, at most `looks` of them; the heap is left alone.

    O(log looks) for each.
    """
    frontier = [(key(heap[0]), 0)] if heap else []
    for _ in range(looks):
        if not frontier:
            return
        index = heapq.heappop(frontier)[1]
        yield heap[index]
        for child in range(2 * index + 1, min(2 * index + 3, len(heap))):
            heapq.heappush(frontier, (key(heap[child]), child))


class KeyedRequestQueue(RequestQueue):
    """Requests in order of a key, smallest first, with gates that hold some back inside the queue.

    Args:
        key_of: (request, now) -> (key, valid_until). Keys of different requests must differ.
        clock: seconds; `valid_until` is on this clock.
        gates: asked in order for the request at the head; the first reason holds it.
        on_pick, on_put_back: told of each request that is popped, and of each popped one that comes back.
        choice: who may pick another than the first; the gates are asked for what it picked.

    `len` counts held requests; `bool`, peek and pop do not see them. `begin_step` must be called
    before each scan: it applies expired keys and lets each gate's best held request be asked again.
    """

    def __init__(
        self,
        key_of: KeyOf,
        clock: Callable[[], float],
        gates: tuple[Gate, ...] = (),
        on_pick: tuple[Notice, ...] = (),
        on_put_back: tuple[Notice, ...] = (),
        choice: Choice | None = None,
    ) -> None:
        self._key_of = key_of
        self._clock = clock
        self._gates = gates
        self._on_pick = on_pick
        self._on_put_back = on_put_back
        self._choice = choice
        self._window = Window()
        # For `first`; made when it is asked.
        self._ahead: Window | None = None
        self._now = clock()
        self._entries: dict[Any, _Entry] = {}
        # One heap for ready requests, then one for each gate's held ones.
        self._heaps: list[list[_Item]] = [[] for _ in range(1 + len(gates))]
        self._closed = [False] * (1 + len(gates))
        self._timers: list[_Timer] = []
        self._popped: dict[Any, _Entry] = {}
        self._head: _Entry | None = None
        self._stamps = 0
        self._tokens = 0
        self._held = 0
        self._held_by: dict[Cause, int] = {}
        self._changes = 0
        # The last key that `first` gave, or None where it gave all.
        self._horizon: Key | None = None

    # upstream's contract

    def add_request(self, request: Any) -> None:
        """Queue a request under a freshly computed key."""
        self._insert_new(request)

    def prepend_request(self, request: Any) -> None:
        """Queue a preempted request; its place is what its key says, computed anew."""
        self._insert_new(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Take back requests that the scan skipped, each under the key it had when it was popped."""
        for request in requests:
            entry = self._popped.pop(request, None)
            if entry is None:
                self._insert_new(request)
            else:
                for notice in self._on_put_back:
                    notice(request, self._now)
                entry.where = _READY
                self._insert(entry)

    def peek_request(self) -> Any:
        """The request that `pop_request` would return; IndexError if none may be offered."""
        entry = self._settle()
        if entry is None:
            raise IndexError("peek from an empty queue")
        return entry.request

    def pop_request(self) -> Any:
        """Remove and return the first request that no gate holds; IndexError if there is none."""
        entry = self._settle()
        if entry is None:
            raise IndexError("pop from an empty queue")
        self._discard(entry)
        self._popped[entry.request] = entry
        for notice in self._on_pick:
            notice(entry.request, self._now)
        return entry.request

    def remove_request(self, request: Any) -> None:
        """Remove one request; ValueError if it is not queued."""
        entry = self._entries.get(request)
        if entry is None:
            raise ValueError("the request is not in the queue")
        self._discard(entry)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Remove those of the requests that are queued."""
        for request in requests:
            entry = self._entries.get(request)
            if entry is not None:
                self._discard(entry)

    def __bool__(self) -> bool:
        return self._settle() is not None

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Any]:
        """All requests by key, held ones included; the queue is not disturbed."""
        return iter([entry.request for entry in sorted(self._entries.values(), key=lambda e: e.key)])

    def __contains__(self, request: object) -> bool:
        return request in self._entries

    # what the adapter adds

    def begin_step(self, now: float) -> None:
        """Start a scan at `now`: apply keys that expired and give the gates another chance."""
        self._now = now
        if self._popped:
            self._popped.clear()
        if self._choice is not None:
            # It may choose otherwise by now.
            self._head = None
        if self._gates:
            self._head = None
            self._closed = [False] * len(self._closed)
        timers = self._timers
        while timers and timers[0][0] <= now:
            _, stamp, entry = heapq.heappop(timers)
            if entry.timer_stamp == stamp:
                self._recompute(entry, now)

    def rekey(self, request: Any) -> None:
        """Compute a queued request's key anew; nothing happens if it is not queued."""
        entry = self._entries.get(request)
        if entry is not None:
            self._recompute(entry, self._clock())

    def release(self, request: Any) -> None:
        """Take a held request back among the ready ones; its gates are asked when it is at the head."""
        entry = self._entries.get(request)
        if entry is not None and entry.where != _READY:
            self._move(entry, _READY)

    def rerank(self, tenant: str) -> None:
        """A tenant's rank has changed; nothing to do where tenants have none."""

    def drop_gates(self) -> None:
        """Use no gates: for requests that hold blocks, which must never wait for anything but the scan."""
        for entry in list(self._entries.values()):
            self.release(entry.request)
        self._gates = ()
        self._choice = None
        self._heaps = self._heaps[:1]
        self._closed = [False]
        self._head = None

    def reason(self, request: Any) -> str:
        """Why a gate holds the request; "" if none does."""
        entry = self._entries.get(request)
        return entry.cause[1] if entry is not None and entry.cause is not None else ""

    def next_due(self) -> float | None:
        """When the next key expires, on the queue's clock; None if none will."""
        timers = self._timers
        while timers and timers[0][2].timer_stamp != timers[0][1]:
            heapq.heappop(timers)
        return timers[0][0] if timers else None

    def first(self, most: int) -> list[Any]:
        """The first `most` requests by key that no gate holds; gates are not asked. O(most), at times O(most log n)."""
        if most <= 0:
            return []
        if self._ahead is None or self._ahead.least < most:
            self._ahead = Window(most, 2 * most)
            self._ahead.gather(self._heaps[_READY])
        found = self._ahead.first(self._heaps[_READY])
        # Of the furthest look that anybody takes: nearer ones hold as long as it does.
        furthest = self._ahead.least
        self._horizon = found[furthest - 1][0] if len(found) >= furthest else None
        return [entry.request for _, _, entry in found[:most]]

    @property
    def changes(self) -> int:
        """Changes whenever the latest `first` may not hold any more."""
        return self._changes

    @property
    def held(self) -> int:
        """Number of requests that gates hold."""
        return self._held

    @property
    def held_by(self) -> Mapping[Cause, int]:
        """Number of requests held by each gate for each reason; without those that hold nobody. Not a copy."""
        return self._held_by

    @property
    def tokens(self) -> int:
        """Tokens of all queued requests, as of when each was queued."""
        return self._tokens

    # inside

    def _settle(self) -> _Entry | None:
        """The best request that every gate lets pass; moves those that are refused out of the way."""
        if self._head is not None:
            return self._head
        while True:
            best: _Item | None = None
            for index, heap in enumerate(self._heaps):
                while heap and heap[0][2].stamp != heap[0][1]:
                    heapq.heappop(heap)
                if heap and not self._closed[index] and (best is None or heap[0] < best):
                    best = heap[0]
            if best is None:
                return None
            entry: _Entry = best[2]
            if self._choice is not None and entry.where == _READY and self._choice.useful():
                entry = self._choice.of(self._window.first(self._heaps[_READY]), self._now)
            if self._passes(entry):
                self._head = entry
                return entry

    def _passes(self, entry: _Entry) -> bool:
        for index, gate in enumerate(self._gates, start=1):
            reason = gate(entry.request, self._now)
            if reason is None:
                continue
            # Once the best of those that a gate holds was refused, the others are not asked in this step.
            if entry.where == index:
                self._closed[index] = True
            else:
                self._move(entry, index)
                if self._heaps[index][0][2] is entry:
                    self._closed[index] = True
            self._set_cause(entry, (index, reason))
            return False
        return True

    def _insert_new(self, request: Any) -> None:
        if request in self._entries:
            raise ValueError("the request is in the queue already")
        key, due = self._key_of(request, self._clock())
        self._insert(_Entry(request, key, due))

    def _insert(self, entry: _Entry) -> None:
        self._entries[entry.request] = entry
        self._tokens += entry.tokens
        self._push(entry)
        self._set_timer(entry, entry.due)

    def _push(self, entry: _Entry) -> None:
        if entry.where == _READY:
            self._note(entry)
        self._stamps += 1
        entry.stamp = self._stamps
        heap = self._heaps[entry.where]
        item = (entry.key, entry.stamp, entry)
        heapq.heappush(heap, item)
        if entry.where == _READY:
            if self._choice is not None:
                self._window.pushed(item)
            if self._ahead is not None:
                self._ahead.pushed(item)
        self._head = None
        if len(heap) > 64 + 2 * len(self._entries):
            self._heaps = [[item for item in h if item[2].stamp == item[1]] for h in self._heaps]
            for h in self._heaps:
                heapq.heapify(h)

    def _set_timer(self, entry: _Entry, due: float | None) -> None:
        entry.due = due
        if due is None:
            entry.timer_stamp = _DEAD
            return
        self._stamps += 1
        entry.timer_stamp = self._stamps
        heapq.heappush(self._timers, (due, entry.timer_stamp, entry))
        if len(self._timers) > 64 + 2 * len(self._entries):
            self._timers = [timer for timer in self._timers if timer[2].timer_stamp == timer[1]]
            heapq.heapify(self._timers)

    def _recompute(self, entry: _Entry, now: float) -> None:
        key, due = self._key_of(entry.request, now)
        if due is not None and due <= now:
            # Rounding may put a boundary at this very instant: ask again in the next step, not for ever.
            due = math.nextafter(now, math.inf)
        if key != entry.key:
            self._note(entry)
            entry.key = key
            self._push(entry)
        self._set_timer(entry, due)

    def _note(self, entry: _Entry) -> None:
        """The entry comes, goes or changes its place."""
        if self._horizon is None or entry.key <= self._horizon:
            self._changes += 1

    def _move(self, entry: _Entry, where: int) -> None:
        if entry.where == _READY:
            self._note(entry)
        self._held += (where != _READY) - (entry.where != _READY)
        entry.where = where
        if where == _READY:
            self._set_cause(entry, None)
        self._push(entry)

    def _set_cause(self, entry: _Entry, cause: Cause | None) -> None:
        before = entry.cause
        if cause == before:
            return
        entry.cause, held_by = cause, self._held_by
        if before is not None:
            held_by[before] -= 1
            if not held_by[before]:
                del held_by[before]
        if cause is not None:
            held_by[cause] = held_by.get(cause, 0) + 1

    def _discard(self, entry: _Entry) -> None:
        self._note(entry)
        del self._entries[entry.request]
        self._tokens -= entry.tokens
        self._held -= entry.where != _READY
        self._set_cause(entry, None)
        entry.where = _READY
        entry.stamp = entry.timer_stamp = _DEAD
        self._head = None
