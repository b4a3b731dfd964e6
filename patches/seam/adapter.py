"""Installing a plan into vLLM and taking it out again. The only place where vLLM is changed.

Only what the plan's seams need is wrapped; with no patch nothing is. Each wrapper finds the engine's
own Runtime on the instance, so a Scheduler that was built stock stays stock while a plan is
installed, and a Scheduler that was built under one plan never sees another's hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from patches.seam.ledger import Ledger
from patches.seam.plan import PatchPlan
from patches.seam.receipt import Tallies
from patches.seam.upstream_lock import check

if TYPE_CHECKING:
    from patches.seam.runtime import Runtime

StepListener = Callable[[], None]

_active: Installation | None = None


class InstallError(RuntimeError):
    """A plan cannot be installed or taken out now."""


class Installation:
    """A plan in force in this process. `undo()` takes it out; `tallies` are its counters."""

    def __init__(self, plan: PatchPlan, listener: StepListener | None) -> None:
        self.plan = plan
        self.tallies = Tallies(plan.names)
        self.listener = listener
        self.constructing: list[Any] = []
        self._ledger = Ledger()

    def receipt(self) -> dict[str, Any]:
        """The receipt as of now."""
        return self.tallies.receipt(self.plan.sha256())

    def undo(self) -> None:
        """Restore vLLM exactly; raises LedgerError, and changes nothing, if someone else changed it since."""
        global _active
        if _active is not self:
            raise InstallError("this plan is not installed")
        self._ledger.undo()
        _active = None

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Change one entry of vLLM, on the ledger."""
        self._ledger.replace(owner, name, value)

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a function that `owner` itself defines by `make(original)`."""
        original = vars(owner)[name]
        self.replace(owner, name, functools.wraps(original)(make(original)))


def active() -> Installation | None:
    """The plan that is installed in this process, if any."""
    return _active


def runtime_of(scheduler: Any) -> Runtime | None:
    """The Runtime of a scheduler that was built while a plan was installed; None for a stock one."""
    from patches.seam.runtime import RUNTIME_ATTR

    found: Runtime | None = scheduler.__dict__.get(RUNTIME_ATTR)
    return found


def install(plan: PatchPlan, listener: StepListener | None = None) -> Installation:
    """Put a plan into force for engines built from now on.

    Args:
        plan: the resolved plan; an empty one changes nothing.
        listener: called after each scheduling pass of a patched engine.

    Raises:
        InstallError: another plan is installed. DriftError: vLLM's code is not what the seams were written for.
    """
    global _active
    if _active is not None:
        raise InstallError(f"the plan {_active.plan.label!r} is installed already; undo it first")
    check(plan.targets())
    installation = Installation(plan, listener)
    try:
        if plan.patches:
            from patches.seam import wrappers

            wrappers.wrap_all(installation)
    except BaseException:
        installation._ledger.undo()
        raise
    _active = installation
    return installation
