"""Rates and targets of the five phases for a machine whose pace is known.

Each phase is to offer a share of what its own mix can be served at (0.6, 0.6, 1.05, 1.3, 1.7, as for a GPU's profile).
A request's cost is the prefill of what an LRU cache of the machine's size would not hold, and its share of the steps
that decode it in a full batch.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from harness.capacity import LOADS
from harness.engines.live.pace import Pace
from harness.profiles.profile import FivePhase
from workloads import five_phase
from workloads.request import PlannedRequest, Workload

_SEED = 0
# Of a mix this many requests are looked at, more or less; they are drawn at this scale of the table's rates.
_REQUESTS = 300
_SCALE = 0.05
_MOST_STRETCH = 20.0
_QUARTER = 4.0
_SLO_STEP = 0.25
_DIGITS = 3


@dataclass(frozen=True, slots=True)
class Engine:
    """What of the engine's configuration the costs depend on."""

    max_num_seqs: int
    block_size: int
    kv_tokens: int


def five_phases(pace: Pace, engine: Engine, length_scale: float, vocab_size: int) -> FivePhase:
    """Rates for the five phases, and the factor on the SLOs; the same for the same arguments."""
    rates, mixes = [], []
    for spec, load in zip(five_phase.PHASES, LOADS, strict=True):
        mix = _mix(spec.number, length_scale, vocab_size)
        mixes.append(mix)
        busy_s = _cost_us(mix, pace, engine) / 1e6
        last = mix.phases[-1]
        span_s = (last.end_ns - last.start_ns) / 1e9
        rates.append(_round(load * _SCALE * span_s / busy_s))
    return FivePhase(
        rate_scale=rates,
        slo_factor=slo_factor(pace, mixes[0]),
        comment=f"from the machine's pace: loads {', '.join(map(str, LOADS))}, length scale {length_scale:g}",
    )


def slo_factor(pace: Pace, workload: Workload) -> float:
    """Smallest factor, in steps of 0.25, at which an unloaded short request takes a quarter of its SLO.

    Unloaded means alone and cold, at the median length of its tenant.
    """
    needed = 1.0
    for tenant in workload.tenants:
        lengths = [len(r.prompt) for r in workload.requests if r.tenant == tenant.name]
        if tenant.short and lengths:
            ttft_ms = pace.prefill_ms(int(np.median(lengths)))
            needed = max(needed, _QUARTER * ttft_ms * workload.slo_factor / tenant.slo_ttft_ms)
    return math.ceil(needed / _SLO_STEP) * _SLO_STEP


def _mix(phase: int, length_scale: float, vocab_size: int) -> Workload:
    """A stretch of one phase's mix, long enough for its mean to mean something; the phases before are silent."""
    factors = [0.0] * len(five_phase.PHASES)
    factors[phase - 1] = _SCALE

    def stretch(time_scale: float) -> Workload:
        return five_phase.build(
            _SEED,
            phases=str(phase),
            rates=five_phase.RatePlan(tuple(factors)),
            time_scale=time_scale,
            length_scale=length_scale,
            vocab_size=vocab_size,
        )

    first = stretch(1.0)
    longer = _REQUESTS / max(len(first.requests), 1)
    return first if longer <= 1 else stretch(min(longer, _MOST_STRETCH))


def _cost_us(mix: Workload, pace: Pace, engine: Engine) -> float:
    """Time that the engine is busy with these requests, in full batches."""
    cache = _Lru(engine.kv_tokens // engine.block_size, engine.block_size)
    total = 0.0
    for request in mix.requests:
        new = cache.uncached(request)
        if request.cancel_ns is not None:
            # Given up before its answer begins, and now and then before its prompt is read.
            total += pace.prefill_token_us * new / 2
            continue
        output, context = len(request.output), len(request.prompt) + len(request.output) / 2
        batch = max(1.0, min(engine.max_num_seqs, engine.kv_tokens / context))
        each = pace.step_us / batch + pace.decode_us + pace.context_token_us * context
        total += pace.prefill_token_us * new + output * each
    return total


class _Lru:
    """Which tokens of a prompt a cache of so many blocks lacks."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self._room, self._size = blocks, block_size
        self._held: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        self._numbers: dict[tuple[int, bytes], int] = {}

    def uncached(self, request: PlannedRequest) -> int:
        """Tokens of its prompt to be computed; its blocks are held from then on."""
        prompt = request.prompt
        before, hits, unbroken = -1, 0, True
        for at in range((len(prompt) - 1) // self._size):
            key = (before, prompt[at * self._size : (at + 1) * self._size].tobytes())
            unbroken = unbroken and key in self._held
            hits += unbroken
            before = self._numbers.setdefault(key, len(self._numbers))
            self._held[key] = before
            self._held.move_to_end(key)
        while len(self._held) > self._room:
            self._held.popitem(last=False)
        return len(prompt) - hits * self._size


def _round(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
