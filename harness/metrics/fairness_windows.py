"""Figures over fixed stretches of time: fairness in 5 s windows, tokens in each second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.metrics.derive import Chunks
from harness.stats.blocks import BlockGrid, Window

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

WINDOW_NS = 5_000_000_000
SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Seconds:
    """Tokens received in each second of each measured phase, the length of that second, and its block."""

    tokens: Floats
    length_s: Floats
    blocks: Ints

    @classmethod
    def joined(cls, parts: Sequence[Seconds]) -> Seconds:
        """Several seeds' seconds, one after the other."""
        return cls(
            np.concatenate([p.tokens for p in parts]),
            np.concatenate([p.length_s for p in parts]),
            np.concatenate([p.blocks for p in parts]),
        )


@dataclass(frozen=True, slots=True)
class Shares:
    """Windows of 5 s: when they start, tokens of service over weight, and who was backlogged.

    Shapes (windows,), (tenants, windows) and (tenants, windows).
    """

    starts_ns: Ints
    service: Floats
    backlogged: npt.NDArray[np.bool_]

    def jain(self, window: int) -> float:
        """Jain's index over the tenants that are backlogged in this window."""
        return jain_index(self.service[self.backlogged[:, window], window])


def seconds_of(chunks: Chunks, grid: BlockGrid, seed: int) -> Seconds:
    """Cut each phase into seconds; the last one may be shorter, so that they tile the phase exactly."""
    parts = []
    for window in grid.windows:
        edges = np.append(np.arange(window.start_ns, window.end_ns, SECOND_NS), window.end_ns)
        inside = (chunks.t_ns >= window.start_ns) & (chunks.t_ns < window.end_ns)
        number = (chunks.t_ns[inside] - window.start_ns) // SECOND_NS
        tokens: Floats = np.bincount(number, chunks.tokens[inside], minlength=len(edges) - 1).astype(
            np.float64
        )
        parts.append(Seconds(tokens, np.diff(edges) / 1e9, grid.of_times(seed, edges[:-1])))
    return Seconds.joined(parts)


def jain_index(shares: Floats) -> float:
    """(sum x)^2 / (n sum x^2): 1 if all shares are equal, 1/n if one has everything.

    Source: Jain, Chiu, Hawe, "A quantitative measure of fairness", DEC-TR-301, 1984.
    """
    square = float((shares**2).sum())
    return 1.0 if square == 0 else float(shares.sum()) ** 2 / (len(shares) * square)


def jain_by_window(
    requests: pd.DataFrame, chunks: Chunks, who: Ints, tenants: int, windows: Sequence[Window]
) -> tuple[Floats, Ints]:
    """Jain's index of every whole 5 s window in which two or more tenants are backlogged.

    Returns:
        the indices and the windows' starting times, ns; shapes (windows with a value,).
    """
    shares = shares_by_window(requests, chunks, who, tenants, windows)
    several = np.flatnonzero(shares.backlogged.sum(axis=0) >= 2)
    return np.array([shares.jain(i) for i in several], dtype=np.float64), shares.starts_ns[several]


def shares_by_window(
    requests: pd.DataFrame, chunks: Chunks, who: Ints, tenants: int, windows: Sequence[Window]
) -> Shares:
    """What each tenant got in every whole 5 s window, and whether it wanted more.

    A tenant is backlogged in a window if at every moment of it one of its requests was sent (by
    intention) and not yet scheduled. Its service is the output tokens received in the window plus its
    uncached prompt tokens, which count evenly from first scheduling to first token, over its weight.

    Args:
        who: the tenant's number of each request, shape (requests,).
    """
    starts = np.concatenate([np.arange(w.start_ns, w.end_ns - WINDOW_NS + 1, WINDOW_NS) for w in windows])
    if len(starts) == 0:
        return Shares(starts.astype(np.int64), np.zeros((tenants, 0)), np.zeros((tenants, 0), dtype=bool))
    weight = np.ones(tenants)
    weight[who] = requests["weight"].to_numpy(np.float64)
    service = _service(requests, chunks, who, tenants, starts) / weight[:, None]
    return Shares(starts, service, _backlogged(requests, who, tenants, starts))


def _service(requests: pd.DataFrame, chunks: Chunks, who: Ints, tenants: int, starts: Ints) -> Floats:
    shape = (tenants, len(starts))
    # output: each chunk in the window that holds it
    place = np.searchsorted(starts, chunks.t_ns, side="right") - 1
    inside = (place >= 0) & (chunks.t_ns < starts[np.maximum(place, 0)] + WINDOW_NS)
    flat = who[chunks.request[inside]] * len(starts) + place[inside]
    output = np.bincount(flat, chunks.tokens[inside], minlength=shape[0] * shape[1]).reshape(shape)
    # prompts: the share of each prefill that overlaps the window
    begin = requests["scheduled_ns"].to_numpy(np.float64)
    end = requests["first_token_ns"].to_numpy(np.float64)
    cached = requests["cached_tokens"].fillna(0).to_numpy(np.float64)
    work = requests["prompt_tokens"].to_numpy(np.float64) - cached
    known = ~np.isnan(begin) & ~np.isnan(end)
    begin, end, work, owner = begin[known], end[known], work[known], who[known]
    prompt = np.zeros(shape)
    for column, start in enumerate(starts):
        overlap = np.minimum(end, start + WINDOW_NS) - np.maximum(begin, start)
        share = np.where(overlap > 0, overlap, 0) / np.maximum(end - begin, 1)
        prompt[:, column] = np.bincount(owner, work * share, minlength=tenants)
    total: Floats = output + prompt
    return total


def _backlogged(requests: pd.DataFrame, who: Ints, tenants: int, starts: Ints) -> npt.NDArray[np.bool_]:
    begin = requests["intended_ns"].to_numpy(np.float64)
    end = requests["scheduled_ns"].fillna(requests["end_ns"]).to_numpy(np.float64)
    out = np.zeros((tenants, len(starts)), dtype=bool)
    for tenant in range(tenants):
        mine = (who == tenant) & ~np.isnan(end)
        order = np.argsort(begin[mine], kind="stable")
        first, last = begin[mine][order], end[mine][order]
        if len(first) == 0:
            continue
        # merge overlapping waits: a new stretch begins where nobody sent before is still waiting
        reach = np.maximum.accumulate(last)
        fresh = np.concatenate([[True], first[1:] > reach[:-1]])
        left = first[fresh]
        right = np.append(reach[:-1][fresh[1:]], reach[-1])
        place = np.searchsorted(left, starts, side="right") - 1
        out[tenant] = (place >= 0) & (right[np.maximum(place, 0)] >= starts + WINDOW_NS)
    return out
