"""The energy of exactly one window, from samples around it.

By the driver's energy counter where a GPU has one: the counter between two samples is taken to grow evenly, so its
values at the window's ends lie between the two samples around each end, and `low_j` and `high_j` say how far apart
that leaves the answer. Else by the power readings, joined by straight lines (trapezoids). Both are reported where both
exist. From Ampere on (but for GA100) power is the mean of the second before (NVML API reference, nvmlDeviceGetPowerUsage), so
its integral is that of a window about half a second earlier; the counter has no such lag.

A window is not valid, and then has no joules, where a GPU of the run gave no samples, did not answer, was not heard for
more than 3 s, or was not sampled around both ends of the window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.engines.live.gpu.facts import Gpu
from harness.engines.live.gpu.samples import Floats, GpuSamples, Ints, Track

MAX_GAP_NS = 3_000_000_000
COUNTER, POWER, MIXED = "counter", "power", "mixed"


@dataclass(frozen=True, slots=True)
class GpuEnergy:
    """The energy of one GPU in the window.

    Attributes:
        joules: by `method`; None where `reason` says why not.
        counter_j, power_j: by each method; None where `counter_reason` or `power_reason` says why not.
        low_j, high_j: what the counter itself proves; None without it.
        resets: how often the counter fell in the window, which rules the counter out.
    """

    uuid: str
    joules: float | None
    method: str | None
    reason: str
    counter_j: float | None = None
    power_j: float | None = None
    counter_reason: str = ""
    power_reason: str = ""
    low_j: float | None = None
    high_j: float | None = None
    resets: int = 0


@dataclass(frozen=True, slots=True)
class Energy:
    """The energy of all GPUs of a run in the window.

    Attributes:
        joules: the sum; None where it is not valid.
        valid: every GPU has its energy.
        reason: why it is not valid, GPU by GPU; empty where it is.
        method: counter, power, or mixed where GPUs differ; None where not valid.
        counter_j, power_j: the sums by each method alone; None where a GPU lacks it.
    """

    joules: float | None
    valid: bool
    reason: str
    method: str | None
    by_gpu: tuple[GpuEnergy, ...]
    counter_j: float | None = None
    power_j: float | None = None

    @property
    def disagreement(self) -> float | None:
        """(power - counter) / counter; None where either is missing or the counter gives 0."""
        if self.counter_j is None or self.power_j is None or self.counter_j == 0:
            return None
        return (self.power_j - self.counter_j) / self.counter_j

    def json(self) -> dict[str, Any]:
        """As a manifest or summary holds it."""
        return {**asdict(self), "disagreement": self.disagreement}


def integrate(samples: GpuSamples, start_ns: int, end_ns: int, *, max_gap_ns: int = MAX_GAP_NS) -> Energy:
    """The energy of the window [start, end], ns of the run's clock.

    Raises:
        ValueError: the window is empty.
    """
    return _total([_of_gpu(samples, gpu, [start_ns, end_ns], max_gap_ns)[0] for gpu in samples.gpus])


def joules_between(
    samples: GpuSamples, edges_ns: Sequence[int], *, max_gap_ns: int = MAX_GAP_NS
) -> tuple[Energy, npt.NDArray[np.float64] | None]:
    """The energy of a window cut into adjoining parts, for figures by block.

    Args:
        edges_ns: ascending, two or more.

    Returns:
        What `integrate` says of the whole, and the joules of each part, shape (len(edges) - 1,), all by the method of
        the whole, so that they add up to it; None where the whole is not valid.

    Raises:
        ValueError: fewer than two edges, or they do not ascend.
    """
    found = [_of_gpu(samples, gpu, edges_ns, max_gap_ns) for gpu in samples.gpus]
    energy = _total([one for one, _ in found])
    if not energy.valid:
        return energy, None
    parts = [np.diff(values) for _, values in found if values is not None]
    return energy, np.sum(parts, axis=0)


def _total(by_gpu: Sequence[GpuEnergy]) -> Energy:
    if not by_gpu:
        return Energy(None, False, "there is no GPU", None, ())
    faults = "; ".join(f"{one.uuid}: {one.reason}" for one in by_gpu if one.joules is None)
    methods = {one.method for one in by_gpu}
    return Energy(
        joules=_sum([one.joules for one in by_gpu]),
        valid=not faults,
        reason=faults,
        method=None if faults else (methods.pop() if len(methods) == 1 else MIXED),
        by_gpu=tuple(by_gpu),
        counter_j=_sum([one.counter_j for one in by_gpu]),
        power_j=_sum([one.power_j for one in by_gpu]),
    )


def _sum(values: Sequence[float | None]) -> float | None:
    # exact whatever the order of GPUs
    known = [value for value in values if value is not None]
    return math.fsum(known) if len(known) == len(values) else None


def _of_gpu(
    samples: GpuSamples, gpu: Gpu, edges_ns: Sequence[int], max_gap_ns: int
) -> tuple[GpuEnergy, Floats | None]:
    """One GPU's energy, and the joules up to each edge by its method."""
    edges = np.asarray(edges_ns, dtype=np.int64)
    if len(edges) < 2 or bool((np.diff(edges) <= 0).any()):
        raise ValueError(f"the window {list(map(int, edges))} does not ascend")
    track = samples.track(gpu.uuid)
    if fault := _fault(gpu, track, int(edges[0]), int(edges[-1]), max_gap_ns):
        return GpuEnergy(gpu.uuid, None, None, fault), None
    power, why_no_power = _by_power(track, edges, max_gap_ns)
    counter = _by_counter(track, edges, max_gap_ns)
    why_no_counter = counter.reason
    stood_still = counter.at is not None and counter.at[-1] == counter.at[0]
    if stood_still and power is not None and power[-1] > power[0]:
        # the call may be there with no counter behind it
        why_no_counter = "its energy counter stood still while it drew power"
    by_counter = None if counter.at is None or why_no_counter else counter.at
    chosen = by_counter if by_counter is not None else power
    return (
        GpuEnergy(
            uuid=gpu.uuid,
            joules=_span(chosen),
            method=None if chosen is None else (POWER if by_counter is None else COUNTER),
            reason="" if chosen is not None else f"{why_no_counter}, and {why_no_power}",
            counter_j=_span(by_counter),
            power_j=_span(power),
            counter_reason=why_no_counter,
            power_reason=why_no_power,
            low_j=counter.low_j if by_counter is not None else None,
            high_j=counter.high_j if by_counter is not None else None,
            resets=counter.resets,
        ),
        chosen,
    )


