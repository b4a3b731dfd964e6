"""`version`: notices that a tenant's system prompt has changed, gives up the old one's blocks, and makes the new one warm."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from pydantic import Field

from patches.fixes.rebase import Seam, find_seam_of_turns
from patches.fixes.trunks import Switch, Trunk
from patches.seam.own import Share
from patches.seam.patch import Hooks, Knobs, Patch
from patches.seam.worth import Worths

if TYPE_CHECKING:
    from patches.seam.context import Context

_DEAD = -4.0
# Bounds of what is remembered: tenants, conversations of each, and how many are tried to find how prompts changed.
_MOST_TENANTS = 256
_MOST_CONVERSATIONS = 64
_MOST_TRIES = 64
# Blocks whose users are known, as a multiple of the pool's.
_MOST_USERS_TIMES = 4
# What a conversation begins with, to tell it from others.
_TOLD_BY_TOKENS = 32
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
        default=100.0,
        ge=2,
        le=1e12,
        description="How much likelier it must be for conversations to be computed under the new prompt ahead of their "
        "next turn, before a change is certain. 100 is three requests in a row after a canary of a tenth.",
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


class _Conversation:
    """The last prompt and answer of a conversation, and when its answer ended."""

    __slots__ = ("ended_s", "prompt_tokens", "salt", "session", "tokens")

    def __init__(self, request: Any, now: float) -> None:
        self.tokens: list[int] = request._all_token_ids
        self.prompt_tokens = int(request.num_prompt_tokens)
        self.session, self.salt, self.ended_s = request.session_id, request.cache_salt, now


class _Tenant:
    """What is known of one tenant."""

    def __init__(self, trunk: Trunk) -> None:
        self.trunk = trunk
        # Blocks of its requests by the block with which these leave the trunk (None: they do not).
        self.blocks: dict[bytes | None, dict[bytes, None]] = {}
        # By their first block beyond the trunk.
        self.conversations: OrderedDict[bytes, _Conversation] = OrderedDict()
        self.seam: tuple[bytes, Seam] | None = None
        self.tries = 0
        # The branch whose conversations are to be computed as soon as it is known how.
        self.owed: bytes | None = None
        # When that was last begun for one that was not certain.
        self.ahead_s = float("-inf")


class Versions:
    """The tenants of one engine, what is dead of theirs, and what is owed to their conversations."""

    def __init__(self, knobs: VersionKnobs, context: Context) -> None:
        self._knobs, self._context = knobs, context
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        # Who has used a block; None for several.
        self._users: dict[bytes, str | None] = {}
        self._share = Share(knobs.idle_tokens, knobs.beside_tokens, evict=True, in_flight=2)
        self.dead = Worths(demotes=True)
        self.switches = self.rebased = self.rewarmed = self.demoted = 0

    # what comes and goes

    def on_add(self, request: Any, now: float) -> None:
        """A request came."""
        hashes = request.block_hashes
        if not hashes:
            return
        if self.dead:
            self._revive(hashes)
        tenant = self._tenant(self._context.request_info(request).tenant)
        params = request.sampling_params
        announced = bool(((params.extra_args if params is not None else None) or {}).get(HINT))
        leaves = tenant.trunk.version_of(hashes)
        if leaves is not None:
            self._look_for_seam(tenant, request, leaves)
            self._came_back(tenant, request, leaves)
        switch = tenant.trunk.see(hashes, now, announced=announced)
        if switch is not None:
            self._go_over(tenant, switch, request)
        elif (
            leaves is not None
            and tenant.seam is not None
            and tenant.seam[0] == leaves
            and now - tenant.ahead_s >= self._knobs.settle_s
            and tenant.trunk.odds(leaves) >= self._knobs.ahead_times
        ):
            # Not certain, but worth the work of moments in which nobody waits.
            tenant.owed, tenant.ahead_s = leaves, now
        if tenant.owed is not None and tenant.seam is not None and tenant.seam[0] == tenant.owed:
            self._rebase(tenant, tenant.seam[1], now)
        own = self._beyond(tenant, hashes)
        if own is not None:
            tenant.conversations.pop(own, None)

    def on_finish(self, request: Any, now: float) -> None:
        """A request ended: its blocks are of its version."""
        name = self._context.request_info(request).tenant
        hashes = request.block_hashes
        done = hashes[: request.num_computed_tokens // self._context.scheduler.hash_block_size]
        users, foreign = self._users, False
        for each in done:
            if users.setdefault(each, name) != name:
                users[each], foreign = None, True
        if foreign and self.dead:
            self._revive(done)
        limit = self._context.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        if len(users) > _MOST_USERS_TIMES * limit * self._groups():
            # Only a reset of the prefix cache, which tells of no block, lets it come to this.
            users.clear()
        tenant = self._tenants.get(name)
        if tenant is None or not tenant.trunk.blocks or not done:
            return
        leaves = tenant.trunk.version_of(hashes)
        known = tenant.blocks.setdefault(leaves, {})
        known.update(dict.fromkeys(done))
        while len(known) > limit:
            del known[next(iter(known))]
        if len(tenant.blocks) > _MOST_CONVERSATIONS:
            del tenant.blocks[next(iter(tenant.blocks))]
        if leaves is None and self._knobs.conversation_s and request.prompt_token_ids is not None:
            own = self._beyond(tenant, hashes)
            if own is not None and not request.mm_features and request.lora_request is None:
                tenant.conversations[own] = _Conversation(request, now)
                tenant.conversations.move_to_end(own)
                if len(tenant.conversations) > _MOST_CONVERSATIONS:
                    tenant.conversations.popitem(last=False)

    def on_evict(self, block: Any, block_hash: Any) -> None:
        """A block leaves the cache."""
        self.dead.pop(block_hash, None)
        self._users.pop(block_hash[:-4], None)

    def on_own(self, name: str, outcome: str, now: float) -> None:
        """A prefix of ours is there, or given up."""
        if outcome == "cached":
            self.rewarmed += 1

    # inside

    def _groups(self) -> int:
        return len(self._context.scheduler.kv_cache_config.kv_cache_groups)

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

    @staticmethod
    def _beyond(tenant: _Tenant, hashes: Any) -> bytes | None:
        trunk = tenant.trunk.blocks
        if not trunk or len(hashes) <= len(trunk) or hashes[len(trunk) - 1] != trunk[-1]:
            return None
        own: bytes = hashes[len(trunk)]
        return own

    def _go_over(self, tenant: _Tenant, switch: Switch, request: Any) -> None:
        self.switches += 1
        self._context.count("switches")
        alive = frozenset(switch.new)
        dead = [each for each in tenant.blocks.pop(None, {}) if each not in alive]
        first_own = switch.new[switch.common]
        if first_own in tenant.blocks:
            tenant.blocks[None] = tenant.blocks.pop(first_own)
        name = self._context.request_info(request).tenant
        self._demote(dead, name)
        # The new trunk itself: nearly always there already, since it was what told.
        size = self._context.scheduler.hash_block_size
        tokens = request.prompt_token_ids[: len(switch.new) * size]
        self._context.inject(
            tokens, name=f"{name}-trunk", cache_salt=request.cache_salt, share=Share(self._share.idle_tokens)
        )
        tenant.owed = first_own
        tenant.tries = 0

    def _demote(self, hashes: list[bytes], name: str) -> None:
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        groups = range(self._groups())
        pool = self._context.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        blocks = []
        for each in hashes:
            if self._users.get(each) != name:
                # Gone, or somebody else's as well.
                continue
            for group in groups:
                key = make_block_hash_with_group_id(each, group)
                block = pool.get_one_block(key)
                if block is not None:
                    self.dead[key] = _DEAD
                    blocks.append(block)
        for block in blocks:
            self._context.revalue(block)
        self.demoted += len(blocks)
        self._context.count("demoted_blocks", len(blocks))

    def _revive(self, hashes: Any) -> None:
        """Somebody still uses the old prompt: what that request begins with is dead no more."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        groups = range(self._groups())
        pool = self._context.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        for each in hashes:
            for group in groups:
                key = make_block_hash_with_group_id(each, group)
                if self.dead.pop(key, None) is not None:
                    block = pool.get_one_block(key)
                    if block is not None:
                        self._context.revalue(block)

    def _look_for_seam(self, tenant: _Tenant, request: Any, leaves: bytes) -> None:
        """Is this a conversation that was under way with the settled prompt?"""
        if tenant.seam is not None and tenant.seam[0] == leaves:
            return
        if not self._knobs.conversation_s or request.prompt_token_ids is None or tenant.tries >= _MOST_TRIES:
            return
        tenant.tries += 1
        candidates = list(tenant.conversations.items())[::-1]
        if request.session_id:
            candidates = [each for each in candidates if each[1].session == request.session_id]
        common = 0
        for mine, other in zip(tenant.trunk.blocks, request.block_hashes, strict=False):
            if mine != other:
                break
            common += self._context.scheduler.hash_block_size
        for own, conversation in candidates:
            seam = find_seam_of_turns(
                conversation.tokens, conversation.prompt_tokens, request.prompt_token_ids, common
            )
            if seam is not None:
                tenant.seam = (leaves, seam)
                # It has come back.
                del tenant.conversations[own]
                return

    @staticmethod
    def _came_back(tenant: _Tenant, request: Any, leaves: bytes) -> None:
        """Nothing is owed to a conversation that has come back under the new prompt by itself."""
        if tenant.seam is None or tenant.seam[0] != leaves or request.prompt_token_ids is None:
            return
        seam = tenant.seam[1]
        begin = len(seam.head)
        start = request.prompt_token_ids[begin : begin + _TOLD_BY_TOKENS]
        for own, each in tenant.conversations.items():
            if each.tokens[seam.old_end : seam.old_end + len(start)] == start:
                del tenant.conversations[own]
                return

    def _rebase(self, tenant: _Tenant, seam: Seam, now: float) -> None:
        """Have the conversations under way computed with the new prompt, the longest silent first."""
        tenant.owed = None
        conversations = sorted(tenant.conversations.values(), key=lambda each: each.ended_s)
        tenant.conversations.clear()
        for each in conversations:
            if now - each.ended_s <= self._knobs.conversation_s:
                name = f"conversation-{self.rebased}"
                tokens = seam.rebased(each.tokens, each.prompt_tokens)
                if self._context.inject(tokens, name=name, cache_salt=each.salt, share=self._share):
                    self.rebased += 1
                    self._context.count("rebased_conversations")


