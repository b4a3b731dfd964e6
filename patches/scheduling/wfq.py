"""S6: weighted fair queueing over tenants: who has had least for its weight is next; idle share is borrowed."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveFloat

from patches.scheduling.ledger import Ledger
from patches.scheduling.roomless import Roomless
from patches.scheduling.virtual_time import Account
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
is lifted to the smallest counter among those that wait or prefill now, so nobody saves up more by being idle than a
burst of a few requests, and what it had borrowed from others' idle share stays on its account only as far as it is ahead
of them. The burst is for a tenant whose mean is below its share: its requests come in clusters, and each would wait for
tenants that always want more. Beside a patch that refuses (`admission`, `overload`) there is none: with short lines nobody
wants more for long, and it would put a document that comes after a pause ahead of the urgent.

A running prefill is looked at before any waiting request, and would take the whole step. So it leaves to waiting
tenants whose counter is smaller what they are owed: the tokens that bring their counters up to its own, at most what
they have waiting. What it leaves is not for its own tenant, whose next request waits until this one goes on: otherwise
prefills half done would pile up and hold blocks. If nobody is admitted into what was left, nothing is left for the next
few steps.

Who is next may need more blocks than are free. All others would wait until these have come together, although they need
fewer. Beside a patch that orders by promises better classes pass it while it finds no room, for as long as its
patience lasts; then it is waited for. (By itself it knows no classes, and `watermark` does the same by its own rule.)

Not charged: tokens computed again after a preemption (its cause is nearly always another's need for blocks, and the
tenant has paid for them once) and drafts that were rejected. Decodes are never held up, but they are charged.

Bound: of two tenants that both wait without a pause, neither gets more per weight than the other by more than a grain, a
burst and what is outstanding at the pick: one step's tokens and the rest of the tokens of the requests that it has
running. A request waits for at most its tenant's line and that bound times the sum of weights of the others, and once it is
next, if it finds no room, for what better classes use in the time of its patience.
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
    burst_tokens: int = Field(
        2048,
        ge=0,
        description="service per weight by which a tenant that comes back is ahead of those that always want some",
    )
    room_patience_s: float = Field(
        5.0,
        ge=0,
        description="how long better classes pass one that is next and finds no blocks, beside a patch that orders",
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
# Patches that keep lines short by refusing.
REFUSING = ("admission", "overload")
# A prefill under way gets at least so many tokens in a step, so that no step is empty for its sake.
_LEAST_TOKENS = 16


class _Wfq:
    """The state of the patch for one scheduler."""

    def __init__(self, knobs: WfqKnobs, context: Any) -> None:
        self._knobs, self._context = knobs, context
        # Without anybody to order inside of it a grain would only be less exact.
        ordered = any(map(context.beside, ORDERING))
        self._grain = knobs.grain_tokens if ordered else 0
        # Where lines are kept short everybody comes back all the time, documents too.
        burst = 0 if any(map(context.beside, REFUSING)) else knobs.burst_tokens
        self._ledger = Ledger(knobs.tenant_weight, burst, context)
        # By itself it knows no classes; and `watermark` lets better ones pass on its own account.
        passed = ordered and not context.beside("watermark")
        self._roomless = Roomless(knobs.room_patience_s if passed else 0.0, context)
        # The pass under way.
        self._noted: tuple[str, int] = ("", 0)
        self._picked: dict[str, float] = {}
        self._provisional: dict[str, Account] = {}
        self._left: int | None = None
        self._claims: list[tuple[Account, float]] | None = None
        self._yielded: set[str] = set()
        self._yield_again_in_steps = 0
        self._yields = 0
        context.gauge("wfq_yields", lambda: float(self._yields))
        context.gauge("wfq_spread", self._ledger.spread)

    # order

    def tenant_rank(self, tenant: str, now: float) -> float:
        """Service per weight, that of this pass included."""
        account = self._ledger.account(tenant)
        service = self._ledger.start() if account is None else account.service + account.provisional
        return service // self._grain if self._grain else service

    def on_pick(self, request: Any, now: float) -> None:
        """Count what it is about to get; unless the tokens of this pass are known, its whole length."""
        account = self._ledger.record(request).account
        noted_for, tokens = self._noted
        amount = (tokens if noted_for == request.request_id else request.num_tokens) / account.weight
        self._picked[request.request_id] = amount
        self._count_for_this_pass(account, amount)

    def on_put_back(self, request: Any, now: float) -> None:
        """It was not admitted."""
        account = self._ledger.record(request).account
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
        account = self._ledger.record(request).account
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
        if self._yielded and self._ledger.record(request).account.tenant in self._yielded:
            return "a prefill of its tenant has yielded to others"
        if request.request_id == self._noted[0] or request.request_id in self._picked:
            # It is being admitted: that its own blocks are taken by now must not hold it.
            return None
        return self._roomless.holds(request, now)

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
            account = self._ledger.account(tenant)
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
        self._ledger.charge(scheduler_output)
        if self._yield_again_in_steps:
            self._yield_again_in_steps -= 1
        if self._yielded and not self._picked:
            self._yield_again_in_steps = self._knobs.yield_retry_steps
        for account in self._provisional.values():
            account.provisional = 0.0
            self._context.rerank(account.tenant)
        self._provisional.clear()
        self._picked.clear()
        self._noted = ("", 0)
        self._yielded.clear()
        self._left = self._claims = None
        self._roomless.end_pass()
        self._ledger.time.advance()

    def after_update(self, scheduler_output: Any, outputs: dict[int, Any], now: float) -> None:
        """Give back what was charged for drafts that were rejected."""
        self._ledger.give_back(scheduler_output, outputs)

    def on_add(self, request: Any, now: float) -> None:
        """Its tenant wants service; if it did not before, it is lifted to those who do."""
        self._ledger.want(self._ledger.record(request))
        self._roomless.add(request)

    def on_preempt(self, request: Any, now: float) -> None:
        """It wants to prefill again; what was computed once is paid."""
        self._ledger.preempted(request)
        self._roomless.preempted(request)

    def on_finish(self, request: Any, now: float) -> None:
        """Forget it."""
        self._ledger.finish(request.request_id)
        self._roomless.finish(request)


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
