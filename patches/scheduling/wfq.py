"""S6: weighted fair queueing over tenants: who has had least for its weight is next; idle share is borrowed."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveFloat

from patches.scheduling.virtual_time import Account, VirtualTime
from patches.seam.patch import Hooks, Knobs, Patch

WHY = """
First come, first served gives the machine to whoever sends most: a tenant that floods the queue with long documents
sets everybody's waiting time, and a static priority only turns that round, so that whoever is put last gets nothing.
Neither knows what a tenant has had already, nor what it is entitled to.
"""

HOW = """
Each tenant has a counter of the service that it was given, divided by its weight: uncached prompt tokens and output
tokens alike, as they are scheduled. Waiting requests stand in one queue for each tenant, and the tenant with the
smallest counter is next; inside it the other patches decide. A request that is picked counts at once, so that several
admissions in one pass go to different tenants. All requests of a tenant share its one counter, so sending more of them
gains nothing. The same counter orders running prefills and, when blocks run out, victims.

Beside a patch that orders requests by what they were promised (`qos`, `mlfq`, `edf`) counters are compared in grains of a
few requests' worth, and inside a grain that patch decides. What is served comes in whole requests anyway: a finer order
would make no window of seconds fairer, and would put a burst of short urgent requests behind a document of a tenant that
is a few tokens behind.

Nothing is held back: if only one tenant wants service, it gets all of it. A tenant that comes back from a pause
is lifted to the smallest counter among those that wait or prefill now, so nobody saves up credit by being idle, and
what it had borrowed from others' idle share stays on its account only as far as it is ahead of them.

A running prefill is looked at before any waiting request, and would take the whole step. So it leaves to waiting
tenants whose counter is smaller what they are owed: the tokens that bring their counters up to its own, at most what
they have waiting. What it leaves is not for its own tenant, whose next request waits until this one goes on: otherwise
prefills half done would pile up and hold blocks. If nobody is admitted into what was left, nothing is left for the next
few steps.

Not charged: tokens computed again after a preemption (its cause is nearly always another's need for blocks, and the
tenant has paid for them once) and drafts that were rejected. Decodes are never held up, but they are charged.

