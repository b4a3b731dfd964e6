"""In which order a live run measures: arms take turns, in random order and then in its reverse.

A machine drifts (it warms up, its neighbours come and go). Where arms take turns seed by seed, and every second seed
goes through them in the opposite order, a drift that is even in time adds the same to all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def interleaved(arms: Sequence[str], seeds: Sequence[int], key: str) -> list[tuple[str, int]]:
    """(arm, seed) of every task: a seed's arms together, in a random order for one seed and its reverse for the next.

    Args:
        key: what decides the order, so that a run that goes on keeps to it.
    """
    entropy = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8])
    rng = np.random.Generator(np.random.PCG64(entropy))
    out: list[tuple[str, int]] = []
    order: list[int] = []
    for place, seed in enumerate(seeds):
        order = rng.permutation(len(arms)).tolist() if place % 2 == 0 else order[::-1]
        out += [(arms[number], seed) for number in order]
    return out
