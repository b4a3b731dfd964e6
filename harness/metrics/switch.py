"""How long a tenant's prefix hits are gone after its prompt has changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

Floats = npt.NDArray[np.float64]

WINDOW_S = 2.0
STEP_S = 0.25
BACK_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Return:
    """One switch of a prompt.

    Attributes:
        switch_s: when it was. before: hit rate until then, or nan.
        back_s: time from it until hits were back; the time until the next switch, or the phase's end, if they never
            were. back: whether they were.
    """

    switch_s: float
    before: float
    back_s: float
    back: bool


def returns(
    seeds: Sequence[pd.DataFrame], tenant: str, start_s: float, switches_s: Sequence[float], end_s: float
) -> list[Return]:
    """Of each switch, when the tenant's hit rate was back to 95% of what it was before the first of them.

    Before: first admissions from `start_s` to the first switch. Back: from then on in the first 2 s (moved on by a
    quarter) in which first admissions, all seeds together, found that share of their prompt tokens.

    Args:
        seeds: each seed's `requests`. start_s: of the phase before. end_s: of the phase of the switches.
    """
    of_tenant = [one[(one["tenant"] == tenant) & one["cached_tokens"].notna()] for one in seeds]
    rows = pd.concat(of_tenant, ignore_index=True)
    at = rows["scheduled_ns"].to_numpy(np.float64) / 1e9
    asked = rows["prompt_tokens"].to_numpy(np.float64)
    found = rows["cached_tokens"].to_numpy(np.float64)

    def rate(low: float, high: float) -> float:
        inside = (at >= low) & (at < high)
        total = float(asked[inside].sum())
        return float(found[inside].sum()) / total if total else float("nan")

    before = rate(start_s, switches_s[0])
    out = []
    for switch, limit in zip(switches_s, [*switches_s[1:], end_s], strict=True):
        back_s, back = limit - switch, False
        for low in np.arange(switch, limit - WINDOW_S + 1e-9, STEP_S).tolist():
            if rate(low, low + WINDOW_S) >= BACK_SHARE * before:
                back_s, back = low - switch, True
                break
        out.append(Return(switch, before, back_s, back))
    return out
