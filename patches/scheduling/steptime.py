"""What a step takes, learned from the steps that ran: the part that decodes cost and the price of a prefill token."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from patches.seam.patch import Knobs

# A deadline counts for so long after the last request that had it came.
_DEADLINE_KEPT_S = 30.0
# Steps between schedule and update; a pipeline is a few deep, so more means that outputs got lost.
_MOST_IN_FLIGHT = 64
# Steps over which the price of a token is averaged, and over which the rest follows the load.
_PRICE_STEPS = 400.0
_REST_STEPS = 16.0
# One step after an idle time, or a stall of the host, must not move the averages for long.
_OUTLIER_FACTOR = 8.0


def prefill_tokens(scheduled: Mapping[str, int], decode_tokens: int) -> int:
    """Tokens of those requests that were given more than a decode takes (drafts included)."""
    if decode_tokens == 1:
        # Once a step, over all that run: nearly all of them are decodes.
        return sum(scheduled.values()) - list(scheduled.values()).count(1)
    return sum(tokens for tokens in scheduled.values() if tokens > decode_tokens)


class StepTime:
    """An online model of one engine: a step takes `rest_s` and `token_s` for each prefill token.

    The price of a token comes from the difference between steps that follow each other, in which the
    decodes are nearly the same; so a load that drifts does not pass for a price. The rest is what
    remains of the last few steps at that price, so the prediction near the present size is right even
    where the true curve is not straight. Both are 0 until they are known.
    """

    def __init__(self) -> None:
        self._in_flight: deque[tuple[Any, float]] = deque(maxlen=_MOST_IN_FLIGHT)
        self._updated_s = -math.inf
        self._last: tuple[int, float] | None = None
        self._squares = 0.0
        self._products = 0.0
        self.rest_s = 0.0
        self.token_s = 0.0
        self.steps = 0

    def on_schedule(self, scheduler_output: Any, now: float) -> None:
        """A pass is over; its step runs from now, or from the end of the one before it."""
        if scheduler_output.total_num_scheduled_tokens:
            self._in_flight.append((scheduler_output, now))

    def on_update(self, scheduler_output: Any, now: float, decode_tokens: int = 1) -> None:
        """The step's output is there."""
        while self._in_flight:
            output, scheduled_s = self._in_flight.popleft()
            if output is scheduler_output:
                took_s = now - max(scheduled_s, self._updated_s)
                self._updated_s = now
                if took_s > 0:
                    self.note(prefill_tokens(output.num_scheduled_tokens, decode_tokens), took_s)
                return

    def note(self, tokens: int, took_s: float) -> None:
        """One step: its prefill tokens and what it took."""
        if self.steps:
            took_s = min(took_s, _OUTLIER_FACTOR * (self.rest_s + self.token_s * tokens) + 1e-6)
        if self._last is not None:
            more, longer_s = tokens - self._last[0], took_s - self._last[1]
            keep = 1 - 1 / _PRICE_STEPS
            self._squares = self._squares * keep + more * more
            self._products = self._products * keep + more * longer_s
            if self._squares > 0:
                # A step can be shorter for more tokens by accident; a price is never negative.
                self.token_s = max(0.0, self._products / self._squares)
        self._last = tokens, took_s
        rest_s = max(0.0, took_s - self.token_s * tokens)
        self.steps += 1
        self.rest_s += (rest_s - self.rest_s) / min(self.steps, _REST_STEPS)

    def tokens_within(self, target_s: float, otherwise: int) -> int:
        """Prefill tokens that a step of `target_s` has room for, 0 or more; `otherwise` while no price is known."""
        if not self.token_s:
            return otherwise
        return max(0, int((target_s - self.rest_s) / self.token_s))


class StepKnobs(Knobs):
    """How long a step may take beside decodes and short or important prompts."""

    steps_per_slo_ratio: float = Field(
        6.0,
        ge=1,
        description="steps that fit into the tightest deadline of those protected: the target length",
    )
    steps_per_slo_beside_overload_ratio: float = Field(
        3.0,
        ge=1,
        description="the same where `overload` is on, which shortens steps itself as promises are broken",
    )
    target_step_ms: float = Field(
        50.0, gt=0, description="the target length of a step as long as none of them has a deadline"
    )
    step_stretch_factor: float = Field(
        2.5, ge=1, description="the target is never more than this times what decodes alone take"
    )
    first_tokens: int = Field(
        256, ge=0, description="prefill tokens of a step as long as no step time is known"
    )


class StepBudget:
    """How many prefill tokens a step of the target length has room for.

    With `overload` on, two patches would shrink the same long prefills for the same deadlines, and what admission
    then predicts from the pace of the shrunk ones refuses work that there is room for. So the target is longer there.
    """

    def __init__(self, knobs: StepKnobs, beside_overload: bool = False) -> None:
        self._knobs = knobs
        self._steps_per_slo = (
            knobs.steps_per_slo_beside_overload_ratio if beside_overload else knobs.steps_per_slo_ratio
        )
        self._seen_s: dict[float, float] = {}
        self.steps = StepTime()

    def protect(self, slo_s: float, now: float) -> None:
        """A request came that others are cut for; its target for the first token, infinity for none."""
        if slo_s < math.inf:
            self._seen_s[slo_s] = now

    def target_s(self, now: float) -> float:
        """How long a step should take."""
        knobs = self._knobs
        for slo_s in [slo_s for slo_s, seen in self._seen_s.items() if now - seen > _DEADLINE_KEPT_S]:
            del self._seen_s[slo_s]
        target_s = min(self._seen_s) / self._steps_per_slo if self._seen_s else knobs.target_step_ms / 1e3
        return min(target_s, knobs.step_stretch_factor * self.steps.rest_s or math.inf)

    def tokens(self, now: float, stretch: float = 1.0) -> int:
        """Prefill tokens of a step `stretch` times as long as the target, 0 or more."""
        return self.steps.tokens_within(stretch * self.target_s(now), self._knobs.first_tokens)

    def tokens_per_s(self, now: float) -> float:
        """The rate of prefill at the target length."""
        return self.tokens(now) / self.target_s(now)
