"""Entry point of the group `vllm.general_plugins`: installs the plan and the observers that the environment names.

vLLM calls `register` in each of its processes (a forked one inherits what its parent installed).
With neither, or with the kill switch, this module imports nothing more and changes nothing.

Environment:
    PATCHBENCH_PLAN      the plan as JSON, or the path of a file that holds it
    PATCHBENCH_OFF       `1` leaves vLLM alone, whatever the plan says
    PATCHBENCH_RECEIPTS  folder for `receipt-<pid>.json`, one a process
    PATCHBENCH_TELEMETRY folder in which each engine notes its steps and requests, with a plan or without
    PATCHBENCH_EPOCH_NS  CLOCK_MONOTONIC at the run's start, for the reader of that folder
"""

from __future__ import annotations

import os

PLAN_ENV = "PATCHBENCH_PLAN"
OFF_ENV = "PATCHBENCH_OFF"
RECEIPTS_ENV = "PATCHBENCH_RECEIPTS"
TELEMETRY_ENV = "PATCHBENCH_TELEMETRY"
EPOCH_ENV = "PATCHBENCH_EPOCH_NS"


def register() -> None:
    """Install the plan, if there is one; an error is written into the receipt, then raised. Then the observers."""
    plan, telemetry = os.environ.get(PLAN_ENV), os.environ.get(TELEMETRY_ENV)
    if os.environ.get(OFF_ENV) == "1":
        return
    if plan:
        from patches.seam import process

        process.install_from_environment(plan, os.environ.get(RECEIPTS_ENV))
    if telemetry:
        # On top of the patches: what they decide is seen, and what they cost is counted.
        from harness.engines.live.telemetry import hooks

        hooks.install_from_environment(telemetry, os.environ.get(EPOCH_ENV))
