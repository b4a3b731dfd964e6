"""Bounds of a served schedule against brute force, against Belady on a trace, and on records made by hand.

Not here: what a policy gets of them, which each run's report shows.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cache_bounds import belady_hits, infinite_hits
from harness.cache_served import BlockNames, Use, hits_of, served_bounds
from harness.cache_trace import BlockTrace

_PATHS = ((1, 11, 111), (1, 11, 112), (1, 12), (2, 21, 211), (2, 22))


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[Use], list[int], int]:
    """A few requests on five prompts, admitted pass by pass, and the free blocks of each pass."""
    passes = draw(st.integers(2, 7))
    uses = []
    for at in sorted(draw(st.lists(st.integers(0, passes - 1), min_size=1, max_size=6))):
        path = draw(st.sampled_from(_PATHS))
        path = path[: draw(st.integers(1, len(path)))]
        wanted = draw(st.sampled_from([0, len(path) - 1, len(path)]))
        late = sorted(draw(st.lists(st.integers(0, 3), min_size=len(path), max_size=len(path))))
        ready = draw(st.sampled_from([None, [at + one for one in late]]))
        uses.append(Use(path, wanted, at, at + draw(st.integers(1, 3)), ready))
    blocks = draw(st.integers(1, 5))
    free = [draw(st.integers(0, blocks)) for _ in range(passes)]
    return uses, free, blocks


def brute_force(uses: list[Use], free: list[int]) -> int:
    """The most hits: each use finds a prefix, and what is kept for it lies free from the last release to its pass."""
    choices, spans = [], []
    for number, use in enumerate(uses):
        depths = []
        for block in use.blocks[: use.wanted]:
            earlier = [one for one in uses[:number] if block in one.blocks]
            there = [
                one.at if one.ready is None else one.ready[list(one.blocks).index(block)] for one in earlier
            ]
            if not earlier or min(there) > use.at:
                break
            depths.append(range(max(one.until for one in earlier), use.at))
        spans.append(depths)
        choices.append(range(len(depths) + 1))
    best = 0
    for found in product(*choices):
        load = [0] * len(free)
        for depths, count in zip(spans, found, strict=True):
            for span in depths[:count]:
                for k in span:
                    if k < len(load):
                        load[k] += 1
        if all(one <= room for one, room in zip(load, free, strict=True)):
            best = max(best, sum(found))
    return best


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_no_choice_of_what_to_keep_does_better(case: tuple[list[Use], list[int], int]) -> None:
    uses, free, blocks = case
    hits = hits_of(uses, free, blocks)
    assert hits.clairvoyant.sum() == brute_force(uses, free)
    assert hits.whole_pool.sum() == brute_force(uses, [blocks] * len(free))
    assert (hits.clairvoyant <= hits.infinite).all()
    assert hits.clairvoyant.sum() <= hits.whole_pool.sum() <= hits.infinite.sum()
    assert all(found <= use.wanted for found, use in zip(hits.infinite, uses, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(_PATHS), min_size=1, max_size=12), st.integers(3, 6))
def test_one_request_at_a_time_is_belady_on_the_trace(requests: list[tuple[int, ...]], blocks: int) -> None:
    trace = BlockTrace(tuple(requests))
    uses = [Use(path, len(path), k, k + 1) for k, path in enumerate(requests)]
    free = [blocks - len(path) for path in requests]
    hits = hits_of(uses, free, blocks)
    assert hits.clairvoyant.sum() == belady_hits(trace, blocks, scan=False)
    assert hits.infinite.sum() == infinite_hits(trace)


def test_names_tell_prefixes_apart_and_equal_ones_not() -> None:
    names = BlockNames(4)
    one = names.of(np.arange(11, dtype=np.int32))
    assert len(one) == 2
    longer = names.of(np.arange(16, dtype=np.int32))
    assert longer[:2].tolist() == one.tolist()
    other = np.arange(16, dtype=np.int32)
    other[1] = 9
    assert not set(names.of(other).tolist()) & set(longer.tolist())
    # The same block behind another one is another block; two tokens changed places.
    swapped = np.arange(16, dtype=np.int32)[[1, 0, *range(2, 16)]]
    assert not set(names.of(swapped).tolist()) & set(longer.tolist())


TOKENS = pd.DataFrame({"request": [0, 1, 2], "index": [0, 0, 0], "t_ns": [35, 50, 160]})


def _records() -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Three requests with one prompt of 8 tokens: the second comes while the first runs, the third long after."""
    requests = pd.DataFrame(
        {
            "scheduled_ns": [10.0, 30.0, 150.0, np.nan],
            "end_ns": [40.0, 55.0, 165.0, 20.0],
            "output_tokens": [1, 1, 1, 0],
            "measured": [True] * 4,
        }
    )
    events = pd.DataFrame({"kind": ["reject"], "request": [3.0], "t_ns": [20]})
    steps = pd.DataFrame({"t_ns": range(10, 210, 10), "kv_usage": 0.5})
    return requests, events, steps


