"""What a report shows of the GPUs in one window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.engines.live.gpu.energy import Energy, integrate
from harness.engines.live.gpu.samples import GpuSamples, Track
from harness.engines.live.gpu.throttle import throttling


@dataclass(frozen=True, slots=True)
class PerToken:
    """Joules per output token, or why there is no such figure."""

    joules: float | None
    reason: str = ""


def joules_per_token(energy: Energy, output_tokens: int) -> PerToken:
    """The energy of a window over the output tokens received in it.

    Args:
        output_tokens: those received within the same window, whoever asked for them and whenever.
    """
    if energy.joules is None:
        return PerToken(None, f"the energy is not valid: {energy.reason}")
    if output_tokens <= 0:
        return PerToken(None, "no output token was received in this window")
    return PerToken(energy.joules / output_tokens)


def figures_of(samples: GpuSamples, start_ns: int, end_ns: int, output_tokens: int) -> dict[str, Any]:
    """Everything about one window, JSON-able; None for what no sample in it holds.

    Per GPU: samples, late_max_ms, and the mean (or what the name says) of the fields over the samples in the window.
    """
    energy = integrate(samples, start_ns, end_ns)
    held = throttling(samples, start_ns, end_ns)
    per_token = joules_per_token(energy, output_tokens)
    return {
        "energy": energy.json(),
        "joules_per_output_token": per_token.joules,
        "joules_per_output_token_reason": per_token.reason,
        "throttle": {"spoiling": list(held.spoiling), "shares": held.shares, "unknown": list(held.unknown)},
        "gpus": [
            {**gpu.json(), **_of_track(samples.track(gpu.uuid), start_ns, end_ns)} for gpu in samples.gpus
        ],
    }


def _of_track(track: Track, start_ns: int, end_ns: int) -> dict[str, Any]:
    inside = (track.t_ns >= start_ns) & (track.t_ns <= end_ns)

    def over(name: str, how: Any) -> float | None:
        values = track.column(name)[inside]
        values = values[~np.isnan(values)]
        return float(how(values)) if len(values) else None

    late = (track.t_ns - track.column("due_ns"))[inside] / 1e6
    return {
        "samples": int(inside.sum()),
        "late_max_ms": float(late.max()) if len(late) else None,
        "gpu_util": over("gpu_util", np.mean),
        "memory_util": over("memory_util", np.mean),
        "memory_used_max_bytes": over("memory_used_bytes", np.max),
        "power_w": over("power_w", np.mean),
        "sm_clock_mhz": over("sm_clock_mhz", np.mean),
        "sm_clock_min_mhz": over("sm_clock_mhz", np.min),
        "memory_clock_mhz": over("memory_clock_mhz", np.mean),
        "temperature_max_c": over("temperature_c", np.max),
    }
