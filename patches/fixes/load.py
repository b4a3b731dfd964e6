"""Whether it is overload, how hard it presses, and which level gives way: what `overload` decides by."""

from __future__ import annotations

import math
from typing import Any, Protocol

from patches.scheduling.misses import Capacity, Demand, MissShare, Tightest
from patches.scheduling.prefills import Prefills


class LoadKnobs(Protocol):
    """The knobs that it goes by; see `OverloadKnobs`."""

    @property
    def enter_slo_factor(self) -> float: ...
    @property
    def standing_slo_factor(self) -> float: ...
    @property
    def enter_miss_share(self) -> float: ...
    @property
    def leave_miss_share(self) -> float: ...
    @property
    def calm_s(self) -> float: ...
    @property
    def miss_horizon_s(self) -> float: ...
    @property
    def floor_horizon_s(self) -> float: ...
    @property
    def capacity_horizon_s(self) -> float: ...
    @property
    def step_slo_share(self) -> float: ...
    @property
    def step_slo_least_share(self) -> float: ...
    @property
    def full_load_slo_share(self) -> float: ...


class Load:
    """The line as it is and as it would be, and the promises that were kept and broken lately."""

    def __init__(self, knobs: LoadKnobs, context: Any, prefills: Prefills) -> None:
        self._knobs, self._prefills = knobs, prefills
        self._misses = MissShare(knobs.miss_horizon_s)
        self._by_level: dict[int, MissShare] = {}
        self._tightest = Tightest(knobs.floor_horizon_s)
        self._demand = Demand()
        self._capacity = Capacity(knobs.capacity_horizon_s)
        self._trouble_s = -math.inf
        # Since when it has been overload, shorter breaks included, and when it last was.
        self._since_s = math.inf
        self._last_s = -math.inf
        self._periods = 0
        self.overloaded = False
        context.gauge("overload_periods", lambda: float(self._periods))

    def see(self, slo_s: float, uncached: int, now: float) -> None:
        """A request came, whether it is let in or not."""
        self._tightest.see(slo_s, now)
        self._demand.add(uncached)

    def count(self, level: int, missed: bool, now: float) -> None:
        """One promise was kept or broken."""
        self._misses.add(missed, now)
        mine = self._by_level.get(level)
        if mine is None:
            mine = self._by_level[level] = MissShare(self._knobs.miss_horizon_s)
        mine.add(missed, now)

    def backlog_s(self) -> float:
        """Seconds that the whole uncached backlog takes at the measured rate."""
        rate = self._prefills.per_s
        return self._prefills.total / rate if rate else 0.0

    def standing_s(self) -> float:
        """Longest line in an overload that lasts; infinite while nobody has a target."""
        return self._knobs.standing_slo_factor * self._tightest.slo_s

    def burst_s(self, slo_s: float, now: float) -> float:
        """Longest line before a request of this target: a burst that is over within it is no standing line.

        As the overload lasts the limit falls from that target to the standing one.
        """
        return max(self.standing_s(), slo_s - max(0.0, now - self._since_s))

    def update(self, now: float) -> None:
        """Enter or leave overload."""
        knobs, slo_s, misses = self._knobs, self._tightest.slo_s, self._misses.at(now)
        self._capacity.see(self._prefills.per_s, now)
        self._demand.drain(self._capacity.per_s, now)
        line_s, enter_s = self._demand.seconds, knobs.enter_slo_factor * slo_s
        self._demand.bound(2 * enter_s)
        begins = misses > knobs.enter_miss_share or line_s > enter_s
        if begins and not self.overloaded:
            self._periods += 1
            self.overloaded = True
            if now - self._last_s > knobs.floor_horizon_s:
                self._since_s = now
        if self.overloaded:
            self._last_s = now
        if misses > knobs.leave_miss_share or line_s > enter_s / 2:
            self._trouble_s = now
        elif self.overloaded and now - self._trouble_s >= knobs.calm_s:
            self.overloaded = False

    def pressure(self, now: float) -> float:
        """0 with no load to speak of, 1 from a backlog of a part of the tightest target, or at overload's misses."""
        slo_s = self._tightest.slo_s * self._knobs.full_load_slo_share
        backlog = self.backlog_s() / slo_s if slo_s < math.inf else 0.0
        return min(1.0, max(backlog, self._misses.at(now) / self._knobs.enter_miss_share))

    def step_s(self, now: float) -> float:
        """How long a step with long prefills may last under load: the less, the more promises are broken."""
        knobs = self._knobs
        strain = min(1.0, self._misses.at(now) / knobs.enter_miss_share)
        share = knobs.step_slo_share - strain * (knobs.step_slo_share - knobs.step_slo_least_share)
        return share * self._tightest.slo_s

    def room_for(self, level: int, now: float) -> float:
        """Part of its limit that a level keeps: the worst level gives way to the misses of better ones first.

        Over the misses from `leave_miss_share` to `enter_miss_share` the worst level's part falls from 1 to
        0, over the next such band that of the level before it, and so on.
        """
        knobs = self._knobs
        missed = max((m.at(now) for other, m in self._by_level.items() if other < level), default=0.0)
        worse = sum(1 for other in self._by_level if other > level)
        band = knobs.enter_miss_share - knobs.leave_miss_share
        over = missed - knobs.leave_miss_share - worse * band
        return 1.0 if over <= 0 else max(0.0, 1.0 - over / band) if band else 0.0
