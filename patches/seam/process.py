"""A plan in one vLLM process: installed from the environment, with a receipt kept up to date."""

from __future__ import annotations

import atexit
import hashlib
import os
import time
from multiprocessing import util as mp_util
from pathlib import Path

from patches.seam import adapter
from patches.seam.plan import PatchPlan
from patches.seam.receipt import Tallies, write_receipt

# Written after so many seconds a receipt costs a busy engine well under a thousandth of its time.
_RECEIPT_PERIOD_S = 2.0


class ReceiptKeeper:
    """Writes `receipt-<pid>.json`: at once, with the step after a couple of seconds, and when the process ends.

    No thread: a step that happens drives it. After a fork the child writes under its own pid.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._due_s = 0.0
        self._hooked_pid = 0
        self.installation: adapter.Installation | None = None

    def on_step(self) -> None:
        """Called after each scheduling pass."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + _RECEIPT_PERIOD_S
            self.write()

    def write(self) -> None:
        """Write the receipt as of now."""
        if self.installation is None:
            return
        self._hook_exit()
        write_receipt(self._folder / f"receipt-{os.getpid()}.json", self.installation.receipt())

    def _hook_exit(self) -> None:
        if self._hooked_pid == os.getpid():
            return
        self._hooked_pid = os.getpid()
        # Children of multiprocessing end without atexit; the others without multiprocessing's finalizers.
        atexit.register(self.write)
        mp_util.Finalize(None, self.write, exitpriority=0)


def install_from_environment(plan_text: str, receipts: str | None) -> adapter.Installation:
    """Install the plan given as JSON or as a file's path; keep a receipt in `receipts` if it is given."""
    keeper = ReceiptKeeper(Path(receipts)) if receipts else None
    try:
        text = (
            plan_text if plan_text.lstrip().startswith("{") else Path(plan_text).read_text(encoding="utf-8")
        )
        plan = PatchPlan.from_json(text)
        current = adapter.active()
        if current is not None and current.plan == plan:
            # vLLM says that plugins may be loaded more than once in a process.
            return current
        plan.check_files()
        installation = adapter.install(plan, keeper.on_step if keeper else None)
    except Exception as error:
        if receipts:
            digest = hashlib.sha256(plan_text.encode()).hexdigest()
            failed = Tallies(()).receipt(digest, error=f"{type(error).__name__}: {error}")
            write_receipt(Path(receipts) / f"receipt-{os.getpid()}.json", failed)
        raise
    if keeper is not None:
        keeper.installation = installation
        keeper.write()
    return installation
