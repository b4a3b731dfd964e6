"""Why a GPU's clocks are not higher, by the driver's bit mask, and which of these reasons spoil a measurement.

Counted as throttled: the thermal slowdowns (software and hardware) and the power brake, which come from cooling and
from the power supply, so that a second run need not meet them; and the hardware slowdown, which the NVML reference
describes as the sign of either or of a current too high. As the same page allows the hardware slowdown to show
for a moment while clocks change, it counts only in two samples one after the other, where no named cause stands beside it.

Not counted: the software power cap, by which a GPU under full load keeps to its configured limit: it is part of what
the GPU is, every arm meets it alike, and figures show its share. Nor idle, clocks set by the operator or the display,
sync boost, board limit and reliability, which are choices or properties of the board.

Source: NVML API reference, "NvmlClocksEventReasons".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from harness.engines.live.gpu.samples import GpuSamples, Track

NAMES: dict[int, str] = {
    0x1: "gpu_idle",
    0x2: "clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
_HW_SLOWDOWN = 0x8
_NAMED_CAUSES = 0x20 | 0x40 | 0x80
SPOILING = ("sw_thermal", "hw_thermal", "hw_power_brake", "hw_slowdown")


@dataclass(frozen=True, slots=True)
class Throttling:
    """What held the clocks down in a window.

    Attributes:
        spoiling: the reasons for the verdict `throttled`, in the order of `SPOILING`; empty where none applies.
        shares: of each reason that was seen at all, the share of the samples that show it, all GPUs together.
        unknown: UUIDs of the GPUs that said nothing of it in the window.
    """

    spoiling: tuple[str, ...]
    shares: dict[str, float]
    unknown: tuple[str, ...]


def names_of(mask: int) -> Iterator[str]:
    """The names of the reasons in a mask, lowest bit first; a bit without a name as `bit_<n>`."""
    for bit in range(mask.bit_length()):
        if mask >> bit & 1:
            yield NAMES.get(1 << bit, f"bit_{bit}")


def throttled(samples: GpuSamples, start_ns: int, end_ns: int) -> tuple[str, ...]:
    """The reasons for the verdict `throttled` in a window, each as one short text; empty where none applies."""
    found = throttling(samples, start_ns, end_ns)
    return tuple(f"{name} in {found.shares[name]:.1%} of the samples" for name in found.spoiling)


def throttling(samples: GpuSamples, start_ns: int, end_ns: int) -> Throttling:
    """All that held clocks down in a window [start, end], ns of the run's clock."""
    counts: dict[str, int] = {}
    seen, total = set(), 0
    unknown = []
    for gpu in samples.gpus:
        masks = _masks(samples.track(gpu.uuid), start_ns, end_ns)
        if not len(masks):
            unknown.append(gpu.uuid)
            continue
        total += len(masks)
        for mask in masks:
            for name in names_of(int(mask)):
                counts[name] = counts.get(name, 0) + 1
        seen |= _spoiling(masks)
    return Throttling(
        spoiling=tuple(name for name in SPOILING if name in seen),
        shares={name: count / total for name, count in sorted(counts.items())},
        unknown=tuple(unknown),
    )


def _masks(track: Track, start_ns: int, end_ns: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    mask = track.column("throttle_mask")[(track.t_ns >= start_ns) & (track.t_ns <= end_ns)]
    known: np.ndarray[tuple[int], np.dtype[np.int64]] = mask[~np.isnan(mask)].astype(np.int64)
    return known


def _spoiling(masks: np.ndarray[tuple[int], np.dtype[np.int64]]) -> set[str]:
    together = int(np.bitwise_or.reduce(masks))
    found = set(names_of(together & _NAMED_CAUSES))
    slowed = (masks & _HW_SLOWDOWN) != 0
    with_cause = bool((slowed & ((masks & _NAMED_CAUSES) != 0)).any())
    if with_cause or bool((slowed[1:] & slowed[:-1]).any()):
        found.add("hw_slowdown")
    return found
