"""Load as the tenants feel it: the share of broken promises lately, and the tightest promise that is asked for."""

from __future__ import annotations

import math


class MissShare:
    """Share of promises that were broken lately: counts with decay, and as many good ones to start with.

    `prior` promises count as kept from the start, so that the first miss of an idle engine is no overload.
    """

    def __init__(self, horizon_s: float, prior: float = 20.0) -> None:
        self._horizon_s, self._prior = horizon_s, prior
        self._all = self._missed = 0.0
        self._last_s: float | None = None

    def add(self, missed: bool, now: float) -> None:
        """One promise was kept or broken."""
        self._decay(now)
        self._all += 1
        self._missed += missed

    def at(self, now: float) -> float:
        """The share now."""
        self._decay(now)
        return self._missed / (self._all + self._prior)

    def _decay(self, now: float) -> None:
        if self._last_s is not None and now > self._last_s:
            kept = self._horizon_s / (self._horizon_s + now - self._last_s)
            self._all *= kept
            self._missed *= kept
        self._last_s = now


class Tightest:
    """The smallest target among the requests of the last while; remembers one value a target."""

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._seen_s: dict[float, float] = {}
        self.slo_s = math.inf

    def see(self, slo_s: float, now: float) -> None:
        """A request with this target came."""
        if slo_s not in self._seen_s and len(self._seen_s) >= 64:
            self._seen_s = {s: t for s, t in self._seen_s.items() if now - t <= self._horizon_s}
            if len(self._seen_s) >= 64:
                del self._seen_s[max(self._seen_s)]
        self._seen_s[slo_s] = now
        self.slo_s = min(s for s, t in self._seen_s.items() if now - t <= self._horizon_s)


class Demand:
    """The line as it would be had nobody been refused, in seconds of draining: a virtual queue.

    Refusing shortens the real line, so that cannot tell whether the overload is over; this can.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._per_s = 0.0
        self._last_s: float | None = None

    def add(self, tokens: float) -> None:
        """So much work was asked for, whether it was let in or not."""
        self._tokens += tokens

    def drain(self, per_s: float, now: float) -> None:
        """Time passed; this much a second can be done (0: not known yet, so all of it is)."""
        if self._last_s is not None:
            done = per_s * max(0.0, now - self._last_s) if per_s else self._tokens
            self._tokens = max(0.0, self._tokens - done)
        self._per_s, self._last_s = per_s, now

    def bound(self, most_s: float) -> None:
        """Forget what is beyond so many seconds, so that a long overload does not outlast itself."""
        if self._per_s:
            self._tokens = min(self._tokens, most_s * self._per_s)

    @property
    def seconds(self) -> float:
        """Length of the line."""
        return self._tokens / self._per_s if self._per_s else 0.0


class Capacity:
    """The best rate lately: what can be done, where what is done is held back on purpose."""

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._last_s: float | None = None
        self.per_s = 0.0

    def see(self, per_s: float, now: float) -> None:
        """The rate as measured now; the best one fades towards it."""
        passed_s = max(0.0, now - self._last_s) if self._last_s is not None else 0.0
        self._last_s = now
        self.per_s = max(per_s, self.per_s * self._horizon_s / (self._horizon_s + passed_s))
