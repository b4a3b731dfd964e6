"""How many hits were to be had: bounds on the prefix hit rate of a run, for the schedule that it served.

Both take the run's own first admissions, in their order and at their times, and the blocks of its prompts:

- `infinite`: nothing is ever evicted. A block of a prompt counts as cached from the moment at which a request that has it
  was first admitted, whether it was computed by then or not; one that holds output from when that was received.
- `clairvoyant`: at the end of each scheduling pass, what is kept for later fits beside what running requests held then
  (the run's own `kv_usage`), and what goes is what is needed again last. (Belady, IBM Systems Journal 5(2), 1966; that
  dropping the interval that ends last is best also where the room changes: Faigle and Nawijn, Discrete Applied
  Mathematics 58, 1995.)

- `whole_pool`: clairvoyant, as if what running requests hold took no room. What it is above `clairvoyant` is lost to their
  memory, not to the choice of what to evict.

No policy of eviction can pass any of them under this schedule. A block that some request references is neither evicted nor
counted as kept; a block is whole or absent; a prefix is found as far as it is whole. Another order of admission has
another bound, so each arm has its own. Where blocks come from elsewhere (tiers below the device's memory, prompts that
no client sent) a run may pass them: then they say how much the device's memory alone could have given.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]

# A request that has ended is freed by the next pass or the one after it; until then its blocks count as referenced.
_FREED_WITHIN_STEPS = 2
# Tokens computed that never reached a client that left.
_IN_FLIGHT_TOKENS = 3
_SEED = 0x5EED
_NEVER_NS = 1 << 62


@dataclass(frozen=True, slots=True)
class Use:
    """A stretch of time in which one request held blocks.

    Attributes:
        blocks: ids, from the prompt's first block on; an id names a block together with all before it.
        wanted: how many of them, from the first, would have been looked for at a first admission whose hits count; 0
            for a resumption.
        at: number of the pass that admitted it. until: number of the first pass at whose end it surely holds none.
        ready: by block the first pass that may find it, ascending; all from `at` on if None.
    """

    blocks: Sequence[int] | Ints
    wanted: int
    at: int
    until: int
    ready: Sequence[int] | Ints | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Hits:
    """Blocks found by each use; shapes (uses,)."""

    infinite: Ints
    whole_pool: Ints
    clairvoyant: Ints


def hits_of(uses: Sequence[Use], free: Sequence[int] | Ints, blocks: int) -> Hits:
    """The bounds of a schedule.

    Args:
        uses: in order of admission.
        free: blocks that nothing referenced at the end of each pass. blocks: the pool's.
    """
    lengths = np.array([len(use.blocks) for use in uses], np.int64)
    total = int(lengths.sum())
    none = np.zeros(len(uses), np.int64)
    if not total:
        return Hits(none, none, none)
    ids = np.concatenate([np.asarray(use.blocks, np.int64) for use in uses])
    owner = np.repeat(np.arange(len(uses)), lengths)
    depth = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    at, until, wanted = (
        np.array([getattr(use, name) for use in uses], np.int64) for name in ("at", "until", "wanted")
    )
    ready = np.concatenate(
        [np.full(len(use.blocks), use.at) if use.ready is None else np.asarray(use.ready) for use in uses]
    ).astype(np.int64)
    # By block, in order of admission: when those before had it first, and when the last of them let go of it.
    order = np.argsort(ids, kind="stable")
    first = np.r_[True, ids[order][1:] != ids[order][:-1]]
    span = max(int(until.max()), int(ready.max())) + 1
    group = np.cumsum(first) * span
    latest = np.maximum.accumulate(group + until[owner[order]]) - group
    earliest = np.minimum.accumulate(ready[order] - group) + group
    since, there = np.empty(total, np.int64), np.empty(total, np.int64)
    since[order] = np.r_[0, latest[:-1]]
    there[order] = np.where(first, span, np.r_[0, earliest[:-1]])
    found = np.flatnonzero((there <= at[owner]) & (depth < wanted[owner]))
    intervals = since[found], at[owner[found]], depth[found]
    by_use = [
        np.bincount(owner[found[_kept(*intervals, room)]], minlength=len(uses))
        for room in (np.full(len(free), blocks), np.asarray(free, np.int64))
    ]
    return Hits(np.bincount(owner[found], minlength=len(uses)), *by_use)


def _kept(start: Ints, end: Ints, depth: Ints, free: Ints) -> Bools:
    """Which intervals [start, end) of passes are kept where at pass k at most `free[k]` may be; the most that can be.

    Of those that end together the deepest goes first: an ancestor's interval lies within its descendant's, so it is
    never gone before it.
    """
    kept = np.ones(len(start), bool)
    rows = np.flatnonzero(start < end)
    alive = np.zeros(len(free) + 1, np.int64)
    np.add.at(alive, np.minimum(start[rows], len(free)), 1)
    np.subtract.at(alive, np.minimum(end[rows], len(free)), 1)
    if (np.cumsum(alive)[:-1] <= free).all():
        return kept
    rows = rows[np.argsort(start[rows], kind="stable")]
    deepest = int(depth.max()) + 1
    # One number a candidate, so that the least is what ends last and lies deepest.
    rank = (-(end[rows] * deepest + depth[rows])).tolist()
    starts, ends, room = start[rows].tolist(), end[rows].tolist(), free.tolist()
    leaving = [0] * (len(room) + 1)
    heap: list[tuple[int, int]] = []
    now_kept = place = 0
    dropped: list[int] = []
    for step, most in enumerate(room):
        while place < len(starts) and starts[place] == step:
            heapq.heappush(heap, (rank[place], place))
            leaving[min(ends[place], len(room))] += 1
            now_kept += 1
            place += 1
        now_kept -= leaving[step]
        while now_kept > most:
            _, one = heapq.heappop(heap)
            leaving[min(ends[one], len(room))] -= 1
            now_kept -= 1
            dropped.append(one)
    kept[rows[dropped]] = False
    return kept


class BlockNames:
    """Numbers for blocks: equal for equal tokens with equal tokens before them, and for no others (64 bits).

    A prefix's name is the sum, modulo 2**64, of one random word a token times one a position.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._random = np.random.Generator(np.random.PCG64(_SEED))
        self._by_token = self._by_place = np.zeros(0, np.uint64)

    def of(self, tokens: npt.NDArray[Any]) -> Words:
        """The names of the whole blocks of one sequence of token ids."""
        count = len(tokens) // self.block_tokens
        used = tokens[: count * self.block_tokens]
        if not count:
            return np.zeros(0, np.uint64)
        self._by_token = self._grown(self._by_token, int(used.max()) + 1)
        self._by_place = self._grown(self._by_place, len(used))
        sums = np.cumsum(self._by_token[used] * self._by_place[: len(used)], dtype=np.uint64)
        return sums[self.block_tokens - 1 :: self.block_tokens]

    def _grown(self, words: Words, size: int) -> Words:
        if len(words) >= size:
            return words
        more = self._random.integers(1 << 64, size=2 * size - len(words), dtype=np.uint64)
        return np.concatenate([words, more])


