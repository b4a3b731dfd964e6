"""The open-loop client: drives an OpenAI-compatible server and reports what it saw, and how late it was itself.

`drive(workload, make_target(url, model, api_key), Options(), workers=None)` gives a `ClientReport`.
"""

from __future__ import annotations

from harness.engines.live.client.drive import Drive, drive, estimate_workers
from harness.engines.live.client.lateness import Lateness
from harness.engines.live.client.observed import Observed
from harness.engines.live.client.report import ClientReport, WorkerUse
from harness.engines.live.client.target import Options, Target, make_target

__all__ = [
    "ClientReport",
    "Drive",
    "Lateness",
    "Observed",
    "Options",
    "Target",
    "WorkerUse",
    "drive",
    "estimate_workers",
    "make_target",
]
