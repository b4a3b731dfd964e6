"""All seeds of one arm together, and the views of it that scopes take.

Only measured requests are in a pool's rows; tokens and steps are credited to the block of time in
which they happen, whoever caused them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.errors import UserError
from harness.metrics import derive, energy, fairness_windows, moved
from harness.metrics.scope import Scope
from harness.records import ArmRecord
from harness.stats.blocks import BlockGrid, Window
from harness.stats.measures import Measure, Nothing, Ratio, Sample

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


# Of the measured phases' start, what counts as a cold cache.
COLD_NS = 10_000_000_000


@dataclass(frozen=True, slots=True)
class Points:
    """Values in ascending order, each belonging to a row of the pool; shapes (n,)."""

    values: Floats
    rows: Ints


_NO_POINTS = Points(np.zeros(0), np.zeros(0, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Pool:
    """One arm: pooled rows (measured requests), and sums per block.

    Attributes:
        columns: per-row arrays, shape (rows,).
        blocks: the block of each row, by the time at which it was to be sent.
        tenant, phase: per row; `tenants` and `tiers` name the codes.
        gaps, recoveries, restores: gaps between chunks, and times from preemption and from resumption to next token,
            ms, by the tenants' codes: everybody, each tier, each tenant.
        step_values: per-step arrays in windows, with `step_blocks`.
        tokens: output tokens received, shape (tenants, blocks).
        busy_ns: GPU-busy time, shape (blocks,).
        joules: energy of the GPUs, shape (blocks,); None where nothing sampled them.
        moved_bytes: between the device's memory and tiers below it, shape (blocks,); None where nothing recorded it.
        no_joules: why the energy is not valid; empty where it is.
        jain: fairness of each 5 s window that has two backlogged tenants, with `jain_blocks`.
        second_tokens: tokens received in each second of each window, with its length and block.
    """

    grid: BlockGrid
    tenants: tuple[str, ...]
    tiers: tuple[str, ...]
    columns: dict[str, Floats]
    blocks: Ints
    tenant: Ints
    phase: Ints
    gaps: dict[tuple[int, ...], Points]
    recoveries: dict[tuple[int, ...], Points]
    restores: dict[tuple[int, ...], Points]
    step_values: dict[str, Floats]
    step_blocks: Ints
    tokens: Floats
    busy_ns: Floats
    moved_bytes: Floats | None
    joules: Floats | None
    no_joules: str
    jain: Floats
    jain_blocks: Ints
    peak: fairness_windows.Seconds


def windows_of(record: ArmRecord) -> tuple[Window, ...]:
    """The measured phases of a record's manifest, in order of time."""
    phases = [p for p in record.manifest["workload"]["phases"] if p["measured"]]
    phases.sort(key=lambda p: p["start_ns"])
    return tuple(Window(p["number"], p["start_ns"], p["end_ns"]) for p in phases)


