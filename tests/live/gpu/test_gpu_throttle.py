"""Guards which of the driver's reasons spoil a measurement."""

from __future__ import annotations

import numpy as np
import pytest

from harness.engines.live.gpu import Gpu, GpuSamples, throttled, throttling
from harness.engines.live.gpu.samples import Track
from harness.engines.live.gpu.throttle import names_of

NONE = float("nan")
POWER_CAP, SLOWDOWN, SW_THERMAL, HW_THERMAL, BRAKE = 4.0, 8.0, 32.0, 64.0, 128.0


def masked(*masks: float) -> GpuSamples:
    """One sample a second of one GPU."""
    columns = {"throttle_mask": np.array(masks)}
    track = Track(np.arange(len(masks), dtype=np.int64) * 10**9, ("",) * len(masks), columns)
    return GpuSamples((Gpu("GPU-a", 0, "x"),), {"GPU-a": track})


@pytest.mark.parametrize(
    ("masks", "spoiling"),
    [
        ([0, 0, 0, 0], ()),
        # the limit that it is sold with, idle, set clocks, sync boost, and what has no name yet
        ([POWER_CAP, 1, 2, 16 + 256 + 512 + 1024 + 2048], ()),
        ([0, HW_THERMAL, 0, 0], ("hw_thermal",)),
        ([0, 0, SW_THERMAL + POWER_CAP, 0], ("sw_thermal",)),
        ([BRAKE + SLOWDOWN, 0, SW_THERMAL, 0], ("sw_thermal", "hw_power_brake", "hw_slowdown")),
        # alone and for one sample it may be a change of clocks
        ([0, SLOWDOWN, 0, SLOWDOWN], ()),
        ([0, SLOWDOWN, SLOWDOWN, 0], ("hw_slowdown",)),
        ([NONE, NONE, HW_THERMAL, NONE], ("hw_thermal",)),
    ],
)
def test_what_spoils(masks: list[float], spoiling: tuple[str, ...]) -> None:
    assert throttling(masked(*masks), 0, 3 * 10**9).spoiling == spoiling


def test_only_the_window_counts() -> None:
    samples = masked(HW_THERMAL, 0, 0, POWER_CAP, POWER_CAP, HW_THERMAL)
    assert throttled(samples, 10**9, 4 * 10**9) == ()
    assert throttling(samples, 10**9, 4 * 10**9).shares == {"sw_power_cap": 0.5}
    assert throttled(samples, 1, 5 * 10**9) == ("hw_thermal in 20.0% of the samples",)


def test_silence_is_not_innocence() -> None:
    found = throttling(masked(NONE, NONE), 0, 10**9)
    assert (found.spoiling, found.unknown) == ((), ("GPU-a",))


def test_names() -> None:
    assert list(names_of(0x45)) == ["gpu_idle", "sw_power_cap", "hw_thermal"]
    assert list(names_of(1 << 40)) == ["bit_40"]
    assert list(names_of(0)) == []
