"""Guards what a tier keeps: its size is never exceeded, nothing in use leaves, and what leaves is the least worth keeping.

Random calls against a plain model of the rule. Not here: what the calls come from.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patches.kv.tiers import returns
from patches.kv.tiers.cache import BlockCache, Entry
from patches.kv.tiers.files import TENANT_BYTES, tenant_digest
from patches.kv.tiers.sketch import FrequencySketch


def key(number: int) -> bytes:
    """A key as the tiers have them: a tenant, then a hash."""
    return tenant_digest("t") + hashlib.sha256(f"{number}".encode()).digest()


CALLS = st.lists(
    st.tuples(
        st.sampled_from(
            ["add", "must", "passing", "keep", "written", "failed", "pin", "unpin", "use", "remove", "note"]
        ),
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
        if what in ("add", "must", "passing"):
            idle = [e for e in cache._entries.values() if e.ready and not e.pins and not e.doomed]
            full = len(cache) == slots
            worth = {e.key: cache.returns.leaver(e.key, cache.seen.count(e.key)).rate for e in idle}
            must = what != "add"
            added = cache.add(name, low, must=must, passing=what == "passing") if entry is None else None
            if entry is None and not full:
                assert added is not None and not evicted
            if evicted:
                (left,) = evicted
                assert full and left in idle and added is not None and added.slot == left.slot
                mine = cache.returns.newcomer(name, cache.seen.count(name)).rate
                assert must or left.passing or mine > worth[left.key]
                # Who is here in passing goes first. Of its own class the one used longest ago; between the two the rule of
                # the factor.
                assert left.passing or not any(e.passing for e in idle)
                assert left.used == min(
                    e.used for e in idle if e.passing == left.passing and (left.passing or e.low == left.low)
                )
                others = [e for e in idle if e.low != left.low and not left.passing]
                if others:
                    other = min(others, key=lambda e: e.used)
                    clock = max(e.used for e in cache._entries.values()) - 1
                    high, its = (other, left) if left.low else (left, other)
                    older = clock - high.used > factor * (clock - its.used)
                    assert (left is high) == older
        elif what == "keep" and entry is not None and entry.passing:
            cache.keep(entry)
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
            cache.note([name])
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
        assert all(e.ready and not e.pins and e.low == low and not e.passing for e in idle)
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
    hot = [key(i) for i in range(40)]
    taken = 0

    def ask(name: bytes) -> bool:
        cache.note([name])
        cache.use([name], True)
        entry = cache.add(name, True) if cache.get(name) is None else None
        if entry is not None:
            cache.written([name])
        return entry is not None

    for number in range(4000):
        ask(hot[number % 40])
        taken += ask(key(100 + number))
    # LRU would have taken all 4,000 and held no more than 64 of the last, which is what it takes to learn.
    assert taken < 1000
    assert sum(cache.get(name) is not None for name in hot) == 40


def test_one_tenants_conversations_are_kept_among_anothers_documents() -> None:
    """Each block of theirs is asked for once more, soon; the documents never. Counts alone cannot tell the two apart."""
    cache = BlockCache(64, least_rate=0.1)
    documents = tenant_digest("documents")
    taken = hits = 0
    for number in range(2000):
        new, before = key(number), key(number - 8)
        hits += number >= 1000 and cache.get(before) is not None
        for name in (new, before, document := documents + new[TENANT_BYTES:]):
            cache.note([name])
            cache.use([name], True)
            if cache.get(name) is None and cache.add(name, True) is not None:
                cache.written([name])
                taken += number >= 1000 and name is document
    assert hits == 1000
    # A count that is wrong makes another kind of a few, which is believed at first.
    assert taken < 50


def test_who_was_there_in_passing_leaves_first_unless_it_is_worth_more() -> None:
    evicted: list[bytes] = []
    cache = BlockCache(3, on_evict=lambda entry: evicted.append(entry.key))
    cache.add(key(0), True, must=True)
    for number in (1, 2):
        cache.add(key(number), True, must=True, passing=True)
    cache.written([key(0), key(1), key(2)])
    kept = cache.get(key(2))
    assert kept is not None
    cache.keep(kept)
    for number in (3, 4, 5):
        cache.add(key(number), True, must=True)
    assert evicted == [key(1), key(0), key(2)]


@settings(max_examples=50, deadline=None)
@given(notes=st.lists(st.integers(0, 30), max_size=80))
def test_a_count_is_never_too_low_within_a_window(notes: list[int]) -> None:
    sketch = FrequencySketch(32)
    for number in notes:
        sketch.note([key(number)])
    for number in set(notes):
        assert sketch.count(key(number)) >= min(15, notes.count(number))


@settings(max_examples=30, deadline=None)
@given(notes=st.lists(st.integers(0, 9), max_size=120))
def test_notes_at_once_are_notes_one_by_one(notes: list[int]) -> None:
    """Across a halving too."""
    one, all_ = FrequencySketch(5), FrequencySketch(5)
    for number in notes:
        one.note([key(number)])
    all_.note([key(number) for number in notes])
    assert [one.count(key(n)) for n in range(10)] == [all_.count(key(n)) for n in range(10)]


def test_counts_age() -> None:
    sketch = FrequencySketch(4)
    for _ in range(8):
        sketch.note([key(1)])
    before = sketch.count(key(1))
    for number in range(2, 200):
        sketch.note([key(number)])
    assert sketch.count(key(1)) < before


@pytest.mark.parametrize("bits", [128, 256])
def test_blocks_of_one_tenant_share_no_counters_by_being_of_one_tenant(bits: int) -> None:
    """Whatever hash the engine names blocks by."""
    sketch = FrequencySketch(64)
    names = [key(number)[: TENANT_BYTES + bits // 8] for number in range(20)]
    for name in names:
        sketch.note([name])
    for row in sketch._rows:
        assert sum(map(bool, row)) > 15


def test_what_is_offered_to_stay_counts_when_it_is_asked_for_again() -> None:
    """Not taken, still here or just gone: else its kind could only sink."""
    for gone in (False, True):
        cache = BlockCache(2, least_rate=0.9)
        kind = cache.returns.newcomer(key(0), 0)
        kind.again /= 2
        entry = cache.add(key(0), True, must=True, passing=True)
        assert entry is not None
        cache.written([key(0)])
        cache.keep(entry)
        assert entry.passing
        if gone:
            for number in (1, 2):
                cache.add(key(number), True, must=True)
            assert cache.get(key(0)) is None
        before = kind.again
        cache.note([key(0)])
        cache.use([key(0)], True)
        assert kind.again == before + 1


def test_the_kind_unused_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returns, "_KINDS", 2)
    kinds = returns.Returns(8)
    one, two = (kinds.newcomer(tenant_digest(name), 0) for name in "ab")
    assert kinds.newcomer(tenant_digest("a"), 0) is one
    kinds.newcomer(tenant_digest("c"), 0)
    assert kinds.newcomer(tenant_digest("a"), 0) is one
    assert kinds.newcomer(tenant_digest("b"), 0) is not two


def test_a_rate_is_at_most_one() -> None:
    kind = returns.Kind(1.0)
    kind.again += 3
    assert kind.rate == 1.0
