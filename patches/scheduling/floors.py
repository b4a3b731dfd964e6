"""What each tenant was let in with, and whether it is below the share that nobody may take from it."""

from __future__ import annotations


class Floors:
    """Admitted work by tenant, forgotten at one pace for all; tenants count while they ask for something.

    The floor of a tenant is `share` of its weight's part of all admitted work. As it is a part of what was
    admitted, it follows the machine, and all floors together are `share` of it: they can always be kept.
    """

    def __init__(self, share: float, horizon_s: float) -> None:
        self._share, self._horizon_s = share, horizon_s
        self._admitted: dict[str, float] = {}
        self._weight: dict[str, float] = {}
        self._seen_s: dict[str, float] = {}
        self._all = 0.0
        self._last_s: float | None = None

    def ask(self, tenant: str, weight: float, now: float) -> bool:
        """Note that a tenant asks; whether it has had less than its floor.

        Work is forgotten by steps of the arrivals, O(active tenants) each; those that have not asked for two
        horizons are left out.
        """
        self._forget(now)
        self._weight[tenant], self._seen_s[tenant] = weight, now
        part = weight / sum(self._weight.values())
        return self._admitted.get(tenant, 0.0) < self._share * part * self._all

    def admit(self, tenant: str, tokens: float) -> None:
        """So much work of a tenant was let in."""
        self._admitted[tenant] = self._admitted.get(tenant, 0.0) + tokens
        self._all += tokens

    def withdraw(self, tenant: str, tokens: float) -> None:
        """Work that was let in left without being served."""
        taken = min(tokens, self._admitted.get(tenant, 0.0))
        if taken > 0:
            self._admitted[tenant] -= taken
            self._all = max(0.0, self._all - taken)

    def share_of(self, tenant: str) -> float:
        """Its part of what was admitted lately."""
        return self._admitted.get(tenant, 0.0) / self._all if self._all > 0 else 0.0

    def _forget(self, now: float) -> None:
        if self._last_s is not None and now > self._last_s:
            kept = self._horizon_s / (self._horizon_s + now - self._last_s)
            for tenant in self._admitted:
                self._admitted[tenant] *= kept
            gone = [t for t, seen in self._seen_s.items() if now - seen > 2 * self._horizon_s]
            for tenant in gone:
                for table in (self._admitted, self._weight, self._seen_s):
                    table.pop(tenant, None)
            self._all = sum(self._admitted.values())
        self._last_s = now
