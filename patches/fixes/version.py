"""`version`: notices that a tenant's system prompt has changed, gives up the old one's blocks, and makes the new one warm."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from pydantic import Field

from patches.fixes.conversations import Conversations
from patches.fixes.dead_blocks import DeadBlocks
from patches.fixes.trunks import Switch, Trunk
from patches.seam.own import Share
from patches.seam.patch import Hooks, Knobs, Patch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from patches.seam.context import Context

# Bounds of what is remembered: tenants, and branches of each whose blocks are known.
_MOST_TENANTS = 256
_MOST_BRANCHES = 64
#: In `extra_args`: true on a request whose prompt is the tenant's from now on.
HINT = "prompt_switched"


class VersionKnobs(Knobs):
    """When a prompt counts as changed, and what is done then."""

    settle_s: float = Field(
        default=30.0,
        ge=0,
        le=86_400,
        description="A tenant's prompts must have begun alike for so long before a change is looked for.",
    )
    settle_requests: int = Field(
        default=20,
        ge=4,
        le=200,
        description="And in so many requests.",
    )
    evidence_times: float = Field(
        default=50_000.0,
        ge=10,
        le=1e12,
        description="How much likelier what came lately must be under a change than under the new prompt's usual share "
        "(10% at least). 50,000 is five requests in a row after a canary of a tenth.",
    )
    ahead_times: float = Field(
        default=50.0,
        ge=2,
        le=1e12,
        description="How much likelier a change must be, by the conversations that went over to the new prompt against "
        "those that usually do (1% at least), for the others to be computed under it before it is certain. 50 is one "
        "where hardly any does, two where a tenth does.",
    )
    trunk_blocks: int = Field(
        default=128,
        ge=1,
        le=4096,
        description="Blocks from a prompt's beginning that are looked at.",
    )
    conversation_s: float = Field(
        default=15.0,
        ge=0,
        le=3600,
        description="Conversations whose last answer is no older are computed anew under the new prompt, ahead of "
        "their next turn. 0: none.",
    )
    beside_tokens: int = Field(
        default=256,
        ge=0,
        le=65_536,
        description="Tokens of that in one step beside decodes, when nobody waits and no prefill is under way. 0: only in "
        "steps in which nothing runs.",
    )
    idle_tokens: int = Field(
        default=512,
        ge=0,
        le=65_536,
        description="Tokens of that in a step in which nothing else runs.",
    )


class _Tenant:
    """What is known of one tenant."""

    def __init__(self, trunk: Trunk) -> None:
        self.trunk = trunk
        # Blocks of its requests by the block with which these leave the trunk (None: they do not).
        self.blocks: OrderedDict[bytes | None, OrderedDict[bytes, None]] = OrderedDict()
        self.conversations = Conversations()
        # After a switch: those of the prompt before, the new one's branch, and tokens that both begin with.
        self.before: tuple[Conversations, bytes, int] | None = None
        self.moved = False
        # When conversations were last computed for a switch that was not certain.
        self.ahead_s = float("-inf")

    def used(self, leaves: bytes | None, hashes: Sequence[bytes], most: int) -> None:
        """A request that leaves the trunk with that block has filled or found these; `most` are remembered."""
        known = self.blocks.setdefault(leaves, OrderedDict())
        self.blocks.move_to_end(leaves)
        known.update(dict.fromkeys(hashes))
        while len(known) > most:
            known.popitem(last=False)
        if len(self.blocks) > _MOST_BRANCHES:
            # The trunk's own are wanted at a switch, however many branches have come since.
            del self.blocks[next(name for name in self.blocks if name is not None)]

    def gone_over(self, branch: bytes) -> OrderedDict[bytes, None]:
        """That branch is the trunk from now on; returns what was known of the old one's own blocks.

        Other branches left a trunk that is gone, and are forgotten.
        """
        old, new = (self.blocks.get(name, OrderedDict()) for name in (None, branch))
        self.blocks.clear()
        self.blocks[None] = new
        return old

    def forget(self, request: Any) -> None:
        """Nothing is to be remembered of a request, under whichever prompt it began."""
        self.conversations.forget(request)
        if self.before is not None:
            self.before[0].forget(request)


class Versions:
    """The tenants of one engine, and what is owed to their conversations."""

    def __init__(self, knobs: VersionKnobs, context: Context) -> None:
        self._knobs, self._context = knobs, context
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._share = Share(
            knobs.idle_tokens, knobs.beside_tokens, evict=True, in_flight=2, beside_longest=False
        )
        self.dead = DeadBlocks(context)
        self.switches = self.rebased = self.rewarmed = self._asked = 0

    # what comes and goes

    def on_add(self, request: Any, now: float) -> None:
        """A request came."""
        hashes = request.block_hashes
        if not hashes:
            return
        self.dead.revive(hashes)
        name = self._context.request_info(request).tenant
        tenant = self._tenant(name)
        params = request.sampling_params
        announced = bool(((params.extra_args if params is not None else None) or {}).get(HINT))
        leaves = tenant.trunk.version_of(hashes)
        went_over = self._went_over(tenant, request, leaves)
        switch = tenant.trunk.see(hashes, now, announced=announced)
        if switch is not None:
            self._go_over(tenant, switch, request, name)
        elif (
            went_over
            and leaves is not None
            and now - tenant.ahead_s >= self._knobs.settle_s
            and tenant.conversations.odds >= self._knobs.ahead_times
        ):
            # Not certain, but worth the work of moments in which nobody waits.
            tenant.ahead_s = now
            self._move(tenant.conversations, leaves, now)
        if tenant.before is not None and not tenant.moved:
            before, branch, _ = tenant.before
            tenant.moved = self._move(before, branch, now)
        if tenant.before is not None and tenant.before[0].are_over(now, self._knobs.conversation_s):
            # Nothing is owed to them any more, and what they said takes memory.
            tenant.before = None
        own = self._beyond(tenant, hashes)
        if own is not None and self._follows(request):
            tenant.conversations.began(own, self._begins(tenant), request)

    def on_finish(self, request: Any, now: float) -> None:
        """A request ended: its blocks are of its version."""
        name = self._context.request_info(request).tenant
        hashes = request.block_hashes
        done = hashes[: request.num_computed_tokens // self._context.scheduler.hash_block_size]
        self.dead.used(done, name)
        tenant = self._tenants.get(name)
        if tenant is None:
            return
        if not tenant.trunk.blocks or not done:
            tenant.forget(request)
            return
        tenant.used(tenant.trunk.version_of(hashes), done, self.dead.limit)
        if self._follows(request):
            self._ended(tenant, request, now)

    def on_evict(self, blocks: list[Any], names: list[Any]) -> None:
        """Blocks leave the cache."""
        self.dead.gone(names)

    def on_own(self, name: str, outcome: str, now: float) -> None:
        """A prefix of ours is there, or given up."""
        if outcome == "cached":
            self.rewarmed += 1

    # inside

    def _tenant(self, name: str) -> _Tenant:
        found = self._tenants.get(name)
        if found is None:
            knobs = self._knobs
            found = self._tenants[name] = _Tenant(
                Trunk(
                    settle_s=knobs.settle_s,
                    settle_requests=knobs.settle_requests,
                    evidence_times=knobs.evidence_times,
                    most_blocks=knobs.trunk_blocks,
                )
            )
            if len(self._tenants) > _MOST_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(name)
        return found

    def _follows(self, request: Any) -> bool:
        """Whether what goes on from this request can be computed ahead."""
        return bool(self._knobs.conversation_s) and self._is_plain(request)

    @staticmethod
    def _is_plain(request: Any) -> bool:
        """Whether its blocks are those of its tokens alone: others' have hashes that no request of ours gets."""
        return (
            request.prompt_token_ids is not None and not request.mm_features and request.lora_request is None
        )

    @staticmethod
    def _beyond(tenant: _Tenant, hashes: Any) -> bytes | None:
        trunk = tenant.trunk.blocks
        if not trunk or len(hashes) <= len(trunk) or hashes[len(trunk) - 1] != trunk[-1]:
            return None
        own: bytes = hashes[len(trunk)]
        return own

    def _begins(self, tenant: _Tenant) -> int:
        """Tokens of the trunk, beyond which lies what is a conversation's own."""
        return len(tenant.trunk.blocks) * int(self._context.scheduler.hash_block_size)

    def _went_over(self, tenant: _Tenant, request: Any, leaves: bytes | None) -> bool:
        """Does a conversation of the settled prompt, or of the one before it, go on with this?"""
        if not self._knobs.conversation_s:
            return False
        if leaves is None:
            if tenant.before is None:
                return False
            before, branch, common_tokens = tenant.before
            return before.went_over(request, branch, common_tokens)
        common = 0
        for mine, other in zip(tenant.trunk.blocks, request.block_hashes, strict=False):
            if mine != other:
                break
            common += self._context.scheduler.hash_block_size
        return tenant.conversations.went_over(request, leaves, common)

    def _ended(self, tenant: _Tenant, request: Any, now: float) -> None:
        """A turn ended: it is kept, or computed at once under the prompt to which its conversation goes over."""
        if tenant.before is not None and tenant.before[0].knows(request):
            conversations, own = tenant.before[0], None
        else:
            conversations, own = tenant.conversations, self._beyond(tenant, request.block_hashes)
        turn = conversations.ended(request, own, self._begins(tenant), now)
        if turn is not None:
            self._compute(*turn)

    def _go_over(self, tenant: _Tenant, switch: Switch, request: Any, name: str) -> None:
        self.switches += 1
        self._context.count("switches")
        alive = frozenset(switch.new)
        branch = switch.new[switch.common]
        self.dead.demote([each for each in tenant.gone_over(branch) if each not in alive], name)
        # The new trunk itself: nearly always there already, since it was what told.
        size = self._context.scheduler.hash_block_size
        if self._is_plain(request):
            tokens, salt = request.prompt_token_ids[: len(switch.new) * size], request.cache_salt
            self._context.inject(tokens, name=f"{name}-trunk", cache_salt=salt, share=self._share)
        tenant.before = tenant.conversations, branch, switch.common * size
        tenant.conversations, tenant.moved = Conversations(), False

    def _move(self, conversations: Conversations, branch: bytes, now: float) -> bool:
        """Have the conversations under way computed with the new prompt; False before it is known how."""
        if conversations.seam(branch) is None:
            return False
        for turn in conversations.move(branch, now, self._knobs.conversation_s):
            if self._compute(*turn):
                self.rebased += 1
                self._context.count("rebased_conversations")
        return True

    def _compute(self, tokens: list[int], salt: str | None) -> bool:
        self._asked += 1
        return self._context.inject(
            tokens, name=f"conversation-{self._asked}", cache_salt=salt, share=self._share
        )


