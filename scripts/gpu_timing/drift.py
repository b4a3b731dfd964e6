"""Does the device keep its speed? One matrix product, timed again and again between the rows."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import torch

from scripts.gpu_timing.device import Device
from scripts.gpu_timing.timer import Call, Timer
from scripts.gpu_timing.work import Ceilings

LIMIT_PCT = 3.0


@dataclass(slots=True)
class Sentinel:
    """Times of the same product, us, in the order taken."""

    timer: Timer
    call: Call
    us: list[float] = field(default_factory=list)

    def take(self) -> float:
        """Time it once more; how far it is from the median so far, per cent."""
        self.us.append(self.timer.time([self.call] * 2).us)
        return 100.0 * (self.us[-1] / statistics.median(self.us) - 1.0)

    def drift_pct(self) -> float:
        """The farthest that it was from its median, per cent."""
        middle = statistics.median(self.us)
        return max(100.0 * abs(us / middle - 1.0) for us in self.us)


def measure(device: Device, timer: Timer) -> tuple[Ceilings, Sentinel]:
    """Bring the device to its working clocks, and find out what it reaches on a large product and a large copy."""
    size = 4096 if device.kind == "cuda" else 256
    a, b = (torch.randn(size, size, dtype=device.dtype, device=device.kind) for _ in range(2))
    out = torch.empty_like(a)
    sentinel = Sentinel(timer, lambda: torch.mm(a, b, out=out))
    source = torch.empty(1 << (28 if device.kind == "cuda" else 20), dtype=torch.uint8, device=device.kind)
    target = torch.empty_like(source)
    # Until two in a row agree within 1%: an idle device takes a moment to raise its clocks.
    for _ in range(40):
        product_us = timer.time([sentinel.call] * 8).us
        if abs(product_us - timer.time([sentinel.call] * 8).us) < 0.01 * product_us:
            break
    copy_us = timer.time([lambda: target.copy_(source)] * 2).us
    sentinel.take()
    ceilings = Ceilings(2e6 * size**3 / product_us, 2e6 * source.numel() / copy_us)
    return ceilings, sentinel
