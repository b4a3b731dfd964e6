"""Public traces as workloads: recognised, checked, summed up, replayed. See docs/TRACES.md."""

from __future__ import annotations

from workloads.traces.build import build
from workloads.traces.choice import Selection, TraceChoice, choose, select
from workloads.traces.row import TraceRow
from workloads.traces.source import FORMATS, TraceSource, open_trace
from workloads.traces.tenant_map import TenantMap, load_map
from workloads.traces.window import Window

__all__ = [
    "FORMATS",
    "Selection",
    "TenantMap",
    "TraceChoice",
    "TraceRow",
    "TraceSource",
    "Window",
    "build",
    "choose",
    "load_map",
    "open_trace",
    "select",
]