def _span(values: Floats | None) -> float | None:
    return None if values is None else float(values[-1] - values[0])


def _fault(gpu: Gpu, track: Track, start: int, end: int, max_gap_ns: int) -> str:
    """Why the GPU has no valid energy whatever its readings; empty where nothing is wrong."""
    if gpu.fault:
        return f"it could not be opened ({gpu.fault})"
    if gpu.mig:
        return "it is split into slices (MIG) and its energy is that of all of them"
    if not gpu.sure:
        return "its number may mean another GPU: set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    if not len(track.t_ns):
        return "it gave no samples"
    rows, fault = _around(track.t_ns, start, end)
    if rows is None:
        return fault
    for row in range(rows.start, rows.stop):
        if track.errors[row]:
            return f"it did not answer at {track.t_ns[row] / 1e9:.1f} s ({track.errors[row]})"
    # a driver that answers late was silent meanwhile
    halves = np.nan_to_num(track.column("read_us")[rows]) * 500
    silent = np.diff(track.t_ns[rows]) + halves[1:] + halves[:-1]
    if (gap := int(silent.max(initial=0))) > max_gap_ns:
        return f"it was not sampled for {gap / 1e9:.1f} s"
    return ""


def _around(t_ns: Ints, start: int, end: int) -> tuple[slice | None, str]:
    """The samples in the window with one at or before its start and one at or after its end."""
    before = int(np.searchsorted(t_ns, start, side="right")) - 1
    after = int(np.searchsorted(t_ns, end, side="left"))
    if before < 0:
        return None, f"its first sample is {(t_ns[0] - start) / 1e9:.2f} s after the window's start"
    if after == len(t_ns):
        return None, f"its last sample is {(end - t_ns[-1]) / 1e9:.2f} s before the window's end"
    return slice(before, after + 1), ""


def _widest(t_ns: Ints) -> int:
    return int(np.diff(t_ns).max(initial=0))


def _known(
    track: Track, name: str, what: str, edges: Ints, max_gap_ns: int
) -> tuple[Ints | None, Floats, str]:
    """Times and values of a field's readings around the window, or why they do not suffice."""
    values = track.column(name)
    known = ~np.isnan(values)
    if not known.any():
        return None, values, f"it has no {what}"
    t_ns, values = track.t_ns[known], values[known]
    rows, _ = _around(t_ns, int(edges[0]), int(edges[-1]))
    if rows is None:
        return None, values, f"its {what} is missing at an end of the window"
    if (gap := _widest(t_ns[rows])) > max_gap_ns:
        return None, values, f"its {what} is missing for {gap / 1e9:.1f} s"
    return t_ns[rows], values[rows], ""


@dataclass(frozen=True, slots=True)
class _Counter:
    at: Floats | None
    reason: str
    low_j: float | None = None
    high_j: float | None = None
    resets: int = 0


def _by_counter(track: Track, edges: Ints, max_gap_ns: int) -> _Counter:
    t_ns, values, fault = _known(track, "energy_mj", "energy counter", edges, max_gap_ns)
    if t_ns is None:
        return _Counter(None, fault)
    resets = int((np.diff(values) < 0).sum())
    if resets:
        return _Counter(None, "its energy counter was reset", resets=resets)
    # taken from the first sample, so that years of millijoules cost no digits
    joules = (values - values[0]) / 1000
    first_in = int(np.searchsorted(t_ns, edges[0], side="left"))
    last_in = int(np.searchsorted(t_ns, edges[-1], side="right")) - 1
    return _Counter(
        at=np.interp(edges - t_ns[0], t_ns - t_ns[0], joules),
        reason="",
        low_j=max(float(joules[last_in] - joules[first_in]), 0.0),
        high_j=float(joules[-1] - joules[0]),
    )


def _by_power(track: Track, edges: Ints, max_gap_ns: int) -> tuple[Floats | None, str]:
    t_ns, watts, fault = _known(track, "power_w", "power reading", edges, max_gap_ns)
    if t_ns is None:
        return None, fault
    t_s = (t_ns - t_ns[0]) / 1e9
    at_s = (edges - t_ns[0]) / 1e9
    done = np.concatenate([[0.0], np.cumsum(np.diff(t_s) * (watts[1:] + watts[:-1]) / 2)])
    row = np.clip(np.searchsorted(t_s, at_s, side="right") - 1, 0, len(t_s) - 1)
    joules: Floats = done[row] + (at_s - t_s[row]) * (watts[row] + np.interp(at_s, t_s, watts)) / 2
    return joules, ""
