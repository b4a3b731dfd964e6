"""What is still to be prefilled, how fast that goes, and when first tokens come.

What the deadline patches measure, each for itself. All sums are kept as things happen: an event costs
O(number of levels), a step O(requests that prefill), never O(requests that wait).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# A prompt below this many tokens is not looked up in the prefix cache: the look costs as much as it tells.
PROBE_FROM_TOKENS = 128
# Steps that show how fast prefill goes carry at least this part of what a step may; for so long they count.
_PACE_STEP_SHARE = 0.1
_PACE_S = 30.0
# Weight of what a rate is believed to be where it was not seen, as a part of the horizon.
_PRIOR_SHARE = 0.2
_UNCACHED_ATTR = "patchbench_uncached_tokens"


class Drain:
    """Tokens per second while there is work: idle time does not make a machine slow.

    Amounts and busy seconds are both forgotten at one pace, so the quotient has no bias in its first
    seconds. Only the four basic operations: the same to the last bit on any machine.
    """

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._tokens = self._busy_s = 0.0

    def add(self, tokens: float, busy_s: float) -> None:
        """So many tokens came of this much busy time."""
        if busy_s <= 0:
            self._tokens += tokens
            return
        kept = self._horizon_s / (self._horizon_s + busy_s)
        self._tokens = self._tokens * kept + tokens
        self._busy_s = self._busy_s * kept + busy_s

    def forget(self, passed_s: float) -> None:
        """Time passed that says nothing: what was seen before it weighs less."""
        kept = self._horizon_s / (self._horizon_s + passed_s)
        self._tokens *= kept
        self._busy_s *= kept

    def with_prior(self, per_s: float, weight_s: float) -> float:
        """The rate, as if so much busy time at `per_s` had been seen besides."""
        return (self._tokens + per_s * weight_s) / (self._busy_s + weight_s)

    @property
    def per_s(self) -> float:
        """Tokens per busy second; 0 before any busy time has passed."""
        return self._tokens / self._busy_s if self._busy_s > 0 else 0.0


class Owed:
    """What one request still has to prefill.

    Attributes:
        level: smaller is served first.
        tokens: uncached tokens that are left.
        uncached: of its prompt, when it arrived.
        started: whether it ever got tokens.
        first_s: when its first token came, or None.
    """

    __slots__ = ("finishing", "first_s", "level", "running", "started", "tokens", "uncached")

    def __init__(self, level: int, uncached: int) -> None:
        self.level = level
        self.uncached = uncached
        self.tokens = 0
        self.running = self.started = self.finishing = False
        self.first_s: float | None = None


class Prefills:
    """All requests of one scheduler from arrival to end.

    Call `add` once for each new request, and the other methods from the hooks of the same names.
    """

    def __init__(self, context: Any, horizon_s: float) -> None:
        self._context = context
        self._owed: dict[str, Owed] = {}
        self._by_level: dict[int, int] = {}
        # Those that prefill now, and those whose prefill is scheduled to its end: both are few.
        self._running: dict[str, Any] = {}
        self._finishing: dict[str, Owed] = {}
        self._drain = Drain(horizon_s)
        self._pace = Drain(_PACE_S)
        self._served: dict[int, Drain] = {}
        self._own: dict[int, Drain] = {}
        self._left_over: list[int] = []
        self._horizon_s = horizon_s
        self._total = 0
        self._last_s: float | None = None
        self._was_busy = False
        self._step_tokens: dict[int, int] = {}

    # what is known

    def of(self, request_id: str) -> Owed | None:
        """The account of a request that has not ended."""
        return self._owed.get(request_id)

    @property
    def per_s(self) -> float:
        """Uncached prompt tokens per second of steps that left some over; 0 before there was any prefill.

        As far as there was none of these lately, what steps with much prefill did: the line may have stood for want
        of memory, and that nobody stands in it any more proves nothing.
        """
        return self._drain.with_prior(self.pace_per_s, _PRIOR_SHARE * self._horizon_s)

    @property
    def pace_per_s(self) -> float:
        """The same of steps that carried much prefill: how fast it goes when nothing but the GPU is waited for."""
        return self._pace.per_s or self._drain.per_s

    @property
    def total(self) -> int:
        """Uncached tokens that are owed to all."""
        return self._total

    def ahead(self, level: int) -> int:
        """Uncached tokens owed to this level and those before it."""
        return sum(tokens for other, tokens in self._by_level.items() if other <= level)

    def owed_to(self, levels: Callable[[int], bool]) -> int:
        """Uncached tokens owed to those levels."""
        return sum(tokens for level, tokens in self._by_level.items() if levels(level))

    def owed_below(self, level: int) -> bool:
        """Whether a worse level has anything left to compute."""
        return self._total > self.ahead(level)

    def per_s_for(self, level: int) -> float:
        """What this level is getting while some of it waits; as far as that was not seen lately, what is left to it.

        Never under a tenth of the whole: a level that is shut out for a moment is not for ever.
        """
        whole = self.per_s
        rate = whole - sum(drain.per_s for other, drain in self._served.items() if other < level)
        own = self._own.get(level)
        if own is not None:
            rate = own.with_prior(max(rate, 0.0), _PRIOR_SHARE * self._horizon_s)
        return max(min(rate, whole), 0.1 * whole)

    def wait_s(self, level: int) -> float:
        """Seconds until what is owed to this level now would be prefilled, after what is owed to better ones.

        0 before a rate was measured.
        """
        whole = self.per_s
        if not whole:
            return 0.0
        return self.ahead(level - 1) / whole + self._by_level.get(level, 0) / self.per_s_for(level)

    # what happens

    def add(self, request: Any, level: int, uncached: int) -> Owed:
        """A new request, with what `uncached_tokens` says of its prompt."""
        made = self._owed[request.request_id] = Owed(level, uncached)
        self._change(made, uncached)
        return made

    def after_schedule(self, output: Any, now: float) -> None:
        """Charge what was prefilled, and measure the rate over the time since the pass before."""
        self._measure(now)
        requests = self._context.scheduler.requests
        for new in output.scheduled_new_reqs:
            self._enter(new.req_id, requests)
        for request_id in output.scheduled_cached_reqs.resumed_req_ids:
            self._enter(request_id, requests)
        if self._running:
            scheduled = output.num_scheduled_tokens
            for request_id, request in list(self._running.items()):
                owed = self._owed[request_id]
                tokens = scheduled.get(request_id, 0)
                self._step_tokens[owed.level] = self._step_tokens.get(owed.level, 0) + tokens
                self._change(owed, -min(tokens, owed.tokens))
                if tokens and not request.is_prefill_chunk:
                    del self._running[request_id]
                    owed.running = False
                    self._change(owed, -owed.tokens)
                    if owed.first_s is None:
                        self._finishing[request_id] = owed
        # Only a step that left something over shows how fast it can go; after others it was the traffic's rate.
        self._was_busy = self._total > 0
        self._left_over = [level for level, tokens in self._by_level.items() if tokens > 0]

    def after_update(self, output: Any, now: float) -> list[tuple[str, Owed]]:
        """Requests whose first token came with this update."""
        if not self._finishing:
            return []
        scheduled = output.num_scheduled_tokens
        # Steps may be in flight: an earlier chunk's update comes first, and brings no token.
        came = []
        for request_id, owed in list(self._finishing.items()):
            request = self._context.scheduler.requests.get(request_id)
            if request_id in scheduled and request is not None and request.num_output_tokens > 0:
                del self._finishing[request_id]
                owed.first_s = now
                came.append((request_id, owed))
        return came

    def on_preempt(self, request: Any) -> None:
        """Its blocks are lost: what it had computed is owed again."""
        owed = self._owed.get(request.request_id)
        if owed is None:
            return
        self._running.pop(request.request_id, None)
        owed.running = False
        self._change(owed, int(request.num_tokens) - owed.tokens)

    def on_finish(self, request: Any, now: float) -> Owed | None:
        """It ended, wherever it was; returns its account. Its first token may have been its last: then it came now."""
        owed = self._owed.pop(request.request_id, None)
        if owed is None:
            return None
        self._running.pop(request.request_id, None)
        if self._finishing.pop(request.request_id, None) is not None and request.num_output_tokens > 0:
            owed.first_s = now
        self._change(owed, -owed.tokens)
        return owed

    # inside

    def _enter(self, request_id: str, requests: Any) -> None:
        owed = self._owed.get(request_id)
        if owed is not None:
            owed.running = owed.started = True
            self._running[request_id] = requests[request_id]

    def _change(self, owed: Owed, tokens: int) -> None:
        owed.tokens += tokens
        self._total += tokens
        self._by_level[owed.level] = self._by_level.get(owed.level, 0) + tokens

    def _measure(self, now: float) -> None:
        if self._last_s is not None:
            passed_s = max(0.0, now - self._last_s)
            tokens = sum(self._step_tokens.values())
            if self._was_busy:
                self._drain.add(tokens, passed_s)
            else:
                self._drain.forget(passed_s)
            if tokens >= _PACE_STEP_SHARE * self._context.scheduler.max_num_scheduled_tokens:
                self._pace.add(tokens, passed_s)
            # What a level takes counts over all time: while it is idle it takes nothing.
            for level in self._by_level:
                served = self._served.get(level)
                if served is None:
                    served = self._served[level] = Drain(self._horizon_s)
                served.add(self._step_tokens.get(level, 0), passed_s)
                own = self._own.get(level)
                if own is None:
                    own = self._own[level] = Drain(self._horizon_s)
                if level in self._left_over:
                    own.add(self._step_tokens.get(level, 0), passed_s)
                else:
                    own.forget(passed_s)
        self._step_tokens.clear()
        self._last_s = now


def uncached_tokens(scheduler: Any, request: Any) -> int:
    """Prompt tokens that the prefix cache did not hold when this was first asked, on arrival.

    The look changes nothing, not even the order of eviction. It takes some 100 us for a long prompt, so it is made
    once, whichever patches ask.
    """
    found: int | None = getattr(request, _UNCACHED_ATTR, None)
    if found is None:
        found = _uncached_now(scheduler, request)
        setattr(request, _UNCACHED_ATTR, found)
    return found


def _uncached_now(scheduler: Any, request: Any) -> int:
    tokens = int(request.num_prompt_tokens)
    manager = scheduler.kv_cache_manager
    if tokens < PROBE_FROM_TOKENS or not manager.prefix_cache_lookup_enabled(request):
        return tokens
    return tokens - int(manager.coordinator.find_longest_cache_hit(request.block_hashes, tokens - 1)[1])
