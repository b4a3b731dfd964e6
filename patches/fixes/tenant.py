"""F4: floors and ceilings by tenant on seats, KV blocks and prefill tokens, borrowed elastically."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveFloat

from patches.fixes.shares import Account, Record, Shares
from patches.fixes.step_claims import Claim, Pass
from patches.seam.patch import Hooks, Knobs, Patch

WHY = """
A tenant whose traffic bursts to four times its rate takes seats, KV blocks and steps for seconds: what it was once
given it holds until its answers are complete, and a fair order of admission comes too late for whoever finds nothing
free. Fixed quotas protect the others, and waste the machine whenever they do not come.
"""

HOW = """
Each tenant with a request in the engine has a fair share by weight among all such tenants: of the seats (running
requests), of the KV blocks, and of a step's prefill tokens among those that have prefills to do. Its floor is a part
of the fair share, and at least one request; its ceiling is a multiple.

Both are elastic. As long as no tenant below its floor has something waiting that could run, anybody may have
everything. When one has, others at or above their own floor must leave to it what it lacks: their waiting requests are
held, with the reason, if admitting one would take what is left for the others' floors, and above the ceiling in any
case; what prefills under way have yet to take counts as taken. A prefill beyond its tenant's share of the step gets only
what the others' shares leave, and its tenant starts no other one in that step. Requests that already run keep what they
have; when blocks run out, victims are sooner taken from tenants above their fair share, the sooner the further above.

