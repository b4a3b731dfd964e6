"""GPU telemetry of a live run: what the driver says of each GPU, on the run's clock, and the energy it took.

`Sampler` starts a process of its own that asks NVML ten times a second and leaves `gpu.parquet` (its columns:
`harness.schema.GPU`). `load` reads that file; `integrate` gives the joules of exactly one window, or why it
cannot; `throttled` says what held the clocks down; `figures_of` gathers both for a report.

What a killed sampler leaves: rows stream once a second into `.gpu.parquet.partial` (an Arrow stream, readable up to
its last whole batch), and only an orderly end turns that into `gpu.parquet` in one move. `Sampler.stop` turns the
partial file of a sampler that died into `gpu.parquet` too and says so (`complete` is false): the window that it
does not cover has no valid energy, which `integrate` finds by itself.

Which GPUs: those of CUDA_VISIBLE_DEVICES (numbers, UUIDs or their beginnings), and of these the first
`first` where the engine uses fewer than it sees. A MIG slice is found by its UUID: its memory is its own, clocks,
temperature, power and energy are the whole GPU's, so its energy is never valid.

Nothing here is imported by the virtual engine, and pynvml only in the sampler's process.
"""

from __future__ import annotations

from harness.engines.live.gpu.energy import Energy, GpuEnergy, integrate, joules_between
from harness.engines.live.gpu.facts import Absent, Gpu
from harness.engines.live.gpu.figures import figures_of, joules_per_token
from harness.engines.live.gpu.sampler import Sampler, SamplerReport
from harness.engines.live.gpu.samples import GpuSamples, load
from harness.engines.live.gpu.throttle import throttled, throttling

__all__ = [
    "Absent",
    "Energy",
    "Gpu",
    "GpuEnergy",
    "GpuSamples",
    "Sampler",
    "SamplerReport",
    "figures_of",
    "integrate",
    "joules_between",
    "joules_per_token",
    "load",
    "throttled",
    "throttling",
]
