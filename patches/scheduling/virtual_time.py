"""Tenants' service counters, and the virtual time that those who come back are lifted to."""

from __future__ import annotations

import heapq


class Account:
    """One tenant's service over its weight, and how many of its requests wait or prefill."""

    __slots__ = ("demand", "number", "provisional", "requests", "service", "tenant", "uncached", "weight")

    def __init__(self, tenant: str, weight: float, service: float) -> None:
        self.tenant, self.weight, self.service = tenant, weight, service
        # Of the pass under way; settled at its end.
        self.provisional = 0.0
        self.demand = self.requests = 0
        # Its one valid item among those of the active tenants.
        self.number = -1
        # Share of a prompt's tokens that the prefix cache did not hold, of late.
        self.uncached = 1.0


class VirtualTime:
    """The smallest counter among tenants with requests that wait or prefill; it never goes back."""

    def __init__(self) -> None:
        self.now = 0.0
        self._active: list[tuple[float, int, Account]] = []
        self._numbers = 0

    def enter(self, account: Account) -> None:
        """It takes part: it has come to want service, or its counter has fallen. O(log n)."""
        self._numbers += 1
        account.number = self._numbers
        heapq.heappush(self._active, (account.service, account.number, account))
        if self._numbers % 1024 == 0:
            # What has left is dropped when it surfaces, or now and then.
            self._active = [item for item in self._active if item[2].demand and item[1] == item[2].number]
            heapq.heapify(self._active)

    def advance(self) -> None:
        """Bring it up to date; O(log n) amortised."""
        active = self._active
        while active:
            service, number, account = active[0]
            if not account.demand or number != account.number:
                heapq.heappop(active)
            elif service != account.service:
                heapq.heapreplace(active, (account.service, number, account))
            else:
                self.now = max(self.now, service)
                return
