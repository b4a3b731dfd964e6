"""From the records of one arm and seed to per-request figures. All latency counts from the intended send time."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Chunks:
    """Tokens that one request received at one time; ordered by request, then time. Shapes (chunks,)."""

    request: Ints
    t_ns: Ints
    tokens: Ints

    def gaps(self) -> tuple[Ints, Floats, Ints]:
        """Request, length in ms, and tokens of the later chunk, for each pair of neighbouring chunks."""
        same = self.request[1:] == self.request[:-1]
        length = (self.t_ns[1:] - self.t_ns[:-1])[same] / 1e6
        return self.request[1:][same], length, self.tokens[1:][same]


def chunks_of(tokens: pd.DataFrame) -> Chunks:
    """Group tokens of one request with one time into chunks."""
    request = tokens["request"].to_numpy(np.int64)
    t_ns = tokens["t_ns"].to_numpy(np.int64)
    order = np.lexsort((t_ns, request))
    request, t_ns = request[order], t_ns[order]
    starts = np.flatnonzero(np.diff(request, prepend=-1) | np.diff(t_ns, prepend=-1))
    sizes = np.diff(starts, append=len(request))
    return Chunks(request[starts], t_ns[starts], sizes)


def request_figures(requests: pd.DataFrame, chunks: Chunks) -> dict[str, Floats]:
    """Latencies, waits and the SLO's outcome of each request, in its row's place; NaN is "no sample".

    Returns arrays of shape (requests,): `ttft_ms`, `ttft_output_ms`, `tpot_ms`, `e2e_ms`, `queue_wait_ms`,
    `send_delay_ms`, `jitter_ms`, and 0 or 1 in `met`, `missed`, `error`, `censored`.
    """
    intended = requests["intended_ns"].to_numpy(np.float64)
    status = requests["status"].to_numpy(object)
    ok, cancelled = status == "ok", status == "cancelled"
    first = requests["first_token_ns"].to_numpy(np.float64)
    served = (ok | cancelled) & ~np.isnan(first)
    since = {name: (requests[f"{name}_ns"].to_numpy(np.float64) - intended) / 1e6 for name in _TIMES}

    rest = (requests["output_tokens"] - requests["first_chunk_tokens"]).to_numpy(np.float64)
    span_ms = since["last_token"] - since["first_token"]
    tpot = np.where(ok & (rest > 0), span_ms / np.where(rest > 0, rest, 1), np.nan)

    slo = requests["slo_ttft_ms"].to_numpy(np.float64)
    censored = cancelled & np.isnan(first)
    # how long a request that was cancelled before its first token had waited by then
    waited = np.where(np.isnan(since["end"]), since["cancel"], since["end"])
    late = np.where(served, since["first_token"] > slo, np.where(censored, waited > slo, True))
    return {
        "ttft_ms": np.where(served, since["first_token"], np.nan),
        "ttft_output_ms": np.where(served, since["first_output"], np.nan),
        "tpot_ms": tpot,
        "e2e_ms": np.where(ok, since["last_token"], np.nan),
        "queue_wait_ms": np.where(status != "failed", since["scheduled"], np.nan),
        "send_delay_ms": since["sent"],
        "jitter_ms": np.where(ok, _gap_deviation(chunks, len(requests)), np.nan),
        "met": (served & ~late).astype(np.float64),
        "missed": late.astype(np.float64),
        "error": (~ok & ~cancelled).astype(np.float64),
        "censored": censored.astype(np.float64),
    }


_TIMES = ("sent", "scheduled", "first_token", "first_output", "last_token", "end", "cancel")


def _gap_deviation(chunks: Chunks, rows: int) -> Floats:
    """Standard deviation of each request's chunk gaps, ms; NaN below two gaps."""
    owner, gap, _ = chunks.gaps()
    count = np.bincount(owner, minlength=rows)
    safe = np.maximum(count, 1)
    mean = np.bincount(owner, gap, minlength=rows) / safe
    square = np.bincount(owner, (gap - mean[owner]) ** 2, minlength=rows)
    return np.where(count >= 2, np.sqrt(square / safe), np.nan)