Nobody is held while nothing runs, and nobody below its floor is ever held. So a tenant that waits has either its
floor, or is next for what becomes free. Bound: a tenant is held only while it has its floor, so at the latest until
enough of its own running requests have ended. Only tenants that can use room make others leave it: what another
patch's gate holds does not count. Where a patch ranks tenants by what they were given (`wfq`), only those that it
serves sooner make others leave seats and tokens: seats for their own sake would give most to whoever does most with one.
Blocks are left to all of them: whoever waits for many at once would keep everybody behind it waiting.
"""


class TenantKnobs(Knobs):
    """What may be tuned."""

    tenant_weight: dict[str, PositiveFloat] = Field(
        default_factory=dict, description="weights by tenant, in place of those that their identity carries"
    )
    floor_factor: float = Field(
        1.0, gt=0, le=1, description="the part of its fair share that a tenant is sure of when it wants it"
    )
    ceiling_factor: float = Field(
        2.0,
        ge=1,
        description="multiple of its fair share that a tenant may reach while another waits below its floor",
    )
    claimants_max_entries: int = Field(
        32, ge=1, description="waiting tenants whose floors are looked after in one step, first in line first"
    )
    least_prefill_tokens: int = Field(
        64, ge=1, description="prefill tokens that a step leaves to a tenant however small its share"
    )


# Steps between two looks at how far running requests have grown.
_GROWTH_STEPS = 16


class _Tenants:
    """The state of the patch for one scheduler."""

    def __init__(self, knobs: TenantKnobs, context: Any) -> None:
        self._knobs, self._context = knobs, context
        self._shares = Shares(knobs, context)
        # Running requests that still prefill.
        self._prefilling: dict[str, Record] = {}
        self._pass: Pass | None = None
        self._noted: tuple[str, int] = ("", 0)
        self._steps = 0
        self._held = {"seats": 0, "blocks": 0, "tokens": 0}
        self._cut_tokens = 0
        for resource in self._held:
            context.gauge(f"tenant_held_{resource}", lambda r=resource: float(self._held[r]))
        context.gauge("tenant_cut_tokens", lambda: float(self._cut_tokens))

    def _begun(self) -> Pass:
        """The pass under way; who claims what is found out when it is first asked."""
        if self._pass is None:
            self._pass = self._shares.begin_pass(self._prefilling.values())
        return self._pass

    # hooks that decide

    def waiting_gate(self, request: Any, now: float) -> str | None:
        """Hold a tenant that has its floor while admitting it would take what others lack to theirs."""
        if not self._context.scheduler.running:
            return None
        account = self._shares.record(request).account
        if not account.running:
            # One request is within everybody's floor.
            return None
        made = self._begun()
        if account.tenant in made.cut:
            # The one that was cut goes on first: half done, they would pile up and hold blocks.
            self._held["tokens"] += 1
            return f"a prefill of {account.tenant or 'its tenant'} has had its share of this step"
        resource = self._short(request, account, made)
        if resource is not None and self._drop_idle_claims(made):
            resource = self._short(request, account, made)
        if resource is None:
            return None
        self._held[resource] += 1
        if resource != "tokens":
            # Held, it makes nobody leave it anything in this pass.
            made.drop(account.tenant)
        return f"{account.tenant or 'the tenant'} has its share of {resource}, others lack theirs"

    def _others(self, account: Account, made: Pass) -> Claim:
        """What others claim before this one."""
        return made.of_others(account.tenant, self._context.tenant_rank(account.tenant))

    def _drop_idle_claims(self, made: Pass) -> bool:
        """Forget claims of tenants whom something else holds by now; whether there were any."""
        idle = [tenant for tenant in made.claims if not self._context.line(tenant).requests]
        for tenant in idle:
            made.drop(tenant)
        return bool(idle)

    def _short(self, request: Any, account: Account, made: Pass) -> str | None:
        """Of what others would lack to their floors if this request was admitted; None if of nothing."""
        scheduler, knobs = self._context.scheduler, self._knobs
        others = self._others(account, made)
        need = self._shares.blocks_for(request.num_tokens)
        for resource, wanted, used, more, capacity, free in (
            (
                "seats",
                others.seats,
                account.running,
                1,
                self._shares.seats(),
                self._shares.seats() - len(scheduler.running),
            ),
            (
                "blocks",
                others.blocks,
                account.blocks,
                need,
                self._shares.blocks(),
                scheduler.kv_cache_manager.block_pool.get_num_free_blocks() - made.promised,
            ),
        ):
            fair = self._shares.fair(account, capacity)
            if wanted <= 0 or used < int(knobs.floor_factor * fair):
                continue
            if free - more < wanted or used + more > knobs.ceiling_factor * fair:
                return resource
        granted = made.granted.get(account.tenant, 0)
        if 0 < others.tokens >= made.left and granted >= self._shares.of_step(account, made):
            return "tokens"
        return None

    def token_cap(self, request: Any, computed: int, new_tokens: int, now: float) -> int:
        """Beyond its tenant's share of the step a prefill gets what the shares of others leave."""
        made = self._begun()
        account = self._shares.record(request).account
        left = max(made.left, new_tokens)
        others = self._others(account, made).tokens
        granted = new_tokens
        if others > 0 and new_tokens > left - others:
            share = self._shares.of_step(account, made) - made.granted.get(account.tenant, 0)
            granted = min(new_tokens, max(int(share), left - others, 0))
            if granted < new_tokens:
                made.cut.add(account.tenant)
                self._cut_tokens += new_tokens - granted
        if self._context.is_running(request):
            self._grant(account, granted, made)
        else:
            # Counted once it is admitted.
            self._noted = (request.request_id, granted)
        return granted

    def _grant(self, account: Account, tokens: int, made: Pass) -> None:
        made.left -= tokens
        made.granted[account.tenant] = made.granted.get(account.tenant, 0) + tokens
        claim = made.claims.get(account.tenant)
        if claim is not None:
            made.claim(
                account.tenant, Claim(claim.seats, claim.blocks, max(0, claim.tokens - max(tokens, 0)))
            )

    def victim_hint(self, request: Any) -> float:
        """1 to 2 for a tenant above its fair share of the blocks, by how far."""
        record = self._shares.known(request.request_id)
        if record is None:
            return 0.0
        fair = self._shares.fair(record.account, self._shares.blocks())
        over = record.account.blocks / fair - 1 if fair > 0 else 0.0
        return 1.0 + min(1.0, over) if over > 0 else 0.0

    # bookkeeping

    def on_pick(self, request: Any, now: float) -> None:
        """It takes a seat, blocks and tokens for the rest of this pass."""
        record = self._shares.record(request)
        account, made = record.account, self._begun()
        noted_for, tokens = self._noted
        tokens = tokens if noted_for == request.request_id else 1
        record.blocks = self._shares.blocks_for(request.num_tokens)
        account.running += 1
        account.blocks += record.blocks
        self._grant(account, tokens, made)
        claim = made.claims.get(account.tenant)
        if claim is not None:
            made.claim(
                account.tenant,
                Claim(max(0, claim.seats - 1), max(0, claim.blocks - record.blocks), claim.tokens),
            )

    def on_put_back(self, request: Any, now: float) -> None:
        """It was not admitted."""
        self._leave(self._shares.record(request))

    def _leave(self, record: Record) -> None:
        """It holds nothing any more."""
        if record.blocks:
            record.account.running -= 1
            record.account.blocks -= record.blocks
            record.blocks = 0
        self._prefilling.pop(record.request.request_id, None)
        self._pass = None

    def after_schedule(self, scheduler_output: Any, now: float) -> None:
        """Note who prefills, how far requests have grown, and what the cache held for new ones."""
        for new in scheduler_output.scheduled_new_reqs:
            self._admitted(new.req_id)
            record = self._shares.known(new.req_id)
            if record is not None and record.request.num_prompt_tokens:
                share = 1 - new.num_computed_tokens / record.request.num_prompt_tokens
                record.account.uncached += (share - record.account.uncached) / 8
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._admitted(request_id)
        for request_id, record in list(self._prefilling.items()):
            if not record.request.is_prefill_chunk:
                del self._prefilling[request_id]
        self._steps += 1
        if self._steps % _GROWTH_STEPS == 0:
            for request in self._context.scheduler.running:
                self._grow(request)
        self._pass = None

    def _admitted(self, request_id: str) -> None:
        record = self._shares.known(request_id)
        if record is not None and record.request.is_prefill_chunk:
            self._prefilling[request_id] = record

    def _grow(self, request: Any) -> None:
        record = self._shares.known(request.request_id)
        if record is not None and record.blocks:
            blocks = self._shares.blocks_for(request.num_tokens)
            record.account.blocks += blocks - record.blocks
            record.blocks = blocks

    def on_add(self, request: Any, now: float) -> None:
        """Its tenant takes part from now on."""
        self._shares.record(request)
        self._pass = None

    def on_preempt(self, request: Any, now: float) -> None:
        """It waits again."""
        self._leave(self._shares.record(request))

    def on_finish(self, request: Any, now: float) -> None:
        """Forget it, and its tenant with its last request."""
        record = self._shares.drop(request.request_id)
        if record is not None:
            self._leave(record)