@dataclass(frozen=True, slots=True, eq=False)
class ServedBounds:
    """The bounds of a run, in tokens by request; 0 where it was not admitted. Shapes (requests,)."""

    block_tokens: int
    blocks: int
    infinite: Ints
    whole_pool: Ints
    clairvoyant: Ints


def served_bounds(
    sequences: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]],
    requests: pd.DataFrame,
    events: pd.DataFrame,
    steps: pd.DataFrame,
    tokens: pd.DataFrame,
    admitted: Sequence[int] | None,
    block_tokens: int,
    blocks: int,
) -> ServedBounds:
    """The bounds of one arm and seed from what it recorded.

    Args:
        sequences: (prompt, true output) of each request, in the order of `requests`.
        admitted: rows in the order in which they were first admitted; by their times if None, which leaves open who
            came first within one pass.
        blocks: the pool's usable blocks: what `kv_usage` is a share of.
    """
    passes = steps["t_ns"].to_numpy(np.int64)
    free = np.rint((1 - steps["kv_usage"].to_numpy(np.float64)) * blocks).astype(np.int64)
    rows, at_ns, until_ns, first = _held(requests, events, admitted)
    at = np.searchsorted(passes, at_ns, side="left")
    until = np.searchsorted(passes, until_ns, side="right") + _FREED_WITHIN_STEPS
    names = BlockNames(block_tokens)
    received = requests["output_tokens"].to_numpy(np.int64)
    measured = requests["measured"].to_numpy(bool)
    begun, ends = _begun(rows, first, at), np.searchsorted(passes, _ended(requests), side="left")
    heard, place = _heard(tokens, len(requests), passes)
    named: dict[int, Words] = {}
    ready: dict[int, Ints] = {}
    for row in dict.fromkeys(rows.tolist()):
        prompt, output = sequences[row]
        named[row] = names.of(np.concatenate([prompt, output[: received[row] + _IN_FLIGHT_TOKENS]]))
        # The token that fills a block; those of the prompt are there at once.
        last = np.arange(1, len(named[row]) + 1) * block_tokens - 1 - len(prompt)
        known = heard[place[row] : place[row + 1]]
        whole = np.full(len(last), begun[row])
        after = last >= 0
        told = last < len(known)
        whole[after & told] = known[last[after & told]]
        whole[after & ~told] = ends[row]
        ready[row] = np.maximum(np.maximum.accumulate(whole), begun[row])
    uses = [
        Use(
            named[row].view(np.int64),
            # The last token is always computed, so a prompt of whole blocks looks for one less.
            max(0, len(sequences[row][0]) - 1) // block_tokens if begins and measured[row] else 0,
            a,
            u,
            ready[row],
        )
        for row, begins, a, u in zip(rows.tolist(), first.tolist(), at.tolist(), until.tolist(), strict=True)
    ]
    found = hits_of(uses, free, blocks)

    def by_request(hits: Ints) -> Ints:
        out = np.zeros(len(requests), np.int64)
        np.add.at(out, rows, hits * block_tokens)
        return out

    by_row = (by_request(hits) for hits in (found.infinite, found.whole_pool, found.clairvoyant))
    return ServedBounds(block_tokens, blocks, *by_row)