def pool_of(records: Sequence[ArmRecord]) -> Pool:
    """Pool the seeds of one arm; UserError where their phases differ."""
    windows = windows_of(records[0])
    if any(windows_of(record) != windows for record in records):
        raise UserError(
            f"{records[0].path.parent}: its seeds have different phases; delete this folder and run again"
        )
    grid = BlockGrid(windows, len(records))
    tiers_by_tenant = {t["name"]: t["tier"] for t in records[0].manifest["workload"]["tenants"]}
    tenants, tiers = tuple(tiers_by_tenant), tuple(tiers_by_tenant.values())
    code = {name: i for i, name in enumerate(tenants)}
    priorities = {t["name"]: int(t.get("priority", 0)) for t in records[0].manifest["workload"]["tenants"]}

    rows: list[pd.DataFrame] = []
    gaps: list[tuple[Ints, Floats]] = []
    recovered: list[tuple[Ints, Floats]] = []
    restored: list[tuple[Ints, Floats]] = []
    steps: list[pd.DataFrame] = []
    step_blocks: list[Ints] = []
    jain: list[tuple[Floats, Ints]] = []
    seconds: list[fairness_windows.Seconds] = []
    tokens = np.zeros((len(tenants), grid.size))
    busy = np.zeros(grid.size)
    base = 0
    for seed, record in enumerate(records):
        requests = record.requests
        chunks = derive.chunks_of(record.tokens)
        who = requests["tenant"].map(code).to_numpy(np.int64)
        frame = _row_columns(requests, derive.request_figures(requests, chunks))
        frame["cold_ttft_ms"] = frame["ttft_ms"].where(
            requests["intended_ns"] < windows[0].start_ns + COLD_NS, np.nan
        )
        frame["overtakes"] = derive.overtakes(requests, priorities)
        frame["block"] = grid.of_requests(seed, requests["phase"], requests["intended_ns"])
        frame["tenant"] = who
        # rows are numbered over all seeds; -1 marks a request that is not measured
        counted = requests["measured"].to_numpy(bool) & (frame["block"].to_numpy() >= 0)
        row = np.where(counted, np.cumsum(counted) - 1 + base, -1)
        ok = counted & (requests["status"].to_numpy(object) == "ok")
        rows.append(frame[counted])
        owner, length, _ = chunks.gaps()
        gaps.append((row[owner][ok[owner]], length[ok[owner]]))
        owner, length = derive.recoveries(record.events, chunks)
        recovered.append((row[owner][counted[owner]], length[counted[owner]]))
        owner, length = derive.restores(record.events, chunks)
        restored.append((row[owner][counted[owner]], length[counted[owner]]))
        # what belongs to time, not to a request
        block = grid.of_times(seed, chunks.t_ns)
        inside = block >= 0
        flat = who[chunks.request[inside]] * grid.size + block[inside]
        tokens += np.bincount(flat, chunks.tokens[inside], minlength=tokens.size).reshape(tokens.shape)
        for window, offset in zip(grid.windows, grid.offsets, strict=False):
            done = derive.busy_ns_before(record.steps, grid.edges(window))
            first = offset + seed * window.blocks
            busy[first : first + window.blocks] = np.diff(done)
        block = grid.of_times(seed, record.steps["t_ns"])
        steps.append(record.steps[block >= 0])
        step_blocks.append(block[block >= 0])
        fair, start = fairness_windows.jain_by_window(requests, chunks, who, len(tenants), grid.windows)
        jain.append((fair, grid.of_times(seed, start)))
        seconds.append(fairness_windows.seconds_of(chunks, grid, seed))
        base += int(counted.sum())

    joules, no_joules = energy.joules_by_block([record.path for record in records], grid)
    table = pd.concat(rows, ignore_index=True)
    step = pd.concat(steps, ignore_index=True)
    numeric = {name: table[name].to_numpy(np.float64) for name in table.columns}
    return Pool(
        grid=grid,
        tenants=tenants,
        tiers=tiers,
        columns=numeric,
        blocks=table["block"].to_numpy(np.int64),
        tenant=table["tenant"].to_numpy(np.int64),
        phase=table["phase"].to_numpy(np.int64),
        gaps=_points(gaps, table["tenant"].to_numpy(np.int64), tiers),
        recoveries=_points(recovered, table["tenant"].to_numpy(np.int64), tiers),
        restores=_points(restored, table["tenant"].to_numpy(np.int64), tiers),
        step_values={
            "step_ms": ((step["end_ns"] - step["start_ns"]) / 1e6).to_numpy(np.float64),
            "kv_usage": step["kv_usage"].to_numpy(np.float64),
            "waiting": (step["waiting"] + step["held"]).to_numpy(np.float64),
            "running": step["running"].to_numpy(np.float64),
            "prefill_tokens": step["prefill_tokens"].to_numpy(np.float64),
            "evicted": step["evicted"].to_numpy(np.float64),
        },
        step_blocks=np.concatenate(step_blocks),
        tokens=tokens,
        busy_ns=busy,
        moved_bytes=moved.bytes_by_block([record.path for record in records], grid),
        joules=joules,
        no_joules=no_joules,
        jain=np.concatenate([fair for fair, _ in jain]),
        jain_blocks=np.concatenate([block for _, block in jain]),
        peak=fairness_windows.Seconds.joined(seconds),
    )


def _row_columns(requests: pd.DataFrame, figures: dict[str, Floats]) -> pd.DataFrame:
    status = requests["status"].to_numpy(object)
    cached = requests["cached_tokens"].to_numpy(np.float64)
    admitted = ~np.isnan(cached)
    return pd.DataFrame(
        {
            **figures,
            "phase": requests["phase"],
            "short": requests["short"],
            "one": 1.0,
            "rejected": status == "rejected",
            "expired": status == "expired",
            "cancelled": status == "cancelled",
            "finished_ttft_ms": np.where(status == "ok", figures["ttft_ms"], np.nan),
            "failed": status == "failed",
            "preemptions": requests["preemptions"],
            "recomputed_tokens": requests["recomputed_tokens"],
            "cached_tokens": np.where(admitted, cached, 0.0),
            "admitted_tokens": np.where(admitted, requests["prompt_tokens"], 0),
        }
    )