Bound: of two tenants that both wait without a pause, neither gets more per weight than the other by more than a grain and
what is outstanding at the pick: one step's tokens and the rest of the tokens of the requests that it has running. A request
waits for at most its tenant's line and that bound times the sum of weights of the others.
"""


class WfqKnobs(Knobs):
    """What may be tuned."""

    tenant_weight: dict[str, PositiveFloat] = Field(
        default_factory=dict, description="weights by tenant, in place of those that their identity carries"
    )
    grain_tokens: int = Field(
        2048,
        ge=0,
        description="service per weight in which tenants are equals, and the other patches' order decides; 0 is none",
    )
    prefills_yield: bool = Field(
        True, description="whether a running prefill leaves waiting tenants the tokens that they are owed"
    )
    owed_max_entries: int = Field(
        16, ge=1, description="waiting tenants that are looked at for that, first in line first"
    )
    yield_retry_steps: int = Field(
        8, ge=1, description="steps in which nothing is left after nobody could use what was left"
    )


# Patches that order requests by what was promised to them.
ORDERING = ("qos", "mlfq", "edf")
# A prefill under way gets at least so many tokens in a step, so that no step is empty for its sake.
_LEAST_TOKENS = 16


class _Record:
    """One request: whose it is, whether it still waits or prefills, and up to where it was paid when preempted."""

    __slots__ = ("account", "paid", "pending", "request")

    def __init__(self, account: Account, request: Any) -> None:
        self.account, self.request = account, request
        self.paid = 0
        self.pending = False


class _Wfq:
    """The state of the patch for one scheduler."""

    def __init__(self, knobs: WfqKnobs, context: Any) -> None:
        self._knobs, self._context = knobs, context
        # Without anybody to order inside of it a grain would only be less exact.
        self._grain = knobs.grain_tokens if any(map(context.beside, ORDERING)) else 0
        self._accounts: dict[str, Account] = {}
        self._records: dict[str, _Record] = {}
        # Requests that ended since the last update: their last drafts may still be refunded.
        self._ended: dict[str, _Record] = {}
        self._time = VirtualTime()
        self._forget_above = 64
        # The pass under way.
        self._noted: tuple[str, int] = ("", 0)
        self._picked: dict[str, float] = {}
        self._provisional: dict[str, Account] = {}
        self._left: int | None = None
        self._claims: list[tuple[Account, float]] | None = None
        self._yielded: set[str] = set()
        self._yield_again_in_steps = 0
        self._charged = self._recomputed = self._refunded = self._lifts = self._yields = 0
        for name in ("charged", "recomputed", "refunded"):
            context.gauge(f"wfq_{name}_tokens", lambda name=name: float(getattr(self, f"_{name}")))
        context.gauge("wfq_lifts", lambda: float(self._lifts))
        context.gauge("wfq_yields", lambda: float(self._yields))
        context.gauge("wfq_spread", self._spread)

    # order

    def tenant_rank(self, tenant: str, now: float) -> float:
        """Service per weight, that of this pass included."""
        account = self._accounts.get(tenant)
        service = self._time.now if account is None else account.service + account.provisional
        return service // self._grain if self._grain else service

    def on_pick(self, request: Any, now: float) -> None:
        """Count what it is about to get; unless the tokens of this pass are known, its whole length."""
        account = self._record(request).account
        noted_for, tokens = self._noted
        amount = (tokens if noted_for == request.request_id else request.num_tokens) / account.weight
        self._picked[request.request_id] = amount
        self._count_for_this_pass(account, amount)

    def on_put_back(self, request: Any, now: float) -> None:
        """It was not admitted."""
        account = self._record(request).account
        account.provisional -= self._picked.pop(request.request_id, 0.0)
        self._context.rerank(account.tenant)

    def _count_for_this_pass(self, account: Account, amount: float) -> None:
        account.provisional += amount
        self._provisional[account.tenant] = account

    # what a running prefill leaves

    def token_cap(self, request: Any, computed: int, new_tokens: int, now: float) -> int:
        """A running prefill yields to waiting tenants that have had less."""
        if not self._context.is_running(request):
            self._noted = (request.request_id, new_tokens)
            return new_tokens
        account = self._record(request).account
        granted = new_tokens
        if self._knobs.prefills_yield and not self._yield_again_in_steps:
            if self._left is None:
                scheduler = self._context.scheduler
                self._left = scheduler.max_num_scheduled_tokens - len(scheduler.running)
            # What is asked for is never more than what the step has left, whatever others cut.
            left = max(self._left, new_tokens)
            granted = min(new_tokens, max(_LEAST_TOKENS, left - self._owed_before(account)))
            self._left = left - granted
            if granted < new_tokens:
                self._yielded.add(account.tenant)
                self._yields += 1
        self._count_for_this_pass(account, granted / account.weight)
        return granted

    def waiting_gate(self, request: Any, now: float) -> str | None:
        """What a running prefill has left in this pass is not for its own tenant."""
        if self._yielded and self._record(request).account.tenant in self._yielded:
            return "a prefill of its tenant has yielded to others"
        return None

    def _owed_before(self, account: Account) -> int:
        """Tokens that waiting tenants may have before this one's counter is the smallest."""
        if self._claims is None:
            self._claims = self._admissible()
        rank = account.service + account.provisional
        owed = 0.0
        for other, tokens in self._claims:
            lead = rank - other.service - other.provisional - self._grain
            if lead > 0 and other is not account:
                owed += min(tokens, lead * other.weight)
        return int(owed)

    def _admissible(self) -> list[tuple[Account, float]]:
        """Waiting tenants, first in line first, and the uncached tokens that seats and free blocks allow them."""
        scheduler = self._context.scheduler
        seats = scheduler.max_num_active_reqs - len(scheduler.running)
        manager = scheduler.kv_cache_manager
        free = manager.block_pool.get_num_free_blocks() - manager.watermark_blocks
        room = free * scheduler.block_size
        out: list[tuple[Account, float]] = []
        if seats <= 0:
            return out
        for tenant, requests, tokens in self._context.lines(self._knobs.owed_max_entries):
            account = self._accounts.get(tenant)
            each = tokens / requests
            count = min(requests, seats, int(room // each) if each else seats)
            if account is None or count <= 0:
                # The scan ends at the first that finds no room.
                break
            out.append((account, count * each * account.uncached))
            seats -= count
            room -= count * each
            if seats <= 0:
                break
        return out

    # charges

    def after_schedule(self, scheduler_output: Any, now: float) -> None:
        """Charge what was scheduled in place of what was counted for the pass."""
        records = self._records
        charged = 0
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            record = records.get(request_id)
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
            record = records.get(new.req_id)
            if record is not None and record.request.num_prompt_tokens:
                share = 1 - new.num_computed_tokens / record.request.num_prompt_tokens
                record.account.uncached += (share - record.account.uncached) / 8
        self._settle_pass()
        self._time.advance()

    def _settle_pass(self) -> None:
        if self._yield_again_in_steps:
            self._yield_again_in_steps -= 1
        if self._yielded and not self._picked:
            self._yield_again_in_steps = self._knobs.yield_retry_steps
        for account in self._provisional.values():
            account.provisional = 0.0
            self._context.rerank(account.tenant)
        self._provisional.clear()
        self._picked.clear()
        self._yielded.clear()
        self._left = self._claims = None

    def _not_paid_yet(self, record: _Record, tokens: int) -> int:
        end = record.request.num_computed_tokens
        again = max(0, min(end, record.paid) - (end - tokens))
        if end >= record.paid:
            record.paid = 0
        self._recomputed += again
        return tokens - again

    def after_update(self, scheduler_output: Any, outputs: dict[int, Any], now: float) -> None:
        """Give back what was charged for drafts that were rejected."""
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
            self._time.enter(account)
        self._context.rerank(account.tenant)

    # who is active

    def on_add(self, request: Any, now: float) -> None:
        """Its tenant wants service; if it did not before, it is lifted to those who do."""
        record = self._record(request)
        self._want(record)

    def on_preempt(self, request: Any, now: float) -> None:
        """It wants to prefill again; what was computed once is paid."""
        record = self._record(request)
        record.paid = max(record.paid, request.num_computed_tokens)
        self._want(record)

    def on_finish(self, request: Any, now: float) -> None:
        """Forget it, and its tenant once that has nothing to remember."""
        record = self._records.pop(request.request_id, None)
        if record is None:
            return
        self._ended[request.request_id] = record
        account = record.account
        account.requests -= 1
        if record.pending:
            account.demand -= 1
        if not self._records:
            # Nothing is under way: a new busy period begins with equal counters.
            self._accounts.clear()
        elif len(self._accounts) > self._forget_above:
            self._forget()

    def _record(self, request: Any) -> _Record:
        found = self._records.get(request.request_id)
        if found is not None:
            return found
        info = self._context.request_info(request)
        weight = self._knobs.tenant_weight.get(info.tenant, info.weight)
        account = self._accounts.get(info.tenant)
        if account is None:
            account = self._accounts[info.tenant] = Account(info.tenant, weight, self._time.now)
        account.weight = weight
        account.requests += 1
        made = self._records[request.request_id] = _Record(account, request)
        return made

    def _want(self, record: _Record) -> None:
        if record.pending:
            return
        record.pending = True
        account = record.account
        account.demand += 1
        if account.demand > 1:
            return
        self._time.advance()
        if account.service < self._time.now:
            account.service = self._time.now
            self._lifts += 1
        self._time.enter(account)
        # If it is the only one, its service from here on is not held against it.
        self._time.advance()

    def _forget(self) -> None:
        """Drop tenants without requests that would be lifted if they came back."""
        self._accounts = {
            tenant: account
            for tenant, account in self._accounts.items()
            if account.requests or account.service > self._time.now
        }
        self._forget_above = 64 + 2 * len(self._accounts)

    def _spread(self) -> float:
        """By how much the counters of active tenants differ now, tokens per weight."""
        services = [account.service for account in self._accounts.values() if account.demand]
        return max(services) - min(services) if services else 0.0


def build(knobs: WfqKnobs, context: Any) -> Hooks:
    """The hooks for one scheduler."""
    state = _Wfq(knobs, context)
    return Hooks(
        tenant_rank=state.tenant_rank,
        on_pick=state.on_pick,
        on_put_back=state.on_put_back,
        waiting_gate=state.waiting_gate,
        token_cap=state.token_cap,
        after_schedule=state.after_schedule,
        after_update=state.after_update,
        on_add=state.on_add,
        on_preempt=state.on_preempt,
        on_finish=state.on_finish,
    )


PATCH = Patch(
    name="wfq",
    number="S6",
    area="scheduling",
    summary="weighted fair queueing over tenants by service received; idle share is borrowed",
    knobs=WfqKnobs,
    build=build,
    seams=(
        "tenant_rank",
        "on_pick",
        "on_put_back",
        "waiting_gate",
        "token_cap",
        "after_schedule",
        "after_update",
        "on_add",
        "on_preempt",
        "on_finish",
    ),
    by_tenant=True,
    ranks={"waiting_gate": 15, "token_cap": 15},
    why=WHY,
    how=HOW,
    baseline="none: upstream knows no tenants; --scheduling-policy priority starves whoever is put last",
    mechanism="jain_index",
    references=(
        "Sheng et al.: Fairness in serving large language models (OSDI 2024), for the counters and the lift",
        "Demers, Keshav, Shenker: Analysis and simulation of a fair queueing algorithm (1989)",
        "Goyal, Vin, Cheng: Start-time fair queueing (1996), for virtual time as the start tag in service",
    ),
    removable_when="upstream schedules by tenant and by service received",
)