def _begun(rows: Ints, first: Bools, at: Ints) -> dict[int, int]:
    """The pass that first admitted each row."""
    return {
        row: a for row, begins, a in zip(rows.tolist(), first.tolist(), at.tolist(), strict=True) if begins
    }


def _heard(tokens: pd.DataFrame, count: int, passes: Ints) -> tuple[Ints, Ints]:
    """The first pass from each output token's arrival on, by request and index, and where each request's begin."""
    owner = tokens["request"].to_numpy(np.int64)
    order = np.lexsort((tokens["index"].to_numpy(np.int64), owner))
    heard = np.searchsorted(passes, tokens["t_ns"].to_numpy(np.int64)[order], side="left")
    place = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=count))])
    return heard, place


def _ended(requests: pd.DataFrame) -> Ints:
    ended = requests["end_ns"].to_numpy(np.float64)
    return np.where(np.isnan(ended), _NEVER_NS, ended).astype(np.int64)


def _held(
    requests: pd.DataFrame, events: pd.DataFrame, admitted: Sequence[int] | None
) -> tuple[Ints, Ints, Ints, Bools]:
    """Row, from when, until when, and whether it was its first admission, of each time a request held blocks."""
    scheduled = requests["scheduled_ns"].to_numpy(np.float64)
    if admitted is None:
        known = np.flatnonzero(~np.isnan(scheduled))
        order = known[np.argsort(scheduled[known], kind="stable")]
    else:
        order = np.asarray(admitted, np.int64)
    at = scheduled[order].astype(np.int64)
    until = _ended(requests)
    kinds = events["kind"].to_numpy(object)
    back = events[kinds == "resume"]
    lost = events[kinds == "preempt"]
    back_rows, back_ns = back["request"].to_numpy(np.int64), back["t_ns"].to_numpy(np.int64)
    # Resumptions first within a pass: whoever comes behind them may find their blocks.
    rows = np.concatenate([back_rows, order])
    start = np.concatenate([back_ns, at])
    first = np.concatenate([np.zeros(len(back_rows), bool), np.ones(len(order), bool)])
    place = np.argsort(start, kind="stable")
    rows, start, first = rows[place], start[place], first[place]
    stop = until[rows]
    cuts = _cuts(lost, back)
    if cuts:
        for i, (row, t_ns) in enumerate(zip(rows.tolist(), start.tolist(), strict=True)):
            for end in cuts.get(row, ()):
                if t_ns < end < stop[i]:
                    stop[i] = end
    return rows, start, stop, first


def _cuts(lost: pd.DataFrame, back: pd.DataFrame) -> dict[int, list[int]]:
    """When each row lost its blocks for a while. One whose resumptions are not all known held them to its end."""
    preempted, resumed = _times(lost), _times(back)
    out: dict[int, list[int]] = {}
    for row, times in preempted.items():
        again = resumed.get(row, [])
        if len(again) == len(times) or (len(again) == len(times) - 1 and max(again, default=0) <= max(times)):
            out[row] = times
    return out


def _times(events: pd.DataFrame) -> dict[int, list[int]]:
    """When something happened to each row."""
    out: dict[int, list[int]] = {}
    rows = events["request"].to_numpy(np.int64).tolist()
    for row, t_ns in zip(rows, events["t_ns"].to_numpy(np.int64).tolist(), strict=True):
        out.setdefault(row, []).append(t_ns)
    return out
