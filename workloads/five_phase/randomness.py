"""Random streams and draws. Each (tenant, phase, part) has a stream of its own.

So the requests of a phase do not depend on which phases were asked for, and a tenant's requests do
not depend on how many another one sends.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

# Spread of the lengths: the middle two thirds lie between 0.6 and 1.6 times the median.
LENGTH_SIGMA = 0.5
LENGTH_CAP = 4


def stream(seed: int, *key: int) -> np.random.Generator:
    """The generator of one part of the workload, told apart from all others by `key`."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy=seed, spawn_key=key)))


def scaled(tokens: float, length_scale: float) -> int:
    """A number of tokens times the length scale: a whole number, at least 1."""
    return max(1, round(tokens * length_scale))


def draw_length(rng: np.random.Generator, mean: float) -> int:
    """A log-normal number of tokens around `mean`: at least 1, at most four times the mean."""
    drawn = rng.lognormal(math.log(mean) - LENGTH_SIGMA**2 / 2, LENGTH_SIGMA)
    return max(1, min(round(drawn), round(LENGTH_CAP * mean)))


def zipf_cumulative(items: int, exponent: float) -> npt.NDArray[np.float64]:
    """Cumulative probabilities, shape (items,), of ranks whose popularity falls as rank ** -exponent."""
    popularity = np.arange(1, items + 1, dtype=np.float64) ** -exponent
    cumulative: npt.NDArray[np.float64] = np.cumsum(popularity / popularity.sum())
    # The last one is exactly 1, so that no draw falls past it.
    cumulative[-1] = 1.0
    return cumulative
