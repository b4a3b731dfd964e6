"""What a metric measures, in a form that can be evaluated again on any resampling of the blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """Values in ascending order and the block of each; shapes (n,)."""

    values: Floats
    blocks: Ints

    @cached_property
    def grouped(self) -> tuple[Floats, Ints]:
        """The values block by block, ascending in each, and where each block begins (and the last ends)."""
        # radix sort on a small type: the order by value within a block stays
        order = np.argsort(self.blocks.astype(np.int16), kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(self.blocks))])
        return self.values[order], starts


@dataclass(frozen=True, slots=True)
class Percentile:
    """The nearest-rank percentile of a sample: the value at rank ceil(percent * n / 100)."""

    sample: Sample
    percent: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """A sum over blocks divided by another one: means, rates, shares. Shapes (blocks,); n is the count behind it."""

    numerator: Floats
    denominator: Floats
    n: int


@dataclass(frozen=True, slots=True)
class Plain:
    """A value without an interval of its own (a maximum, a count that a patch reports)."""

    value: float
    n: int


@dataclass(frozen=True, slots=True)
class Nothing:
    """No value, and why."""

    reason: str


Measure = Percentile | Ratio | Plain | Nothing


def nearest_rank(values: Floats, percent: int) -> float:
    """The nearest-rank percentile of ascending `values`; ValueError where there are none."""
    if len(values) == 0:
        raise ValueError("no values")
    return float(values[max(-(-percent * len(values) // 100), 1) - 1])
