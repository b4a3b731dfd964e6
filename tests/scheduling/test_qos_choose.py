"""Guards which of the possible victims `qos` chooses: sufficient, minimal, and nobody if nobody would do.

A pure function, against all subsets. Not here: who is a possible victim, and when (test_qos_victims).
"""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from patches.scheduling.qos import Victim, choose

CANDIDATES = st.lists(
    st.tuples(st.integers(-4, -1), st.integers(0, 50), st.integers(0, 12)), min_size=1, max_size=7
).map(
    lambda drawn: [
        Victim((gap, computed, f"r{number}"), freed, object())
        for number, (gap, computed, freed) in enumerate(drawn)
    ]
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(candidates=CANDIDATES, shortage=st.integers(0, 40), most=st.integers(1, 5), order=st.randoms())
def test_choose_takes_just_enough(candidates: list[Victim], shortage: int, most: int, order: Any) -> None:
    chosen = choose(candidates, shortage, most)
    assert len(chosen) <= most
    assert len({victim.preference for victim in chosen}) == len(chosen)
    assert all(victim in candidates for victim in chosen)
    # Nothing only if nothing would do.
    best = max(sum(v.freed_blocks for v in some) for some in subsets(candidates, most))
    assert bool(chosen) == (best >= shortage)
    if chosen:
        freed = sum(victim.freed_blocks for victim in chosen)
        assert freed >= shortage
        # Nobody is superfluous; if a seat is all that is lacking, one goes.
        assert len(chosen) == 1 or all(freed - victim.freed_blocks < shortage for victim in chosen)
    # One that does alone is preferred, and the most preferred of those.
    alone = [victim for victim in candidates if victim.freed_blocks >= shortage]
    if alone:
        assert chosen == [min(alone, key=lambda victim: victim.preference)]
    # The order in which they run says nothing.
    shuffled = candidates[:]
    order.shuffle(shuffled)
    assert choose(shuffled, shortage, most) == chosen


def subsets(candidates: list[Victim], most: int) -> list[tuple[Victim, ...]]:
    """All that are not empty and not too large."""
    return [
        some
        for size in range(1, min(most, len(candidates)) + 1)
        for some in itertools.combinations(candidates, size)
    ]


def test_choose_of_nobody_is_nobody() -> None:
    assert choose([], 0, 3) == choose([], 5, 3) == []
