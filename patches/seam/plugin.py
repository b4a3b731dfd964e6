"""Entry point of the group `vllm.general_plugins`: installs the plan that the environment names.

vLLM calls `register` in each of its processes (a forked one inherits what its parent installed).
Without a plan, or with the kill switch, this module imports nothing more and changes nothing.

Environment:
    PATCHBENCH_PLAN      the plan as JSON, or the path of a file that holds it
    PATCHBENCH_OFF       `1` leaves vLLM alone, whatever the plan says
    PATCHBENCH_RECEIPTS  folder for `receipt-<pid>.json`, one a process
"""

from __future__ import annotations

import os

PLAN_ENV = "PATCHBENCH_PLAN"
OFF_ENV = "PATCHBENCH_OFF"
RECEIPTS_ENV = "PATCHBENCH_RECEIPTS"


def register() -> None:
    """Install the plan, if there is one. An error is written into the receipt, then raised."""
    if not os.environ.get(PLAN_ENV) or os.environ.get(OFF_ENV) == "1":
        return
    from patches.seam import process

    process.install_from_environment(os.environ[PLAN_ENV], os.environ.get(RECEIPTS_ENV))
