"""Guards what a tier keeps: its size is never exceeded, nothing in use leaves, and what leaves is the least worth keeping.

Random calls against a plain model of the rule. Not here: what the calls come from.
"""

from __future__ import annotations

import hashlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from patches.kv.tiers.cache import BlockCache, Entry
from patches.kv.tiers.files import tenant_digest
from patches.kv.tiers.sketch import FrequencySketch


def key(number: int) -> bytes:
    """A key as the tiers have them: a tenant, then a hash."""
    return tenant_digest("t") + hashlib.sha256(f"{number}".encode()).digest()


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["add", "must", "written", "failed", "pin", "unpin", "use", "remove", "note"]),
        st.integers(0, 11),
        st.booleans(),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(slots=st.integers(1, 6), calls=CALLS, factor=st.sampled_from([1.0, 3.0]))
def test_bounds_and_order_of_eviction(slots: int, calls: list[Any], factor: float) -> None:
    evicted: list[Entry] = []
    cache = BlockCache(slots, high_factor=factor, on_evict=evicted.append)
    pins: dict[bytes, int] = {}
    for what, number, low in calls:
        name = key(number)
        entry = cache._entries.get(name)
        evicted.clear()
        if what in ("add", "must"):
            idle = [e for e in cache._entries.values() if e.ready and not e.pins and not e.doomed]
            full = len(cache) == slots
            added = cache.add(name, low, must=what == "must") if entry is None else None
            if entry is None and not full:
                assert added is not None and not evicted
            if evicted:
                (left,) = evicted
                assert full and left in idle and added is not None and added.slot == left.slot
                assert what == "must" or cache.seen.count(name) > cache.seen.count(left.key)
                # Of its own class the one used longest ago; between the two the rule of the factor.
                assert left.used == min(e.used for e in idle if e.low == left.low)
                others = [e for e in idle if e.low != left.low]
                if others:
                    other = min(others, key=lambda e: e.used)
                    clock = max(e.used for e in cache._entries.values()) - 1
                    high, its = (other, left) if left.low else (left, other)
                    older = clock - high.used > factor * (clock - its.used)
                    assert (left is high) == older
        elif what == "written":
            cache.written([name])
        elif what == "failed":
            cache.failed([name])
        elif what == "pin" and cache.get(name) is not None:
            cache.pin([name])
            pins[name] = pins.get(name, 0) + 1
        elif what == "unpin" and pins.get(name):
            cache.unpin([name])
            pins[name] -= 1
        elif what == "use":
            cache.use([name], low)
        elif what == "remove":
            cache.remove(name)
        elif what == "note":
            cache.seen.note(name)
        check(cache, pins)
    for name, count in pins.items():
        for _ in range(count):
            cache.unpin([name])
    cache.failed(list(cache._entries))
    assert cache.room() == slots


def check(cache: BlockCache, pins: dict[bytes, int]) -> None:
    """No more than it may, no slot twice, what is pinned is there, and what is idle is in order of use."""
    entries = cache._entries.values()
    assert len(cache) <= cache.slots
    assert len({entry.slot for entry in entries}) == len(cache)
    assert all(0 <= entry.slot < cache.slots for entry in entries)
    for name, count in pins.items():
        assert not count or cache._entries[name].pins == count
    for low in (False, True):
        idle = list(cache.coldest(low))
        assert all(entry.ready and not entry.pins and entry.low == low for entry in idle)
        assert [entry.used for entry in idle] == sorted(entry.used for entry in idle)


def test_a_chain_leaves_tail_first() -> None:
    evicted: list[bytes] = []
    cache = BlockCache(4, on_evict=lambda entry: evicted.append(entry.key))
    chain = [key(i) for i in range(4)]
    for name in chain:
        cache.add(name, True)
    cache.written(chain)
    for number in range(4, 8):
        cache.add(key(number), True, must=True)
    assert evicted == chain[::-1]


def test_a_scan_does_not_wash_out_what_is_asked_for_again() -> None:
    cache = BlockCache(64)
    hot = [key(i) for i in range(64)]
    for name in hot * 3:
        cache.seen.note(name)
    for name in hot:
        cache.add(name, True)
    cache.written(hot)
    taken = 0
    for number in range(100, 2100):
        cache.seen.note(hot[number % 64])
        cache.seen.note(key(number))
        entry = cache.add(key(number), True)
        if entry is not None:
            taken += 1
            cache.written([entry.key])
    # LRU would have taken all 2,000, and then held nothing else.
    assert taken < 20
    assert sum(cache.get(name) is not None for name in hot) > 50


@settings(max_examples=50, deadline=None)
@given(notes=st.lists(st.integers(0, 30), max_size=80))
def test_a_count_is_never_too_low_within_a_window(notes: list[int]) -> None:
    sketch = FrequencySketch(32)
    for number in notes:
        sketch.note(key(number))
    for number in set(notes):
        assert sketch.count(key(number)) >= min(15, notes.count(number))


def test_counts_age() -> None:
    sketch = FrequencySketch(4)
    for _ in range(8):
        sketch.note(key(1))
    before = sketch.count(key(1))
    for number in range(2, 200):
        sketch.note(key(number))
    assert sketch.count(key(1)) < before
