"""Entry point of the group `vllm.general_plugins`: installs the plan and the observers that the environment names.

vLLM calls `register` in each of its processes (a forked one inherits what its parent installed).
With neither, or with the kill switch, this module imports nothing more and changes nothing.

Environment:
    PATCHBENCH_PLAN      the plan as JSON, or the path of a file that holds it
    PATCHBENCH_OFF       `1` leaves vLLM alone, whatever the plan says
    PATCHBENCH_RECEIPTS  folder for `receipt-<pid>.json`, one a process
    PATCHBENCH_TELEMETRY folder in which each engine notes its steps and requests, with a plan or without
    PATCHBENCH_EPOCH_NS  CLOCK_MONOTONIC at the run's start, for the reader of that folder
    PATCHBENCH_IDENTITY  file of API keys and tenants; in force in an API server even with the kill switch
    PATCHBENCH_EVENTS    file for what the API server refused or overruled, as JSON lines
"""

from __future__ import annotations

import os
import sys

PLAN_ENV = "PATCHBENCH_PLAN"
OFF_ENV = "PATCHBENCH_OFF"
RECEIPTS_ENV = "PATCHBENCH_RECEIPTS"
TELEMETRY_ENV = "PATCHBENCH_TELEMETRY"
EPOCH_ENV = "PATCHBENCH_EPOCH_NS"
IDENTITY_ENV = "PATCHBENCH_IDENTITY"
EVENTS_ENV = "PATCHBENCH_EVENTS"
# An API server has loaded its application when vLLM loads plugins, which its command line makes it do; an engine
# or a worker never does.
SERVER_MODULE = "vllm.entrypoints.launchers.app"


def register() -> None:
    """Install the plan, if there is one; an error is written into the receipt, then raised. Then front and observers."""
    plan, telemetry = os.environ.get(PLAN_ENV), os.environ.get(TELEMETRY_ENV)
    identity = os.environ.get(IDENTITY_ENV)
    if os.environ.get(OFF_ENV) == "1":
        # Who may come in is no matter of patches.
        plan = telemetry = None
    if plan:
        from patches.seam import process

        process.install_from_environment(plan, os.environ.get(RECEIPTS_ENV))
    if (plan or identity) and SERVER_MODULE in sys.modules:
        from patches.front import install

        install.in_server(identity, os.environ.get(EVENTS_ENV))
    if telemetry:
        # On top of the patches: what they decide is seen, and what they cost is counted.
        from harness.engines.live.telemetry import hooks

        hooks.install_from_environment(telemetry, os.environ.get(EPOCH_ENV))