def build(knobs: VersionKnobs, context: Context) -> Hooks:
    """The hooks for one engine. On a bare block pool nothing is known of requests."""
    versions = Versions(knobs, context)
    if context.scheduler is not None:
        own = context.own_requests()
        context.gauge("switches", lambda: float(versions.switches))
        context.gauge("demoted_blocks", lambda: float(versions.demoted))
        context.gauge("dead_blocks", lambda: float(len(versions.dead)))
        context.gauge("rebased_conversations", lambda: float(versions.rebased))
        context.gauge("rewarmed_prefixes", lambda: float(versions.rewarmed))
        context.gauge("own_tokens", lambda: float(own.computed_tokens))
        context.gauge("own_withdrawn", lambda: float(own.withdrawn))
    return Hooks(
        on_own=versions.on_own,
        on_add=versions.on_add,
        on_finish=versions.on_finish,
        eviction_hint=versions.dead,
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
those that another tenant used as well, and no longer once an old request comes again. The first conversation that came back
under the new prompt shows, to the token, where the old one ended and the new one ends. The others that ended a turn
within `conversation_s` are computed with the new one in place of the old, ahead of their next turn, as requests of our own:
only while nobody waits and no prefill is under way, `beside_tokens` a step. That begins at `ahead_times`
already, once in `settle_s`, since all it costs if it proves wrong is such work.
What that costs others: a step of decodes takes longer by `beside_tokens` of prefill while it lasts, and a request that comes
may wait for two such steps. A conversation that does not come back was computed in vain.""",
    baseline="none: upstream finds nothing of the old prefix and lets it age",
    mechanism="rebased_conversations",
    removable_when="vLLM takes a hint that a prefix is dead, and can be given a prompt to compute ahead",
    references=(
        "E. S. Page: Continuous inspection schemes. Biometrika 41, 1954 (CUSUM)",
        "A. Wald: Sequential tests of statistical hypotheses. Annals of Mathematical Statistics 16(2), 1945",
    ),
)
