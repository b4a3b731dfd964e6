"""How much traffic a profile can carry, and the rates of the five phases that follow from it.

Capacity of a mix is the rate at which its backlog starts to grow: the largest scale of a phase's
table of rates at which, over the second half of a long stretch of that mix, the number of unfinished
requests grows by no more than 5% of those that arrive. "GPU busy" would not do: with any decode
running it is 100%. Each phase is held against the capacity of its own mix, since a rate in requests
says nothing when one mix sends long documents and another short questions; phase 1's is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.arms import baseline
from harness.errors import RunFailed
from harness.profiles import Profile, StepTimeModel
from workloads import five_phase
from workloads.request import Workload

LOADS = (0.6, 0.6, 1.05, 1.3, 1.7)
_STRETCH = 2.0
_GROWTH_SHARE = 0.05
_BISECTIONS = 6
_QUARTER = 4.0
_SLO_STEP = 0.25


@dataclass(frozen=True, slots=True)
class Probe:
    """One stretch of one mix: does it keep up?"""

    phase: int
    scale: float
    offered_rps: float
    grown_requests: int
    arrived_requests: int

    @property
    def keeps_up(self) -> bool:
        """Whether the backlog stays."""
        return self.grown_requests <= _GROWTH_SHARE * self.arrived_requests


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the search found for one phase's mix."""

    phase: int
    scale: float
    offered_rps: float
    load: float

    @property
    def rate_scale(self) -> float:
        """Factor on the table's rates that offers `load` of this mix's capacity."""
        return self.load * self.scale


def _mix(phase: int, scale: float, seed: int) -> Workload:
    """A stretch of one phase's mix; the phases before it are silent."""
    factors = [0.0] * len(five_phase.PHASES)
    factors[phase - 1] = scale
    return five_phase.build(
        seed, phases=str(phase), rates=five_phase.RatePlan(tuple(factors)), time_scale=_STRETCH
    )


def probe(profile: Profile, phase: int, scale: float, seed: int) -> Probe:
    """Serve a stretch of the mix on stock flags and see whether the backlog grows."""
    from harness.engines.virtual.engine import VirtualEngine

    flags = baseline(profile, "stock").flags
    workload = _mix(phase, scale, seed)
    step_time = StepTimeModel(profile, flags.max_num_seqs, flags.max_num_batched_tokens)
    engine = VirtualEngine(profile.model_dir, flags, step_time, profile.kv_blocks)
    run = engine.run(workload)
    engine.shutdown()
    table = run.tables["requests"]
    begun = table.column("intended_ns").to_numpy()
    ended = table.column("end_ns").to_numpy(zero_copy_only=False)
    last = workload.phases[-1]
    half_ns = (last.start_ns + last.end_ns) // 2

    def unfinished(at_ns: int) -> int:
        return int(np.sum((begun <= at_ns) & (ended > at_ns)))

    arrived = int(np.sum((begun > half_ns) & (begun <= last.end_ns)))
    return Probe(
        phase=phase,
        scale=scale,
        offered_rps=len(begun) / ((last.end_ns - last.start_ns) / 1e9),
        grown_requests=unfinished(last.end_ns) - unfinished(half_ns),
        arrived_requests=arrived,
    )


def find(
    profile: Profile, phase: int, seed: int, first_scale: float, report: Callable[[Probe], None]
) -> Capacity:
    """Bracket the capacity from `first_scale` by doubling and halving, then bisect it."""
    low = high = first_scale
    probed = probe(profile, phase, low, seed)
    report(probed)
    best: Probe | None = None
    while probed.keeps_up:
        best, low = probed, high
        high *= 2
        probed = probe(profile, phase, high, seed)
        report(probed)
    while best is None:
        high, low = low, low / 2
        if low < 1e-4:
            raise RunFailed(f"phase {phase}: the backlog grows at any rate; is the KV cache too small?")
        probed = probe(profile, phase, low, seed)
        report(probed)
        if probed.keeps_up:
            best = probed
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5
        probed = probe(profile, phase, middle, seed)
        report(probed)
        if probed.keeps_up:
            best, low = probed, middle
        else:
            high = middle
    return Capacity(phase, best.scale, best.offered_rps, LOADS[phase - 1])


def slo_factor(profile: Profile, workload: Workload) -> float:
    """Smallest factor, in steps of 0.25, at which an unloaded short request takes a quarter of its SLO.

    Unloaded means alone and cold: its whole prompt in one prefill, at the median length of its tenant.
    """
    model = StepTimeModel(profile)
    needed = 1.0
    for tenant in workload.tenants:
        if not tenant.short:
            continue
        lengths = [len(r.prompt) for r in workload.requests if r.tenant == tenant.name]
        ttft_ms = model.step_us([(int(np.median(lengths)), 0)], 0, 0, 1) / 1000
        needed = max(needed, _QUARTER * ttft_ms / (tenant.slo_ttft_ms / workload.slo_factor))
    return float(np.ceil(needed / _SLO_STEP) * _SLO_STEP)


def write(profile: Profile, capacities: list[Capacity], factor: float) -> Path:
    """Put the rates into the profile's file, three significant digits."""
    path = profile.path / "profile.toml"
    rates = ", ".join(f"{float(f'{c.rate_scale:.3g}'):g}" for c in capacities)
    lines = path.read_text(encoding="utf-8").splitlines()
    at = lines.index("[five_phase]")
    for i in range(at + 1, len(lines)):
        if lines[i].startswith("["):
            break
        if lines[i].startswith("rate_scale"):
            lines[i] = f"rate_scale = [{rates}]"
        elif lines[i].startswith("slo_factor"):
            lines[i] = f"slo_factor = {factor}"
        elif lines[i].startswith("comment"):
            found = ", ".join(f"{c.scale:.3g}" for c in capacities)
            lines[i] = (
                f'comment = "bench capacity --profile {profile.name}: the mixes keep up to {found} times the table; '
                f'loads {", ".join(f"{c.load:g}" for c in capacities)}"'
            )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
