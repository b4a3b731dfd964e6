"""How much of each prompt a cache can have held that was empty when the run began: the bound on prefix hits.

A block of a prompt is in the cache only if a request that was given tokens before, or in the same step, holds the same
block after the same prefix. True outputs count as content too, although a real model writes its own. More hits than
that come from somewhere else: a warm cache of an earlier run, or another client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from workloads.request import PlannedRequest, TokenIds


@dataclass(frozen=True, slots=True)
class Excess:
    """Hits that the traffic cannot explain.

    Attributes:
        tokens: found in the cache beyond the bound, all requests together.
        requests: how many have such a hit.
        first: the first of them, by its place in the workload; None where there is none.
        found, bound: tokens of that request that were found, and that could have been.
        hits: all tokens found. possible: all that could have been.
    """

    tokens: int
    requests: int
    first: int | None
    found: int
    bound: int
    hits: int
    possible: int


def excess(
    requests: Sequence[PlannedRequest],
    scheduled_ns: Sequence[int | None],
    cached_tokens: Sequence[int | None],
    block_size: int,
) -> Excess:
    """Compare hits with the bound.

    Args:
        requests: of the workload.
        scheduled_ns: when each was first given tokens; None where it never was.
        cached_tokens: what each found at its first admission; None as above.
        block_size: tokens in a block.
    """
    paths = _Paths(block_size)
    prompts = [paths.of(request.prompt, drop_last=True) for request in requests]
    # What a request leaves behind: its whole prompt and its answer.
    left = [paths.of(np.concatenate([request.prompt, request.output])) for request in requests]
    served = sorted(
        (when, row)
        for row, when in enumerate(scheduled_ns)
        if when is not None and cached_tokens[row] is not None
    )
    holders: Counter[int] = Counter()
    tokens = count = hits = possible = 0
    first: tuple[int, int, int] | None = None
    for _, group in groupby(served, key=lambda one: one[0]):
        rows = [row for _, row in group]
        for row in rows:
            holders.update(left[row])
        for row in rows:
            own = set(left[row])
            reach = 0
            for block in prompts[row]:
                if holders[block] <= (block in own):
                    break
                reach += 1
            found, bound = int(cached_tokens[row] or 0), reach * block_size
            hits, possible = hits + found, possible + bound
            if found > bound:
                tokens, count = tokens + found - bound, count + 1
                first = (row, found, bound) if first is None or row < first[0] else first
    row_, found_, bound_ = first or (None, 0, 0)
    return Excess(tokens, count, row_, found_, bound_, hits, possible)


class _Paths:
    """Numbers each block together with all before it."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._numbers: dict[tuple[int, bytes], int] = {}

    def of(self, ids: TokenIds, *, drop_last: bool = False) -> list[int]:
        """Numbers of the full blocks; without the one that holds the last token, which is always computed."""
        whole = np.ascontiguousarray(ids, dtype=np.int32)
        full = (len(whole) - drop_last) // self._size
        out, before = [], -1
        for at in range(full):
            block = whole[at * self._size : (at + 1) * self._size].tobytes()
            before = self._numbers.setdefault((before, block), len(self._numbers))
            out.append(before)
        return out