def _points(
    parts: Sequence[tuple[Ints, Floats]], tenant_of_row: Ints, tiers: Sequence[str]
) -> dict[tuple[int, ...], Points]:
    """Sorted once for everybody, each tier and each tenant: there may be millions of gaps."""
    rows = np.concatenate([rows for rows, _ in parts])
    values = np.concatenate([values for _, values in parts])
    order = np.argsort(values)
    everybody = Points(values[order], rows[order])
    who = tenant_of_row[everybody.rows].astype(np.int16)
    groups = [tuple(range(len(tiers))), *((number,) for number in range(len(tiers)))]
    groups += [tuple(i for i, one in enumerate(tiers) if one == tier) for tier in dict.fromkeys(tiers)]
    out: dict[tuple[int, ...], Points] = {}
    for group in groups:
        member = np.zeros(len(tiers), dtype=bool)
        member[list(group)] = True
        keep = member[who]
        out[group] = Points(everybody.values[keep], everybody.rows[keep])
    return out


@dataclass(slots=True)
class View:
    """One scope of one arm. Block numbers in it count from the scope's first block."""

    pool: Pool
    scope: Scope
    rows: Ints = field(init=False)
    inside: Bools = field(init=False)
    span: slice = field(init=False)
    who: Bools = field(init=False)
    _samples: dict[tuple[str, bool], Sample] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        pool, scope = self.pool, self.scope
        self.who = np.array(
            [
                scope.tenant in (None, name) and scope.tier in (None, tier)
                for name, tier in zip(pool.tenants, pool.tiers, strict=True)
            ],
            dtype=bool,
        )
        self.inside = self.who[pool.tenant]
        if scope.phases is not None:
            self.inside = self.inside & np.isin(pool.phase, scope.phases)
        self.rows = np.flatnonzero(self.inside)
        self.span = pool.grid.of_phases(scope.phases)

    @property
    def size(self) -> int:
        """Blocks in this scope."""
        return int(self.span.stop - self.span.start)

    @property
    def blocks(self) -> Ints:
        """The block of each row in scope."""
        blocks: Ints = self.pool.blocks[self.rows] - self.span.start
        return blocks

    @property
    def seconds(self) -> Floats:
        """The length of each block, s."""
        return self.pool.grid.seconds()[self.span]

    @property
    def tokens(self) -> Floats:
        """Output tokens that the scope's tenants received in each block."""
        total: Floats = self.pool.tokens[self.who].sum(axis=0)[self.span]
        return total

    def column(self, name: str) -> Floats:
        """A per-row array, rows in scope only."""
        return self.pool.columns[name][self.rows]

    def sample(self, name: str, *, short: bool = False) -> Sample:
        """The values of a column in ascending order, without NaN."""
        key = (name, short)
        if key not in self._samples:
            values = self.column(name)
            keep = ~np.isnan(values)
            if short:
                keep &= self.column("short") > 0
            values, blocks = values[keep], self.blocks[keep]
            order = np.argsort(values, kind="stable")
            self._samples[key] = Sample(values[order], blocks[order])
        return self._samples[key]

    def points(self, name: str) -> Sample:
        """The scope's part of `gaps`, `recoveries` or `restores`."""
        key = (name, False)
        if key not in self._samples:
            source: dict[tuple[int, ...], Points] = getattr(self.pool, name)
            points = source.get(tuple(np.flatnonzero(self.who).tolist()), _NO_POINTS)
            keep = self.inside[points.rows]
            blocks = self.pool.blocks[points.rows[keep]] - self.span.start
            self._samples[key] = Sample(points.values[keep], blocks)
        return self._samples[key]

    def steps(self, name: str) -> Sample:
        """A per-step array of the steps scheduled in the scope's time, ascending."""
        key = (f"step:{name}", False)
        if key not in self._samples:
            pool = self.pool
            keep = (pool.step_blocks >= self.span.start) & (pool.step_blocks < self.span.stop)
            values, blocks = pool.step_values[name][keep], pool.step_blocks[keep] - self.span.start
            order = np.argsort(values, kind="stable")
            self._samples[key] = Sample(values[order], blocks[order])
        return self._samples[key]

    def summed(self, values: Floats, blocks: Ints) -> Floats:
        """Sums per block, shape (size,)."""
        return np.bincount(blocks, values, minlength=self.size).astype(np.float64)

    def ratio(self, values: Floats, blocks: Ints, below: Floats | None, n: int) -> Measure:
        """The sum of values over the sum of `below` (None: their number)."""
        if n == 0:
            return Nothing("no request in this scope has a value")
        weights = np.ones(len(values)) if below is None else below
        return Ratio(self.summed(values, blocks), self.summed(weights, blocks), n)

    def per_seed(self, name: str) -> Measure:
        """The sum of a column, averaged over seeds."""
        if self.size == 0:
            return Nothing("no measured phase in this scope")
        seeds = self.pool.grid.seeds
        # every replicate draws as many blocks as there are, so the denominator is always the number of seeds;
        # both sides are scaled to whole numbers, for a count to come out whole
        total = self.summed(self.column(name), self.blocks) * self.size
        return Ratio(total, np.full(self.size, float(seeds)), len(self.rows))
