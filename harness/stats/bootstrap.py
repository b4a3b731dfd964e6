"""Paired block bootstrap over seeds and time blocks.

A replicate draws as many seeds as there are, with replacement, and for each drawn seed as many blocks
of every phase as that phase has. The draws depend on the shape of the run alone, so every arm sees the
same ones: the difference of two arms' replicates is the paired difference.

Each replicate is a vector of block weights. A sum needs one product with them; a percentile needs the
cumulative counts of each block at a few hundred candidate values, chosen densely around the percentile.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.stats.blocks import BlockGrid
from harness.stats.measures import Measure, Nothing, Percentile, Plain, Ratio, Sample, nearest_rank

Floats = npt.NDArray[np.float64]
REPLICATES = 500
CANDIDATES = 192
# From fewer samples the largest one may well lie below the true p99 (0.99**459 is 1%).
P99_SAMPLES = 459
# From here on, searching in sorted blocks is cheaper than counting every value.
_LARGE = 20_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A metric's value in one scope, and its value in every replicate.

    Attributes:
        value: None where there is nothing to measure; then `reason` says why.
        replicates: shape (REPLICATES,), or None where no interval can be given.
        n: samples behind it.
        few_samples: a p99 from fewer than 459 samples.
        blocks: blocks with data; the interval's degrees of freedom come from it.
    """

    value: float | None
    replicates: Floats | None = None
    n: int = 0
    few_samples: bool = False
    blocks: int = 0
    reason: str = ""

    @property
    def ci95(self) -> tuple[float, float] | None:
        """The central 95% of the replicates, widened to hold the value; not corrected for multiplicity."""
        if self.value is None or self.replicates is None:
            return None
        low, high = np.percentile(self.replicates, [2.5, 97.5], method="nearest")
        return min(float(low), self.value), max(float(high), self.value)


@dataclass(frozen=True, slots=True)
class Weights:
    """How often each replicate draws each block; shape (replicates, blocks), float32 (exact integers)."""

    grid: BlockGrid
    draws: npt.NDArray[np.float32]

    @classmethod
    def of(cls, grid: BlockGrid, replicates: int = REPLICATES) -> Weights:
        """The weights of a run of this shape; the same for every arm, process and machine."""
        name = f"bootstrap/{grid.seeds}/" + ",".join(f"{w.number}:{w.blocks}" for w in grid.windows)
        rng = np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])))
        seeds = rng.integers(0, grid.seeds, (replicates, grid.seeds, 1))
        row = np.arange(replicates)[:, None, None] * grid.size
        counts = np.zeros(replicates * grid.size, dtype=np.int64)
        for window, offset in zip(grid.windows, grid.offsets, strict=False):
            drawn = rng.integers(0, window.blocks, (replicates, grid.seeds, window.blocks))
            flat = row + offset + seeds * window.blocks + drawn
            counts += np.bincount(flat.ravel(), minlength=len(counts))
        return cls(grid, counts.reshape(replicates, grid.size).astype(np.float32))


def estimate(measure: Measure, draws: npt.NDArray[np.float32]) -> Estimate:
    """Evaluate a measure on the data and on every replicate.

    Args:
        measure: its block numbers count from the first column of `draws`.
        draws: block weights, shape (replicates, blocks of the scope).
    """
    match measure:
        case Nothing(reason):
            return Estimate(None, reason=reason)
        case Plain(value, n):
            return Estimate(value, n=n)
        case Ratio(numerator, denominator, n):
            below = float(denominator.sum())
            if below == 0:
                return Estimate(None, n=n, reason="nothing to divide by in this scope")
            totals: Floats = draws.astype(np.float64) @ np.stack([numerator, denominator], axis=1)
            replicates = _filled(totals[:, 0], totals[:, 1])
            used = int(np.count_nonzero(denominator))
            return Estimate(float(numerator.sum()) / below, replicates, n, False, used)
        case Percentile(sample, percent):
            return _percentile(sample, percent, draws)


def _percentile(sample: Sample, percent: int, draws: npt.NDArray[np.float32]) -> Estimate:
    n = len(sample.values)
    if n == 0:
        return Estimate(None, reason="no samples in this scope")
    # each candidate's rank is that of its last tie, so that the order of equal values does not matter
    chosen = sample.values[candidate_ranks(n, percent) - 1]
    ranks = np.unique(np.searchsorted(sample.values, chosen, side="right"))
    candidates = sample.values[ranks - 1]
    width = len(ranks)
    below = _counts_below(sample, ranks, draws.shape[1])
    cumulative = draws @ below.astype(np.float32)
    total = cumulative[:, -1].astype(np.int64)
    rank = -(-percent * total // 100)
    place = np.minimum((cumulative < rank[:, None]).sum(axis=1), width - 1)
    few = percent >= 99 and n < P99_SAMPLES
    used = int(np.count_nonzero(below[:, -1]))
    point = nearest_rank(sample.values, percent)
    replicates = np.where(total > 0, candidates[place], point)
    return Estimate(point, replicates, n, few, used)


def _counts_below(sample: Sample, ranks: npt.NDArray[np.int64], blocks: int) -> npt.NDArray[np.int64]:
    """How many values of each block are not above each candidate; shape (blocks, candidates)."""
    width = len(ranks)
    if len(sample.values) > _LARGE:
        values, starts = sample.grouped
        candidates = sample.values[ranks - 1]
        below = np.zeros((blocks, width), dtype=np.int64)
        for block, (start, end) in enumerate(itertools.pairwise(starts)):
            below[block] = np.searchsorted(values[start:end], candidates, side="right")
        return below
    # a value at or below candidate j is counted from column j on
    column = np.repeat(np.arange(width), np.diff(ranks, prepend=0))
    counts = np.bincount(sample.blocks * width + column, minlength=blocks * width)
    return np.cumsum(counts.reshape(blocks, width), axis=1)


def candidate_ranks(n: int, percent: int, limit: int = CANDIDATES) -> npt.NDArray[np.int64]:
    """The ranks (1 to n, ascending, n and the percentile's own among them) that stand for a sample.

    All of them up to `limit`; beyond, half lie within 2.5 logits of the percentile and half are
    spread evenly.
    """
    if n <= limit:
        return np.arange(1, n + 1)
    level = percent / 100
    logits = np.log(level / (1 - level)) + np.linspace(-2.5, 2.5, limit // 2)
    near = np.ceil(n / (1 + np.exp(-logits))).astype(np.int64)
    even = np.linspace(1, n, limit - len(near) - 1).astype(np.int64)
    own = -(-percent * n // 100)
    return np.unique(np.clip(np.concatenate([near, even, [own, n]]), 1, n))


def _filled(numerator: Floats, denominator: Floats) -> Floats:
    """Quotients, with the pooled one where a replicate drew nothing."""
    empty = denominator == 0
    safe = np.where(empty, 1.0, denominator)
    pooled = numerator.sum() / denominator.sum()
    out: Floats = np.where(empty, pooled, numerator / safe)
    return out