def build(knobs: VersionKnobs, context: Context) -> Hooks:
    """The hooks for one engine. On a bare block pool nothing is known of requests."""
    versions = Versions(knobs, context)
    if context.scheduler is not None:
        own = context.own_requests()
        context.gauge("switches", lambda: float(versions.switches))
        context.gauge("demoted_blocks", lambda: float(versions.dead.demoted))
        context.gauge("dead_blocks", lambda: float(len(versions.dead.worths)))
        context.gauge("rebased_conversations", lambda: float(versions.rebased))
        context.gauge("rewarmed_prefixes", lambda: float(versions.rewarmed))
        context.gauge("own_tokens", lambda: float(own.computed_tokens))
        context.gauge("own_withdrawn", lambda: float(own.withdrawn))
    return Hooks(
        on_own=versions.on_own,
        on_add=versions.on_add,
        on_finish=versions.on_finish,
        eviction_hint=versions.dead.worths,
        on_evict=versions.on_evict,
    )


PATCH = Patch(
    name="version",
    number="F2",
    area="fixes",
    summary="Notices a changed system prompt, gives up the old one's blocks, computes conversations anew under the new one",
    knobs=VersionKnobs,
    build=build,
    seams=("on_own", "on_add", "on_finish", "eviction_hint", "on_evict"),
    ranks={"eviction_hint": 10},
    why="""\
When a tenant's system prompt changes, every block behind it is worthless at once, and stays in the cache until its turn
comes; where used blocks are protected that takes long. The new prompt itself is no trouble: the first request that has it
computes it, and the next one finds it. What costs is the conversations under way. Each must compute its whole history
again under the new prompt, and does so when its user is waiting.""",
    how="""\
What nearly all of a tenant's requests begin with, for `settle_s` and `settle_requests`, is its trunk. Requests that leave it
before its end, and alike, are a branch. The odds that nearly everybody goes there now, against the branch's usual share,
are multiplied up request by request (a CUSUM test); at `evidence_times` the tenant has gone over. Popular documents and
open files lie beyond the trunk's end and never count. With the usual share at its least, 10%, such odds arise by
chance about once in `evidence_times` requests. A sender that knows says `prompt_switched: true` in extra_args,
and the tenant goes over with that request.
Then the old prompt's blocks, and all that requests computed behind it, are evicted before anything that is in use; not
those that another tenant used as well, and no longer once an old request comes again.
A conversation that had the old prompt and goes on with another says far more than a request with another: a canary's
users keep theirs. The odds by which that tells are multiplied up likewise, against the share that does so usually (1% at
least), and at `ahead_times`, mostly with the first such conversation, the others are computed under the new prompt, once
in `settle_s`: all it costs if it proves wrong is such work. That first one shows, to the token, where the old prompt
ended and the new one ends. The others that ended a turn within `conversation_s` are computed with the new one in place of the
old, ahead of their next turn; of one that is being answered first its prompt, and its answer once that is there. They
are requests of our own: only while nobody waits and no prefill is under way, `beside_tokens` a step.
What that costs others: a step of decodes takes longer by `beside_tokens` of prefill while it lasts, and a request that comes
may wait for two such steps, for their seats and blocks too. A conversation that does not come back was computed in vain.
Nobody can know what a conversation said before it first came here: where they begin anew no patch shortens the dip.""",
    baseline="none: upstream finds nothing of the old prefix and lets it age",
    mechanism="rebased_conversations",
    removable_when="vLLM takes a hint that a prefix is dead, and can be given a prompt to compute ahead",
    references=(
        "E. S. Page: Continuous inspection schemes. Biometrika 41, 1954 (CUSUM)",
        "A. Wald: Sequential tests of statistical hypotheses. Annals of Mathematical Statistics 16(2), 1945",
    ),
)