def build(knobs: TenantKnobs, context: Any) -> Hooks:
    """The hooks for one scheduler."""
    state = _Tenants(knobs, context)
    return Hooks(
        waiting_gate=state.waiting_gate,
        token_cap=state.token_cap,
        victim_hint=state.victim_hint,
        on_pick=state.on_pick,
        on_put_back=state.on_put_back,
        after_schedule=state.after_schedule,
        on_add=state.on_add,
        on_preempt=state.on_preempt,
        on_finish=state.on_finish,
    )


PATCH = Patch(
    name="tenant",
    number="F4",
    area="fixes",
    summary="floors and ceilings by tenant on seats, KV blocks and prefill tokens, borrowed elastically",
    knobs=TenantKnobs,
    build=build,
    seams=(
        "waiting_gate",
        "token_cap",
        "victim_hint",
        "on_pick",
        "on_put_back",
        "after_schedule",
        "on_add",
        "on_preempt",
        "on_finish",
    ),
    ranks={"waiting_gate": 20, "token_cap": 22, "victim_hint": 20},
    by_tenant=True,
    why=WHY,
    how=HOW,
    baseline="none: upstream's limits on running requests and queued tokens are for all tenants together",
    mechanism="jain_index",
    references=(
        "Ghodsi et al.: Dominant resource fairness (NSDI 2011), for shares of several resources at once",
    ),
    removable_when="upstream reserves seats, blocks and prefill tokens by tenant",
)
