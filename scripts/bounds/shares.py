"""How equal service could have been, and who asks for more than a share."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from harness.metrics.fairness_windows import jain_index

Floats = npt.NDArray[np.float64]

# Ways to deal out whole prompts that are tried in one window; what is beyond counts as divisible.
_MOST_WAYS = 4096


def water_fill(fixed: Floats, weight: Floats, amount: float) -> Floats:
    """`fixed` raised to one level with `amount`, of which a unit of level takes `weight`."""
    if amount <= 0:
        return fixed
    order = np.argsort(fixed, kind="stable")
    level, used, filled = float(fixed[order[0]]), 0.0, 0.0
    for index in order:
        need = (float(fixed[index]) - level) * used
        if filled + need >= amount:
            break
        filled, level = filled + need, float(fixed[index])
        used += float(weight[index])
    return np.maximum(fixed, level + (amount - filled) / used)


def whole_jain(fixed: Floats, weight: Floats, whole: Floats, amount: float) -> float:
    """Most equal service over weight if each of `whole` tokens goes to one tenant, and `amount` is dealt out as it helps."""
    items = np.sort(whole)[::-1]
    count = len(items)
    while count and len(fixed) ** count > _MOST_WAYS:
        count -= 1
    rest = amount + float(items[count:].sum())
    best = 0.0
    for owners in itertools.product(range(len(fixed)), repeat=count):
        service = fixed.copy()
        for owner, tokens in zip(owners, items, strict=False):
            service[owner] += tokens / weight[owner]
        best = max(best, jain_index(water_fill(service, weight, rest)))
    return best


def max_min(offered: Floats, weight: Floats, capacity: float) -> Floats:
    """Each gets what it asks for, or a share by weight of what those who ask for less leave."""
    got, open_ = np.zeros(len(offered)), np.ones(len(offered), dtype=bool)
    left = capacity
    while open_.any():
        share = left * weight / weight[open_].sum()
        content = open_ & (offered <= share)
        if not content.any():
            got[open_] = share[open_]
            break
        got[content] = offered[content]
        left -= float(offered[content].sum())
        open_ &= ~content
    return got