def recoveries(events: pd.DataFrame, chunks: Chunks) -> tuple[Ints, Floats]:
    """Request and time from each preemption to that request's next token, ms.

    Where a resumption is recorded, the next token is the first one after it: the output of a step that
    was in flight at the preemption is no recovery. Preemptions without a later token give no sample.
    """
    kinds = events["kind"].to_numpy(object)
    known = ~np.isnan(events["request"].to_numpy(np.float64))
    lost = events[(kinds == "preempt") & known]
    back = events[(kinds == "resume") & known]
    owner = lost["request"].to_numpy(np.int64)
    t_ns = lost["t_ns"].to_numpy(np.int64)
    back_owner, back_ns = _sorted(back["request"].to_numpy(np.int64), back["t_ns"].to_numpy(np.int64))
    resumed = _next(back_owner, back_ns, owner, t_ns)
    token = _next(chunks.request, chunks.t_ns, owner, np.where(resumed >= 0, resumed, t_ns))
    seen = token >= 0
    return owner[seen], (token - t_ns)[seen] / 1e6


def restores(events: pd.DataFrame, chunks: Chunks) -> tuple[Ints, Floats]:
    """Request and time from each resumption to that request's next token, ms: recovery without the queue.

    A resumption is the first pass that gives a preempted request tokens again; where its blocks are fetched from a tier
    first, the events say when that began (`load`), and it counts from there. Those without a later token give no sample.
    """
    kinds = events["kind"].to_numpy(object)
    known = ~np.isnan(events["request"].to_numpy(np.float64))
    back, loads = (events[(kinds == kind) & known] for kind in ("resume", "load"))
    owner, t_ns = back["request"].to_numpy(np.int64), back["t_ns"].to_numpy(np.int64)
    token = _next(chunks.request, chunks.t_ns, owner, t_ns)
    begun = t_ns.copy()
    for row, at in zip(loads["request"].to_numpy(np.int64), loads["t_ns"].to_numpy(np.int64), strict=True):
        mine = np.flatnonzero((owner == row) & (t_ns >= at))
        if len(mine):
            first = mine[np.argmin(t_ns[mine])]
            begun[first] = min(begun[first], at)
    seen = token >= 0
    return owner[seen], (token - begun)[seen] / 1e6


def overtakes(requests: pd.DataFrame, priorities: dict[str, int]) -> Floats:
    """For each request the number of requests of equal priority that were sent later and admitted earlier.

    NaN for one that was never admitted. Those admitted in one step overtake each other by the order in which they were
    sent, that is, not at all.

    Args:
        priorities: vLLM's, by tenant.

    Returns:
        Shape (requests,).
    """
    sent = requests["sent_ns"].to_numpy(np.float64)
    admitted = requests["scheduled_ns"].to_numpy(np.float64)
    level = requests["tenant"].map(priorities).to_numpy(np.float64)
    out = np.full(len(requests), np.nan)
    for priority in np.unique(level):
        rows = np.flatnonzero((level == priority) & ~np.isnan(admitted) & ~np.isnan(sent))
        rows = rows[np.lexsort((rows, sent[rows]))]
        later: list[float] = []
        # From the last that was sent: of those behind it, the ones that were admitted before it.
        for row in rows[::-1].tolist():
            place = bisect_left(later, admitted[row])
            out[row] = place
            later.insert(place, float(admitted[row]))
    return out


def _sorted(owner: Ints, t_ns: Ints) -> tuple[Ints, Ints]:
    order = np.lexsort((t_ns, owner))
    return owner[order], t_ns[order]


def _next(owners: Ints, times: Ints, owner: Ints, after: Ints) -> Ints:
    """The first of `times` later than `after` with the same owner; -1 where there is none."""
    if len(owners) == 0:
        return np.full(len(owner), -1, dtype=np.int64)
    span = int(max(times.max(), after.max(initial=0))) + 1
    place = np.searchsorted(owners * span + times, owner * span + after, side="right")
    inside = np.minimum(place, len(owners) - 1)
    found = (place < len(owners)) & (owners[inside] == owner)
    return np.where(found, times[inside], -1)


def busy_ns_before(steps: pd.DataFrame, t_ns: Floats) -> Floats:
    """GPU-busy ns from the run's start to each time; steps run one after the other."""
    start = steps["start_ns"].to_numpy(np.float64)
    end = steps["end_ns"].to_numpy(np.float64)
    if len(start) == 0:
        return np.zeros(len(t_ns))
    total = np.concatenate([[0.0], np.cumsum(end - start)])
    place = np.searchsorted(start, t_ns, side="right")
    inside = np.maximum(place - 1, 0)
    over = np.where(place > 0, np.minimum(t_ns - start[inside], end[inside] - start[inside]), 0.0)
    before: Floats = np.where(place > 0, total[inside], 0.0) + over
    return before
