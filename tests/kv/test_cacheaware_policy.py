"""`cacheaware`'s choice by itself, on plain objects: the law of overtaking whatever the cache says."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from patches.kv.cacheaware import PATCH, CacheawareKnobs, build
from patches.seam.patch import Hooks


@dataclass(eq=False)
class Waiting:
    """A request that shares nothing with others; `cached` is what the probe will say."""

    number: int
    num_tokens: int = 100
    cached: int = 0
    block_hashes: list[bytes] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return f"r{self.number}"


class Line:
    """A queue in order of arrival that asks the patch as the real one does."""

    def __init__(self, **knobs: Any) -> None:
        self.waiting: list[Waiting] = []
        self.gauges: dict[str, Any] = {}
        scheduler = SimpleNamespace(running=[], block_size=16, kv_cache_manager=None)
        context = SimpleNamespace(
            scheduler=scheduler,
            gauge=self.gauges.__setitem__,
            precedes=lambda one, other: one.number < other.number,
            is_running=lambda request: False,
        )
        self.scheduler = scheduler
        self.hooks: Hooks = build(CacheawareKnobs(**knobs), context)
        state = self.hooks.prefer.__self__  # type: ignore[union-attr]
        probe = SimpleNamespace(
            uncached_tokens=lambda requests: [r.num_tokens - r.cached for r in requests],
            begin_step=lambda: None,
            forget=lambda request: None,
        )
        state._ready()
        state._probe = probe

    def pick(self) -> Waiting:
        """The next one to be admitted."""
        offered = self.waiting[:64]
        chosen = offered[self.hooks.prefer(offered, 0.0)]  # type: ignore[misc]
        self.waiting.remove(chosen)
        self.hooks.on_pick(chosen, 0.0)  # type: ignore[misc]
        return chosen

    def put_back(self, request: Waiting) -> None:
        self.hooks.on_put_back(request, 0.0)  # type: ignore[misc]
        self.waiting.append(request)
        self.waiting.sort(key=lambda r: r.number)

    def end_pass(self) -> None:
        output = SimpleNamespace(scheduled_new_reqs=[])
        self.hooks.after_schedule(output, 0.0)  # type: ignore[misc]


@pytest.fixture(autouse=True)
def plain_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe is put in by `Line`; the real one wants a real scheduler."""
    monkeypatch.setattr("patches.kv.cacheaware.PrefixProbe", lambda scheduler: SimpleNamespace())


def test_every_knob_has_a_unit_and_refuses_nonsense() -> None:
    names = set(CacheawareKnobs.model_fields) - {"hold_siblings"}
    assert all(PATCH.unit(name) for name in names)
    wrong: tuple[dict[str, Any], ...] = (
        {"window_requests": 0},
        {"window_requests": 65},
        {"overtakes_max_times": -1},
        {"window": 3},
    )
    for bad in wrong:
        with pytest.raises(ValidationError):
            CacheawareKnobs(**bad)


def test_the_least_uncached_goes_first_and_the_earlier_of_equals() -> None:
    line = Line()
    line.waiting = [Waiting(0, 100), Waiting(1, 400, 352), Waiting(2, 400, 352), Waiting(3, 60)]
    assert [line.pick().number for _ in range(4)] == [1, 2, 3, 0]


def test_only_the_window_is_looked_at() -> None:
    line = Line(window_requests=2)
    line.waiting = [Waiting(0, 100), Waiting(1, 90), Waiting(2, 10)]
    assert [line.pick().number for _ in range(3)] == [1, 2, 0]


def test_without_overtakes_it_is_the_order_of_arrival() -> None:
    line = Line(overtakes_max_times=0)
    line.waiting = [Waiting(i, 100 - i) for i in range(5)]
    assert [line.pick().number for _ in range(5)] == [0, 1, 2, 3, 4]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(1, 300), st.integers(0, 300)),
        st.tuples(st.just("pick"), st.booleans(), st.integers(0, 300)),
        st.tuples(st.just("pass"), st.just(0), st.just(0)),
    ),
    min_size=20,
    max_size=120,
)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(events=EVENTS, cap=st.integers(0, 6), window=st.integers(1, 64))
def test_nobody_is_overtaken_more_often_than_the_cap(events: Any, cap: int, window: int) -> None:
    """Also when what is cached changes at every pick and some picks come back."""
    line = Line(overtakes_max_times=cap, window_requests=window)
    passed_by: dict[int, int] = {}
    skipped: list[Waiting] = []
    total = number = 0
    for kind, one, other in events:
        if kind == "come":
            line.waiting.append(Waiting(number, one, min(other, one - 1)))
            number += 1
        elif kind == "pick" and line.waiting:
            chosen = line.pick()
            if one:
                skipped.append(chosen)
            else:
                for left in line.waiting:
                    if left.number < chosen.number:
                        passed_by[left.number] = passed_by.get(left.number, 0) + 1
                        total += 1
            for left in line.waiting:
                left.cached = (left.cached * 7 + other) % left.num_tokens
        elif kind == "pass":
            for request in skipped:
                line.put_back(request)
            skipped.clear()
            line.end_pass()
    for request in skipped:
        line.put_back(request)
    line.end_pass()
    assert max(passed_by.values(), default=0) <= cap
    assert line.gauges["cacheaware_overtakes"]() == total
    assert line.gauges["cacheaware_overtakes_max"]() == max(passed_by.values(), default=0)
