"""Guards: nothing inside the virtual engine can see the host's time."""

from __future__ import annotations

import sys
import time
import types
from functools import partial

import hypothesis.strategies as st
from hypothesis import given

from harness.engines.virtual.clock import EPOCH_S, VirtualClock, vllm_reads

_REAL_CLOCKS = (
    time.time,
    time.monotonic,
    time.perf_counter,
    time.time_ns,
    time.monotonic_ns,
    time.perf_counter_ns,
)


@given(st.lists(st.integers(0, 1000), max_size=30), st.lists(st.integers(0, 1200), max_size=10))
def test_events_fire_once_in_order_and_time_never_goes_back(events: list[int], stops: list[int]) -> None:
    clock = VirtualClock()
    fired: list[tuple[int, int]] = []

    def note(number: int) -> None:
        fired.append((clock.now_ns, number))

    for number, due in enumerate(events):
        clock.at(due, partial(note, number))
    seen = 0
    for stop in stops:
        clock.advance_to(stop)
        assert clock.now_ns >= seen
        seen = clock.now_ns
    clock.advance_to(10_000)
    assert [n for _, n in fired] == [n for _, n in sorted((due, n) for n, due in enumerate(events))]
    assert all(at >= events[n] for at, n in fired)


def test_an_event_may_register_another_that_is_due_at_once() -> None:
    clock = VirtualClock()
    order: list[str] = []

    def first() -> None:
        order.append("first")
        clock.at(5, lambda: order.append("second"))

    clock.at(5, first)
    clock.advance_to(5)
    assert order == ["first", "second"]


def test_sleeping_moves_the_virtual_clock_only() -> None:
    import vllm.v1.core.sched.scheduler as scheduler

    clock = VirtualClock()
    began = time.monotonic()
    with vllm_reads(clock):
        scheduler.time.sleep(1000)
        assert scheduler.time.monotonic() == EPOCH_S + 1000
        assert scheduler.time.time_ns() == (EPOCH_S + 1000) * 1_000_000_000
    assert time.monotonic() - began < 100
    assert scheduler.time is time


def test_no_loaded_engine_module_keeps_a_real_clock() -> None:
    """Walks over the globals of every module of vLLM's engine that a virtual run loads."""
    import vllm.v1.engine.core  # noqa: F401

    import harness.engines.virtual.engine  # noqa: F401

    with vllm_reads(VirtualClock()):
        leaks = [
            f"{name}.{attribute}"
            for name, module in sorted(sys.modules.items())
            if name.startswith("vllm.v1") and isinstance(module, types.ModuleType)
            for attribute, value in vars(module).items()
            if value is time or any(value is clock for clock in _REAL_CLOCKS)
        ]
    assert leaks == []