def test_records_give_tokens_by_request() -> None:
    prompt = np.arange(8, dtype=np.int32)
    sequences = [(prompt, np.array([7], np.int32))] * 4
    requests, events, steps = _records()
    # Blocks of 4 tokens: the last of two is never looked for, since the last token is computed.
    found = served_bounds(sequences, requests, events, steps, TOKENS, [0, 1, 2], 4, 2)
    assert found.infinite.tolist() == [0, 4, 4, 0]
    assert found.clairvoyant.tolist() == [0, 4, 4, 0]
    # With no room beside what runs, only what runs is found.
    steps["kv_usage"] = 1.0
    tight = served_bounds(sequences, requests, events, steps, TOKENS, [0, 1, 2], 4, 2)
    assert tight.clairvoyant.tolist() == [0, 4, 0, 0]
    assert tight.whole_pool.tolist() == [0, 4, 4, 0]
    requests["measured"] = False
    assert served_bounds(sequences, requests, events, steps, TOKENS, None, 4, 2).infinite.sum() == 0


def test_a_preempted_request_holds_nothing_until_it_is_back() -> None:
    prompt = np.arange(8, dtype=np.int32)
    sequences = [(prompt, np.array([7], np.int32))] * 3
    requests, _, steps = _records()
    requests = requests.iloc[:3].assign(scheduled_ns=[10.0, 20.0, 150.0], end_ns=[170.0, 25.0, 165.0])
    steps["kv_usage"] = 1.0
    lost = pd.DataFrame({"kind": ["preempt"], "request": [0.0], "t_ns": [30]})
    back = pd.DataFrame({"kind": ["preempt", "resume"], "request": [0.0, 0.0], "t_ns": [30, 155]})
    soon = back.assign(t_ns=[30, 50])

    def third(events: pd.DataFrame) -> int:
        found = served_bounds(sequences, requests, events, steps, TOKENS, [0, 1, 2], 4, 2).clairvoyant
        assert found[:2].tolist() == [0, 4]
        return int(found[2])

    assert third(back) == 0
    # It is back and holds them again; and one of which it is not known when it came back may have held them all along.
    assert third(soon) == 4
    assert third(pd.concat([lost, back])) == 4


def test_what_a_request_generates_is_there_when_it_was_received() -> None:
    """Its reply fills a block at 50 ns: who comes at 40 with the reply in the prompt finds the prompt only."""
    prompt, reply = np.arange(4, dtype=np.int32), np.arange(4, 9, dtype=np.int32)
    longer = np.concatenate([prompt, reply, reply])
    sequences = [(prompt, reply), (longer, reply), (longer, reply)]
    requests = pd.DataFrame(
        {
            "scheduled_ns": [10.0, 40.0, 60.0],
            "end_ns": [90.0, 40.0, 90.0],
            "output_tokens": [5, 0, 0],
            "measured": True,
        }
    )
    tokens = pd.DataFrame({"request": 0, "index": range(5), "t_ns": [20, 30, 40, 50, 60]})
    steps = pd.DataFrame({"t_ns": range(10, 210, 10), "kv_usage": 0.0})
    none = pd.DataFrame({"kind": [], "request": [], "t_ns": []})
    found = served_bounds(sequences, requests, none, steps, tokens, [0, 1, 2], 4, 10)
    assert found.infinite.tolist() == [0, 4, 12]
