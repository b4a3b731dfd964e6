"""A budget of their own for long prefills beside other work: it shrinks with load, and is the whole step without.

Under load it is found by what steps take: too long a step makes the next budgets smaller, a short one
larger. It cannot be computed from a rate: a smaller budget makes the rate smaller too, and so itself.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from patches.scheduling.prefills import Prefills

# Most by which one step changes what fits: down at once, up slowly.
_SHRINK, _GROW = 0.2, 0.05


class LongKnobs(Protocol):
    """The knobs that it goes by; see `OverloadKnobs`."""

    @property
    def long_step_least_tokens(self) -> int: ...
    @property
    def long_patience_s(self) -> float: ...


class LongPrefills:
    """The long prompts that are not through their prefill, and what they may have of a step together."""

    def __init__(self, knobs: LongKnobs, context: Any, prefills: Prefills) -> None:
        self._knobs, self._context, self._prefills = knobs, context, prefills
        # All of them, and those that run.
        self._all: set[str] = set()
        self._running: set[str] = set()
        self._shrunk = False
        self._left = math.inf
        # What fits under full load, as found; unknown until a step is seen to take too long.
        self._fits = math.inf
        # How long steps with them take, the mean of the last ones.
        self._mean_s = 0.0
        self._last_s: float | None = None
        # Whether they got tokens beside others, in the pass before and in this one.
        self._had_some = self._in_pass = False

    def add(self, request_id: str) -> None:
        """A long prompt came."""
        self._all.add(request_id)

    def stop(self, request_id: str) -> None:
        """It runs no longer."""
        self._running.discard(request_id)

    def forget(self, request_id: str) -> None:
        """It ended."""
        self._all.discard(request_id)
        self._running.discard(request_id)

    def budget(self, pressure: float, least: float = 0.0) -> float:
        """Tokens that they get in a step beside others: from the whole step without pressure to what fits at 1.

        Under pressure still `least`, as far as there is so much in a step.
        """
        whole = float(self._context.scheduler.max_num_scheduled_tokens)
        return whole - pressure * (whole - min(whole, max(self._fits, least)))

    def _learn(self, step_s: float, now: float) -> None:
        """Bring what fits nearer to a step of so many seconds."""
        passed_s = now - self._last_s if self._last_s is not None else 0.0
        self._last_s = now
        if passed_s > 0 and self._had_some:
            self._mean_s += (passed_s - self._mean_s) / 8
        if passed_s <= 0 or step_s == math.inf or not self._had_some:
            return
        whole = float(self._context.scheduler.max_num_scheduled_tokens)
        over = step_s / passed_s - 1.0
        fits = min(whole, self._fits) * (1.0 + max(-_SHRINK, min(_GROW, over)))
        self._fits = max(float(self._knobs.long_step_least_tokens), min(whole, fits))

    def _beside_others(self) -> bool:
        everybody = len(self._context.scheduler.running) + self._context.waiting_requests()
        return everybody > len(self._all)

    def gate(self, request: Any, waited_s: float) -> str | None:
        """One at a time while their budget is not the whole step, up to a patience."""
        if request.request_id not in self._all or not self._running or not self._shrunk:
            return None
        if waited_s > self._knobs.long_patience_s or not self._beside_others():
            return None
        return "a long prompt prefills"

    def cap(self, request: Any, new_tokens: int) -> int:
        """What is left of the budget of this step; a waiting one that is let in now holds the next."""
        if request.request_id not in self._all or not self._beside_others():
            return new_tokens
        if not self._context.is_running(request):
            self._running.add(request.request_id)
        granted = max(1, int(min(new_tokens, self._left)))
        self._left -= granted
        self._in_pass = True
        return granted

    def after_schedule(self, output: Any, step_s: float, pressure: float, pace: float, now: float) -> None:
        """See who prefills now, and set the budget of the next step.

        Under full pressure the step may last `step_s`; but they get at least `pace` tokens a second.
        """
        self._learn(step_s, now)
        self._had_some, self._in_pass = self._in_pass, False
        if self._all:
            entered = [new.req_id for new in output.scheduled_new_reqs]
            entered += output.scheduled_cached_reqs.resumed_req_ids
            self._running.update(request_id for request_id in entered if request_id in self._all)
            for request_id in list(self._running):
                owed = self._prefills.of(request_id)
                if owed is None or not owed.running:
                    # Through, or it found no blocks after all.
                    self._running.discard(request_id)
                    if owed is None or not owed.tokens:
                        self._all.discard(request_id)
        self._left = self.budget(pressure, pace * self._mean_s)
        self._shrunk = self._left < self._context.scheduler.max_num_scheduled_tokens
