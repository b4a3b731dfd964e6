"""What each tenant holds, what its fair share by weight is, and what it claims of a pass up to its floor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from patches.fixes.step_claims import Claim, Pass


class ShareKnobs(Protocol):
    """The knobs that it goes by; see `TenantKnobs`."""

    @property
    def tenant_weight(self) -> dict[str, Any]: ...
    @property
    def floor_factor(self) -> float: ...
    @property
    def claimants_max_entries(self) -> int: ...
    @property
    def least_prefill_tokens(self) -> int: ...


class Account:
    """What one tenant holds."""

    __slots__ = ("blocks", "requests", "running", "tenant", "uncached", "weight")

    def __init__(self, tenant: str, weight: float) -> None:
        self.tenant, self.weight = tenant, weight
        self.requests = self.running = self.blocks = 0
        # Share of a prompt's tokens that the prefix cache did not hold, of late.
        self.uncached = 1.0


class Record:
    """One request and the blocks that count for it; 0 while it waits."""

    __slots__ = ("account", "blocks", "request")

    def __init__(self, account: Account, request: Any) -> None:
        self.account, self.request = account, request
        self.blocks = 0


class Shares:
    """Accounts of the tenants that have a request in the engine."""

    def __init__(self, knobs: ShareKnobs, context: Any) -> None:
        self._knobs, self._context = knobs, context
        self._accounts: dict[str, Account] = {}
        self._records: dict[str, Record] = {}
        self._weight = 0.0

    # who is there

    def record(self, request: Any) -> Record:
        """The request's record; its tenant takes part from the first on."""
        found = self._records.get(request.request_id)
        if found is not None:
            return found
        info = self._context.request_info(request)
        account = self._accounts.get(info.tenant)
        if account is None:
            weight = self._knobs.tenant_weight.get(info.tenant, info.weight)
            account = self._accounts[info.tenant] = Account(info.tenant, weight)
            self._weight += account.weight
        account.requests += 1
        made = self._records[request.request_id] = Record(account, request)
        return made

    def known(self, request_id: str) -> Record | None:
        """The record of a request that was seen and has not ended."""
        return self._records.get(request_id)

    def drop(self, request_id: str) -> Record | None:
        """Forget a request, and its tenant with its last one; returns what it was."""
        record = self._records.pop(request_id, None)
        if record is None:
            return None
        account = record.account
        account.requests -= 1
        if not account.requests:
            del self._accounts[account.tenant]
            self._weight = self._weight - account.weight if self._accounts else 0.0
        return record

    # what there is

    def fair(self, account: Account, capacity: float) -> float:
        """Its part by weight of so much."""
        return capacity * account.weight / self._weight if self._weight > 0 else capacity

    def seats(self) -> int:
        """Requests that may run at a time."""
        return int(self._context.scheduler.max_num_active_reqs)

    def blocks(self) -> int:
        """All KV blocks."""
        return int(self._context.scheduler.kv_cache_manager.block_pool.num_gpu_blocks)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // int(self._context.scheduler.block_size))

    def of_step(self, account: Account, made: Pass) -> float:
        """Prefill tokens of the pass that it is sure of."""
        share = made.prefill_tokens * account.weight / made.prefill_weight if made.prefill_weight else 0.0
        return max(self._knobs.floor_factor * share, float(self._knobs.least_prefill_tokens))

    # who claims what

    def begin_pass(self, prefilling: Iterable[Record]) -> Pass:
        """What the tenants with a prefill under way, or something waiting, claim up to their floors."""
        scheduler, chunks = self._context.scheduler, list(prefilling)
        lines = self._context.lines(self._knobs.claimants_max_entries)
        # Tokens that each tenant could prefill now: the rest of what runs, and what waits.
        wanted: dict[str, float] = {}
        for record in chunks:
            request, tenant = record.request, record.account.tenant
            wanted[tenant] = wanted.get(tenant, 0.0) + request.num_tokens - request.num_computed_tokens
        for line in lines:
            account = self._accounts.get(line.tenant)
            if account is not None:
                wanted[line.tenant] = wanted.get(line.tenant, 0.0) + line.tokens * account.uncached
        room = max(0, scheduler.max_num_scheduled_tokens - len(scheduler.running) + len(chunks))
        made = Pass(room, room, sum(self._accounts[tenant].weight for tenant in wanted))
        for tenant in wanted:
            rank = self._context.tenant_rank(tenant)
            if rank is not None:
                made.ranks[tenant] = rank
        for record in chunks:
            request = record.request
            made.promised += self.blocks_for(request.num_tokens - request.num_computed_tokens)
        for tenant, tokens in wanted.items():
            account = self._accounts[tenant]
            made.claim(tenant, Claim(tokens=int(min(tokens, self.of_step(account, made)))))
        for line in lines:
            account = self._accounts.get(line.tenant)
            if account is not None:
                self._claim_room(account, line.requests, line.tokens, made)
        return made

    def _claim_room(self, account: Account, requests: int, tokens: int, made: Pass) -> None:
        """Seats and blocks that it lacks to its floor, at most what it has waiting."""
        factor = self._knobs.floor_factor
        seats = int(factor * self.fair(account, self.seats())) - account.running
        blocks = int(factor * self.fair(account, self.blocks())) - account.blocks
        if not account.running:
            # One request is within everybody's floor.
            seats, blocks = max(seats, 1), max(blocks, self.blocks_for(tokens // requests))
        if seats <= 0 or blocks <= 0:
            return
        claim = made.claims.get(account.tenant, Claim())
        made.claim(
            account.tenant,
            Claim(min(seats, requests), min(blocks, self.blocks_for(tokens)), claim.tokens),
        )
