"""The formats that are read, one module each. See docs/TRACES.md for their sources."""

from __future__ import annotations

from workloads.traces.formats.azure import Azure2023, Azure2024
from workloads.traces.formats.bailian import Bailian
from workloads.traces.formats.burstgpt import BurstGpt
from workloads.traces.formats.mooncake import Mooncake
from workloads.traces.formats.servegen import ServeGenCsv, ServeGenJson
from workloads.traces.formats.timed_trace import TimedTrace
from workloads.traces.reader import Reader

READERS: tuple[type[Reader], ...] = (
    Mooncake,
    Bailian,
    TimedTrace,
    Azure2023,
    Azure2024,
    BurstGpt,
    ServeGenCsv,
    ServeGenJson,
)
