"""How much traffic a profile can carry, and the rates of the five phases that follow from it.

Capacity of a mix is the rate at which its backlog starts to grow: the largest scale of a phase's
table of rates at which, over the second half of a long stretch of that mix, the trend of the number of
unfinished requests grows by no more than 5% of those that arrive. The stretch is as long as some 800
requests take, since the noise of fewer would decide. "GPU busy" would not do: with any decode
running it is 100%. Each phase is held against the capacity of its own mix, since a rate in requests
says nothing when one mix sends long documents and another short questions; phase 1's is the reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from harness.arms import baseline
from harness.atomic import write_text
from harness.errors import RunFailed
from harness.profiles import Profile, StepTimeModel, load_profile
from harness.profiles.load import BUILT_IN
from harness.profiles.profile import ProfileRef
from workloads import five_phase
from workloads.request import Workload

LOADS = (0.6, 0.6, 1.05, 1.3, 1.7)
_REQUESTS = 800
_STRETCH, _LONGEST_STRETCH = 1.0, 20.0
_TREND_POINTS = 64
_GROWTH_SHARE = 0.05
_BRACKET = 1.5
_RESOLUTION = 1.03
# The first guess takes every second prompt token from the cache; the search corrects it.
_GUESSED_HIT_RATE = 0.5
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
    probes: tuple[Probe, ...] = ()

    @property
    def rate_scale(self) -> float:
        """Factor on the table's rates that offers `load` of this mix's capacity."""
        return self.load * self.scale


def _mix(phase: int, scale: float, seed: int, time_scale: float = _STRETCH) -> Workload:
    """A stretch of one phase's mix; the phases before it are silent."""
    factors = [0.0] * len(five_phase.PHASES)
    factors[phase - 1] = scale
    return five_phase.build(
        seed, phases=str(phase), rates=five_phase.RatePlan(tuple(factors)), time_scale=time_scale
    )


def _stretch(phase: int, scale: float, seed: int) -> Workload:
    """A stretch long enough for the trend to show, whose clients all leave at its end: what follows is nothing to us."""
    short = _mix(phase, scale, seed)
    longer = _STRETCH * _REQUESTS / max(len(short.requests), 1)
    if longer > _STRETCH:
        short = _mix(phase, scale, seed, min(longer, _LONGEST_STRETCH))
    end_ns = short.phases[-1].end_ns
    leaving = (replace(r, cancel_ns=min(r.cancel_ns or end_ns, end_ns)) for r in short.requests)
    return replace(short, requests=tuple(leaving))


def probe(profile: Profile, phase: int, scale: float, seed: int) -> Probe:
    """Serve a stretch of the mix on stock flags and see whether the backlog grows."""
    from harness.engines.virtual.engine import VirtualEngine

    flags = baseline(profile, "stock").flags
    workload = _stretch(phase, scale, seed)
    step_time = StepTimeModel(profile, flags.max_num_seqs, flags.max_num_batched_tokens)
    engine = VirtualEngine(profile.model_dir, flags, step_time, profile.kv_blocks)
    run = engine.run(workload)
    engine.shutdown()
    table = run.tables["requests"]
    begun = table.column("intended_ns").to_numpy()
    ended = table.column("end_ns").to_numpy(zero_copy_only=False)
    last = workload.phases[-1]
    half_ns = (last.start_ns + last.end_ns) // 2
    times = np.linspace(half_ns, last.end_ns - 1, _TREND_POINTS)
    unfinished = [int(np.sum((begun <= at) & (ended > at))) for at in times]
    trend = np.polynomial.Polynomial.fit(times, unfinished, 1)
    return Probe(
        phase=phase,
        scale=scale,
        offered_rps=len(begun) / ((last.end_ns - last.start_ns) / 1e9),
        grown_requests=round(float(trend(times[-1]) - trend(times[0]))),
        arrived_requests=int(np.sum((begun > half_ns) & (begun <= last.end_ns))),
    )


