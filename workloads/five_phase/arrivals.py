"""When requests are sent: an open loop, so nobody waits for an answer before sending the next."""

from __future__ import annotations

import numpy as np

from workloads.five_phase.phases import NS_PER_S
from workloads.request import Phase


def poisson_ns(rng: np.random.Generator, rate_rps: float, phase: Phase) -> list[int]:
    """Send times, ns from the run's start, of a Poisson process over the phase, in order."""
    if rate_rps <= 0:
        return []
    span_s = (phase.end_ns - phase.start_ns) / NS_PER_S
    times_s: list[float] = []
    now_s = 0.0
    while now_s < span_s:
        # Gaps are drawn in batches of a fixed size: a longer phase then begins as a shorter one does.
        for gap_s in rng.exponential(1 / rate_rps, size=256):
            now_s += float(gap_s)
            times_s.append(now_s)
    offsets = (round(time_s * NS_PER_S) for time_s in times_s)
    return [phase.start_ns + offset for offset in offsets if phase.start_ns + offset < phase.end_ns]
