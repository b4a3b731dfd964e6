"""Guards the line of long prompts: who of each tenant can still be in time, and that nobody is looked at twice for nothing."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from patches.fixes.longline import LongLine

FAST = settings(max_examples=150, deadline=None, derandomize=True)


def _request(number: int, tokens: int) -> Any:
    return SimpleNamespace(request_id=f"r{number}", num_tokens=tokens)


@FAST
@given(
    joins=st.lists(
        st.tuples(
            st.sampled_from("abc"), st.one_of(st.just(math.inf), st.integers(0, 60)), st.integers(1, 5000)
        ),
        min_size=1,
        max_size=20,
    ),
    gone=st.sets(st.integers(0, 19)),
    times=st.lists(st.integers(0, 70), min_size=1, max_size=6).map(sorted),
    rate=st.sampled_from([0.0, 100.0, 1000.0]),
)
def test_the_first_in_time_of_each_tenant(
    joins: list[tuple[str, float, int]], gone: set[int], times: list[int], rate: float
) -> None:
    """Against a plain search. A rate of 0 is unknown, so only a deadline that is past counts."""
    line = LongLine()
    for number, (tenant, due, tokens) in enumerate(joins):
        line.join(_request(number, tokens), tenant, due)
    for number in gone:
        line.leave(f"r{number}")
    waiting = [(n, *join) for n, join in enumerate(joins) if n not in gone]
    assert len(line) == len(waiting)
    for now in times:
        found = {request.request_id for request in line.first_in_time(now, rate)}
        expected: dict[str, str] = {}
        for number, tenant, due, tokens in waiting:
            if now + (tokens / rate if rate else 0) <= due:
                expected.setdefault(tenant, f"r{number}")
        assert found == set(expected.values())
        assert line.tokens_in_time(now, rate) >= sum(
            tokens for *_, due, tokens in waiting if now + (tokens / rate if rate else 0) <= due
        )


def test_one_that_comes_back_stands_at_the_end() -> None:
    line = LongLine()
    first, second = _request(0, 10), _request(1, 10)
    line.join(first, "a", math.inf)
    line.join(second, "a", math.inf)
    line.leave("r0")
    line.join(first, "a", math.inf)
    assert "r0" in line
    assert list(line.first_in_time(0.0, 1.0)) == [second]
    line.leave("r1")
    assert list(line.first_in_time(0.0, 1.0)) == [first]
    line.leave("r0")
    assert not list(line.first_in_time(0.0, 1.0))
    assert len(line) == 0
    assert line.tokens_in_time(0.0, 1.0) == 0


def test_the_late_do_not_count_and_leave_nothing_behind() -> None:
    line = LongLine()
    for number in range(3):
        line.join(_request(number, 100), "a", 5.0 + number)
    assert line.tokens_in_time(4.0, 100.0) == 300
    assert line.tokens_in_time(4.5, 100.0) == 200
    line.leave("r0")
    line.leave("r2")
    assert line.tokens_in_time(4.5, 100.0) == 100
    line.leave("r1")
    assert line.tokens_in_time(4.5, 100.0) == 0