def guess(profile: Profile, phase: int, seed: int) -> float:
    """A scale to begin the search at: a batch as large as cache and seats allow, prefills beside it."""
    flags = baseline(profile, "stock").flags
    model = StepTimeModel(profile)
    mix = _mix(phase, 0.1, seed)
    count = len(mix.requests)
    prompt = sum(len(r.prompt) for r in mix.requests) / count
    output = sum(len(r.output) for r in mix.requests) / count
    context = prompt + output / 2
    batch = int(min(profile.kv_blocks * flags.block_size / context, flags.max_num_seqs, model.max_decodes))
    batch = max(batch, 1)
    decode_us = output * model.step_us([], batch, int(batch * context), batch) / batch
    prefill_us = (1 - _GUESSED_HIT_RATE) * model.step_us([(int(prompt), 0)], 0, 0, 1)
    span_s = (mix.phases[-1].end_ns - mix.phases[-1].start_ns) / 1e9
    return 0.1 * 1e6 / (decode_us + prefill_us) / (count / span_s)


def find(
    profile: Profile, phase: int, seed: int, probing: Callable[[Profile, int, float, int], Probe] = probe
) -> Capacity:
    """Bracket the capacity from a guess, then bisect it to 2%."""
    probes: list[Probe] = []

    def keeps_up(scale: float) -> bool:
        probes.append(probing(profile, phase, scale, seed))
        return probes[-1].keeps_up

    low = high = guess(profile, phase, seed)
    if keeps_up(low):
        while keeps_up(high := high * _BRACKET):
            low = high
    else:
        while not keeps_up(low := low / _BRACKET):
            high = low
            if low < 1e-4:
                raise RunFailed(f"phase {phase}: the backlog grows at any rate; is the KV cache too small?")
    while high / low > _RESOLUTION:
        middle = (low * high) ** 0.5
        if keeps_up(middle):
            low = middle
        else:
            high = middle
    best = next(p for p in reversed(probes) if p.scale == low)
    return Capacity(phase, best.scale, best.offered_rps, LOADS[phase - 1], tuple(probes))


def find_all(profile: Profile, seed: int, jobs: int) -> Iterator[Capacity]:
    """The capacity of every phase's mix as each is found, `jobs` at a time in processes of their own."""
    with ProcessPoolExecutor(jobs) as pool:
        futures = [pool.submit(_find, profile.ref, spec.number, seed) for spec in five_phase.PHASES]
        for future in as_completed(futures):
            yield future.result()


def _find(ref: ProfileRef, phase: int, seed: int) -> Capacity:
    return find(load_profile(**ref.to_json()), phase, seed)


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


def write(profile: Profile, capacities: list[Capacity], factor: float, folder: Path) -> Path:
    """Put the rates into the profile.toml of `folder`, three significant digits; a new one where there is none."""
    path = folder / "profile.toml"
    rates = ", ".join(f"{float(f'{c.rate_scale:.3g}'):g}" for c in capacities)
    found = ", ".join(f"{c.scale:.3g}" for c in capacities)
    loads = ", ".join(f"{c.load:g}" for c in capacities)
    table = {
        "rate_scale": f"[{rates}]",
        "slo_factor": f"{factor}",
        "comment": json.dumps(
            f"bench capacity --profile {profile.name}: the mixes keep up to {found} times the table; loads {loads}"
        ),
    }
    if path.exists():
        text = _with_table(path.read_text(encoding="utf-8"), table)
    else:
        if (BUILT_IN / profile.name) != folder:  # a folder of its own must be complete
            _copy(profile.model_dir / "config.json", folder / "config.json")
            if profile.gpu_path is not None:
                _copy(profile.gpu_path, folder / "gpu.json")
        lines = "".join(f"{key} = {value}\n" for key, value in table.items())
        text = (
            "# What was found out about this GPU with this model; the rest is composed of the GPU's file and the\n"
            f'# model\'s config.json. docs/PROFILES.md explains every field.\nname = "{profile.name}"\n\n'
            f"[five_phase]\n{lines}"
        )
    write_text(path, text)
    return path


def _copy(source: Path, target: Path) -> None:
    write_text(target, source.read_text(encoding="utf-8"))


def _with_table(text: str, table: dict[str, str]) -> str:
    """A profile.toml's text with its [five_phase] table replaced, comments elsewhere kept."""
    lines = text.splitlines()
    rows = [f"{key} = {value}" for key, value in table.items()]
    if "[five_phase]" not in lines:
        return "\n".join([*lines, "", "[five_phase]", *rows]) + "\n"
    start = lines.index("[five_phase]") + 1
    end = next((i for i in range(start, len(lines)) if lines[i].startswith("[")), len(lines))
    # What stands over the next table belongs to that one.
    while end > start and lines[end - 1].startswith("#"):
        end -= 1
    blank = [""] if end < len(lines) else []
    return "\n".join(lines[:start] + rows + blank + lines[end:]) + "\n"
