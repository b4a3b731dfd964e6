"""Tenants' accounts of service: who wants some, what was charged for what was scheduled, and what was given back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patches.scheduling.virtual_time import Account, VirtualTime

# Above so many accounts those that have nothing to remember are dropped.
_KEPT_ACCOUNTS = 64


class Record:
    """One request: whose it is, whether it still waits or prefills, and up to where it was paid when preempted."""

    __slots__ = ("account", "paid", "pending", "request")

    def __init__(self, account: Account, request: Any) -> None:
        self.account, self.request = account, request
        self.paid = 0
        self.pending = False


class Ledger:
    """What each tenant was given, over its weight; one record a request, from arrival to end.

    A tenant that comes to want service starts no further than `burst` behind those that do.
    """

    def __init__(self, tenant_weight: Mapping[str, float], burst: float, context: Any) -> None:
        self._tenant_weight, self._burst, self._context = tenant_weight, burst, context
        self._accounts: dict[str, Account] = {}
        self._records: dict[str, Record] = {}
        # Requests that ended since the last update: their last drafts may still be refunded.
        self._ended: dict[str, Record] = {}
        self._forget_above = _KEPT_ACCOUNTS
        self.time = VirtualTime()
        self._charged = self._recomputed = self._refunded = self._lifts = 0
        for name in ("charged", "recomputed", "refunded"):
            context.gauge(f"wfq_{name}_tokens", lambda name=name: float(getattr(self, f"_{name}")))
        context.gauge("wfq_lifts", lambda: float(self._lifts))

    def account(self, tenant: str) -> Account | None:
        """The tenant's account; None if it has none yet."""
        return self._accounts.get(tenant)

    def record(self, request: Any) -> Record:
        """The request's record, made when it is first asked for."""
        found = self._records.get(request.request_id)
        if found is not None:
            return found
        info = self._context.request_info(request)
        weight = self._tenant_weight.get(info.tenant, info.weight)
        account = self._accounts.get(info.tenant)
        if account is None:
            account = self._accounts[info.tenant] = Account(info.tenant, weight, self.start())
        account.weight = weight
        account.requests += 1
        made = self._records[request.request_id] = Record(account, request)
        return made

    # who wants service

    def start(self) -> float:
        """The smallest counter with which a tenant starts to want service."""
        return self.time.now - self._burst

    def want(self, record: Record) -> None:
        """It waits; if its tenant wanted nothing before, that is lifted to those who do."""
        if record.pending:
            return
        record.pending = True
        account = record.account
        account.demand += 1
        if account.demand > 1:
            return
        self.time.advance()
        if account.service < self.start():
            account.service = self.start()
            self._lifts += 1
        self.time.enter(account)
        # If it is the only one, its service from here on is not held against it.
        self.time.advance()

    def preempted(self, request: Any) -> None:
        """It wants to prefill again; what was computed once is paid."""
        record = self.record(request)
        record.paid = max(record.paid, request.num_computed_tokens)
        self.want(record)

    def finish(self, request_id: str) -> None:
        """Forget it, and its tenant once that has nothing to remember."""
        record = self._records.pop(request_id, None)
        if record is None:
            return
        self._ended[request_id] = record
        account = record.account
        account.requests -= 1
        if record.pending:
            account.demand -= 1
        if not self._records:
            # Nothing is under way: a new busy period begins with equal counters.
            self._accounts.clear()
        elif len(self._accounts) > self._forget_above:
            self._forget()

    def _forget(self) -> None:
        """Drop tenants without requests that would be lifted if they came back."""
        self._accounts = {
            tenant: account
            for tenant, account in self._accounts.items()
            if account.requests or account.service > self.start()
        }
        self._forget_above = _KEPT_ACCOUNTS + 2 * len(self._accounts)

    # charges

    def charge(self, scheduler_output: Any) -> None:
        """What was scheduled, less what had been computed before a preemption."""
        charged = 0
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            record = self._records.get(request_id)
            if record is None:
                continue
            if record.paid:
                tokens = self._not_paid_yet(record, tokens)
            charged += tokens
            account = record.account
            account.service += tokens / account.weight
            if record.pending and not record.request.is_prefill_chunk:
                record.pending = False
                account.demand -= 1
        self._charged += charged
        for new in scheduler_output.scheduled_new_reqs:
            record = self._records.get(new.req_id)
            if record is not None and record.request.num_prompt_tokens:
                share = 1 - new.num_computed_tokens / record.request.num_prompt_tokens
                record.account.uncached += (share - record.account.uncached) / 8

    def _not_paid_yet(self, record: Record, tokens: int) -> int:
        end = record.request.num_computed_tokens
        again = max(0, min(end, record.paid) - (end - tokens))
        if end >= record.paid:
            record.paid = 0
        self._recomputed += again
        return tokens - again

    def give_back(self, scheduler_output: Any, outputs: dict[int, Any]) -> None:
        """What was charged for drafts that were rejected."""
        drafted = scheduler_output.scheduled_spec_decode_tokens
        if drafted:
            for client in outputs.values():
                for output in client.outputs:
                    drafts = drafted.get(output.request_id)
                    if drafts and output.new_token_ids:
                        self._refund(output.request_id, len(drafts) + 1 - len(output.new_token_ids))
        self._ended.clear()

    def _refund(self, request_id: str, tokens: int) -> None:
        record = self._records.get(request_id) or self._ended.get(request_id)
        if record is None or tokens <= 0:
            return
        account = record.account
        account.service -= tokens / account.weight
        self._refunded += tokens
        record.paid = max(0, record.paid - tokens)
        if account.demand:
            self.time.enter(account)
        self._context.rerank(account.tenant)

    def spread(self) -> float:
        """By how much the counters of active tenants differ now, tokens per weight."""
        services = [account.service for account in self._accounts.values() if account.demand]
        return max(services) - min(services) if services else 0.0
