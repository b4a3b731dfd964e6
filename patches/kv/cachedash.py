"""`cachedash`: what the prefix cache does, for whom, and at whose cost."""

from __future__ import annotations

import hashlib
import json
from array import array
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from patches.kv import block_history as history
from patches.kv import cache_counts as counts
from patches.kv.block_history import NOBODY, BlockHistory, EventLog, Evictions, Lookups
from patches.kv.cache_counts import CacheCounts, TenantNames
from patches.kv.prefixes import PrefixTable
from patches.kv.reuse import ReuseDistance
from patches.seam.patch import Hooks, Knobs, Patch

if TYPE_CHECKING:
    from patches.seam.context import Context

#: Where blocks were found: in the device's memory, or below it (a KV connector's tiers).
TIERS = ("device", "below")
REASONS = ("eviction", "preemption")
FATES = ("used", "unused", "unasked")
# Upper ends of the reuse histogram, blocks.
REUSE_ENDS = tuple(str(1 << power) for power in range(24))
KINDS = {
    counts.FOUND_BLOCKS: TIERS,
    counts.MISSED: history.CAUSES,
    counts.EVICTED_BLOCKS: FATES,
    counts.REUSE: REUSE_ENDS,
    counts.RECOMPUTED: REASONS,
}
#: What `Context.table` of this patch is called; its columns are `harness.schema.CACHE`.
TABLE = "cache"
# A batch is worked off before it grows beyond this many blocks.
_BATCH_BLOCKS = 1 << 15
_SHOWN_PREFIXES = 50


class CachedashKnobs(Knobs):
    """How much is remembered, and how finely it is told over time."""

    window_s: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        description="Counts are kept by windows of this length; they double when they become too many.",
    )
    remembered_times: float = Field(
        default=8.0,
        gt=0,
        le=64,
        description="Blocks whose last event is remembered, as a multiple of the pool's blocks (rounded up to a power "
        "of two, 16 bytes each, 2,097,152 at most). A block that is asked for later than that counts as never seen.",
    )
    turnover_times: float = Field(
        default=2.0,
        gt=0,
        le=64,
        description="A block that had been hit, and that was evicted unused after more evictions than this multiple of "
        "the pool, counts as dead and protected: plain LRU would have let it go long before.",
    )
    prefix_entries: int = Field(
        default=512, ge=2, le=65536, description="Prefixes that are counted one by one, by their first block."
    )


class Dashboard:
    """The observer of one engine."""

    def __init__(self, knobs: CachedashKnobs, context: Context) -> None:
        self._knobs, self._context = knobs, context
        self._tenants = TenantNames()
        self.counts = CacheCounts(self._tenants, KINDS, knobs.window_s)
        self.prefixes = PrefixTable(knobs.prefix_entries)
        self._log = EventLog()
        # Of the blocks in `_log.names`, as far as it is not known yet who got them: the first and how many, by allocation.
        self._taken: list[tuple[int, int]] = []
        # Requests that came: tenant, blocks asked for, found, found below the device, hash of the first.
        self._admitted: list[tuple[int, int, int, int, bytes]] = []
        # The tenant's number of each live request.
        self._numbers: dict[str, int] = {}
        # Tokens that a preempted request had computed.
        self._lost: dict[str, int] = {}
        self._due_s = -1.0
        self._contents: BlockHistory | None = None
        self._content_log = EventLog(width=8)
        # Which look-ups of `_log` those of `_content_log` belong to.
        self._salted: list[int] = []

    # what is seen

    def on_evict(self, blocks: list[Any], names: list[bytes]) -> None:
        """Blocks lose what they hold; all of one allocation go to one request."""
        self._log.names += names
        self._taken.append((blocks[0].block_id, len(names)))

    def on_preempt(self, request: Any, now: float) -> None:
        """A request loses its blocks."""
        # Under asynchronous scheduling the last token is counted before it is there.
        self._lost[request.request_id] = min(request.num_computed_tokens, request.num_tokens - 1)
        self.counts.add(counts.codes(counts.PREEMPTIONS, self._number(request)), 1)

    def on_finish(self, request: Any, now: float) -> None:
        """A request ended."""
        self._numbers.pop(request.request_id, None)
        if self._lost:
            self._lost.pop(request.request_id, None)

    def after_schedule(self, output: Any, now: float) -> None:
        """A pass has ended: who came, what they found, and who got the blocks that went."""
        new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
        if self._due_s < 0:
            self._start(now)
        # Evictions first: what a request evicts was not what it found.
        if self._taken:
            self._own_taken(cached, new)
        if new:
            self._came(new)
        if cached.resumed_req_ids and self._lost:
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if name in cached.resumed_req_ids:
                    self._resumed(name, computed)
        if now >= self._due_s:
            self._work_off()
            self._due_s = self.counts.close(now)
        elif self._log.blocks + len(self._log.names) > _BATCH_BLOCKS:
            self._work_off()

    def _start(self, now: float) -> None:
        scheduler = self._context.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        self._pool_blocks = int(pool.num_gpu_blocks) - 1
        self._block_tokens = int(pool.hash_block_size)
        slots = round(self._knobs.remembered_times * self._pool_blocks)
        self._history = BlockHistory(min(slots, 1 << 21))
        self._old = self._knobs.turnover_times * self._pool_blocks
        self._reuse = ReuseDistance(4 * self._pool_blocks)
        self._due_s = self.counts.start(now)

    def _came(self, new: Any) -> None:
        """Note the look-ups of requests that were admitted in this pass."""
        requests = self._context.scheduler.requests
        came = 0
        for one in new:
            request = requests[one.req_id]
            # Some of vLLM's runners are told of a resumption as if it were a new request.
            if request.num_preemptions:
                self._resumed(one.req_id, one.num_computed_tokens)
            else:
                self._looked(request, one.num_computed_tokens)
                came += 1
        if came:
            self._context.count("lookups", came)

    def _looked(self, request: Any, computed: int) -> None:
        size = self._block_tokens
        tenant = self._number(request)
        # The last token is always computed; without a prefix cache there are no hashes, and some requests may not read it.
        wanted = min((request.num_prompt_tokens - 1) // size, len(request.block_hashes))
        if wanted <= 0 or request.skip_reading_prefix_cache:
            self._admitted.append((tenant, 0, 0, 0, b""))
            return
        found = min(computed // size, wanted)
        stats = request.prefill_stats
        below = 0 if stats is None else min(stats.num_external_cached_tokens // size, found)
        hashes = request.block_hashes[:wanted]
        if request.cache_salt is not None:
            self._salted.append(len(self._log.lookups))
            names = _content_names(request.prompt_token_ids, wanted, size)
            salt = hashlib.blake2b(request.cache_salt.encode(), digest_size=1).digest()[0] % NOBODY
            self._content_log.lookup(names, 0, salt)
        self._log.lookup(hashes, found, tenant)
        self._admitted.append((tenant, wanted, found, below, hashes[0]))

    def _resumed(self, name: str, computed: int) -> None:
        lost = self._lost.pop(name, 0)
        request = self._context.scheduler.requests.get(name)
        if request is not None and lost > computed:
            code = counts.codes(counts.RECOMPUTED, self._number(request), 1)
            self.counts.add(code, lost - computed)

    def _own_taken(self, cached: Any, new: Any) -> None:
        """Say of the blocks that went in this pass whose request got them."""
        requests, number = self._context.scheduler.requests, self._number
        owner: dict[int, int] = {}
        # Few of those that run get a block in a pass.
        fresh = cached.new_block_ids
        for name, ids in zip(compress(cached.req_ids, fresh), filter(None, fresh), strict=True):
            mine = number(requests[name])
            for group in ids:
                for block in group:
                    owner[block] = mine
        culprits = self._log.culprits
        for block, count in self._taken:
            mine = owner.get(block, NOBODY)
            if mine == NOBODY:
                # A newcomer's. Nobody is known of one who was preempted again in this very pass, and of a prefix that no
                # client asked for.
                for one in new:
                    if any(block in group for group in one.block_ids):
                        mine = number(requests[one.req_id])
            culprits += bytes((mine,)) * count
        self._taken = []

    def _number(self, request: Any) -> int:
        number = self._numbers.get(request.request_id)
        if number is None:
            number = self._tenants.number(self._context.tenant(request))
            self._numbers[request.request_id] = number
        return number

    # what is made of it

    def _work_off(self) -> None:
        log = self._log
        # Blocks that went since the last pass (a connector's, say) have no owner that we know.
        log.culprits += bytes([NOBODY]) * (len(log.names) - len(log.culprits))
        self._taken = []
        self._count_admitted()
        if log.lookups or log.names:
            looked, ended = self._history.take(log)
            self._log = EventLog()
            self._count_missed(looked)
            self._count_reuse(looked)
            self._count_evicted(ended)
        self.counts.sum_up()

    def _count_admitted(self) -> None:
        add, codes = self.counts.add, counts.codes
        for tenant, asked, found, below, first_hash in self._admitted:
            add(codes(counts.REQUESTS, tenant), 1)
            if asked:
                add(codes(counts.ASKED, tenant), asked)
                self.prefixes.add(first_hash, tenant, asked, found)
            if found > below:
                add(codes(counts.FOUND_BLOCKS, tenant, 0), found - below)
            if below:
                add(codes(counts.FOUND_BLOCKS, tenant, 1), below)
        self._admitted = []

    def _count_missed(self, looked: Lookups) -> None:
        cause, by = looked.cause, looked.by
        if self._salted:
            cause = self._other_salts(looked)
        missed = cause != history.FOUND
        tenant = looked.tenant[missed]
        self.counts.add_all(counts.codes(counts.MISSED, tenant, cause[missed], by[missed]))
        again = np.isin(cause, (history.EVICTED, history.CUT))
        self.counts.add_all(counts.codes(counts.RECOMPUTED, looked.tenant[again], 0), self._block_tokens)

    def _other_salts(self, looked: Lookups) -> Any:
        """The causes, told apart where the same content was asked for before under another salt only."""
        if self._contents is None:
            self._contents = BlockHistory(len(self._history))
        contents, _ = self._contents.take(self._content_log)
        mine = np.isin(looked.lookup, self._salted)
        others = (contents.asked_by != NOBODY) & (contents.asked_by != contents.tenant)
        cause = looked.cause.copy()
        place = np.flatnonzero(mine)[others]
        cause[place[cause[place] == history.NEVER]] = history.OTHER_SALT
        self._content_log, self._salted = EventLog(width=8), []
        return cause

    def _count_reuse(self, looked: Lookups) -> None:
        share = self._reuse.share
        sample = np.flatnonzero((looked.keys >> np.uint64(40)) % np.uint64(share) == 0)
        distance = self._reuse.distance
        keys, tenants = looked.keys[sample].tolist(), looked.tenant[sample].tolist()
        last = len(REUSE_ENDS) - 1
        for key, tenant in zip(keys, tenants, strict=True):
            blocks = distance(key)
            if blocks is not None:
                self.counts.add(counts.codes(counts.REUSE, tenant, min(blocks.bit_length(), last)), share)

    def _count_evicted(self, ended: Evictions) -> None:
        fate = np.where(ended.whose == NOBODY, 2, np.where(ended.used, 0, 1))
        self.counts.add_all(counts.codes(counts.EVICTED_BLOCKS, ended.whose, fate, ended.by))
        dead = ended.used & (ended.age > self._old)
        self.counts.add_all(counts.codes(counts.DEAD_PROTECTED, ended.whose[dead]))

    # what is told

    def table(self) -> dict[str, list[Any]]:
        """Everything by window, then the prefixes; columns of `harness.schema.CACHE`."""
        rows = [(round(end_s * 1e9), *names, value) for end_s, *names, value in self._rows()]
        names = ("t_ns", "measure", "tenant", "kind", "by", "value")
        return {name: [row[i] for row in rows] for i, name in enumerate(names)}

    def _rows(self) -> list[counts.Row]:
        if self._due_s < 0:
            return []
        self._work_off()
        rows = list(self.counts.rows())
        end_s = max(self._due_s, rows[-1][0] if rows else 0.0)
        for name, one in self.prefixes.most_asked():
            tenant = self._tenants.name(one.tenant)
            for measure, value in zip(PREFIX_MEASURES, (one.requests, one.asked, one.found), strict=True):
                rows.append((end_s, measure, tenant, name, "", value))
        return rows

    def report(self, asked: str) -> str:
        """The totals since the engine started, as JSON; asked for `table` the table as well."""
        started = self._due_s >= 0
        if started:
            self._work_off()
        pool = self._context.scheduler.kv_cache_manager.block_pool
        told = {
            "schema": 1,
            "t_s": self._context.clock(),
            "block_tokens": self._block_tokens if started else int(pool.hash_block_size),
            "pool_blocks": int(pool.num_gpu_blocks) - 1,
            "usage": float(pool.get_usage()),
            "remembered_blocks": len(self._history) if started else 0,
            "sums": self.counts.sums(),
            "prefixes": [
                [name, self._tenants.name(one.tenant), one.requests, one.asked, one.found]
                for name, one in self.prefixes.most_asked()[:_SHOWN_PREFIXES]
            ],
        }
        return json.dumps(told | ({"table": self.table()} if asked == "table" else {}))


PREFIX_MEASURES = ("prefix_requests", "prefix_asked_blocks", "prefix_found_blocks")


def _content_names(tokens: list[int], blocks: int, size: int) -> list[bytes]:
    """Names of a prompt's blocks that say nothing of the salt."""
    raw, names, name = array("q", tokens[: blocks * size]).tobytes(), [], b""
    for place in range(0, len(raw), 8 * size):
        name = hashlib.blake2b(name + raw[place : place + 8 * size], digest_size=8).digest()
        names.append(name)
    return names


def build(knobs: CachedashKnobs, context: Context) -> Hooks:
    """The hooks for one engine, all of them observers."""
    board = Dashboard(knobs, context)
    for name, measure in (
        ("cache_asked_blocks", counts.ASKED),
        ("cache_found_blocks", counts.FOUND_BLOCKS),
        ("cache_dead_protected_blocks", counts.DEAD_PROTECTED),
    ):
        context.gauge(name, lambda measure=measure: float(board.counts.total(measure)))  # type: ignore[misc]
    for kind, reason in enumerate(REASONS):
        context.gauge(
            f"recomputed_after_{reason}_tokens",
            lambda kind=kind: float(board.counts.total(counts.RECOMPUTED, kind)),  # type: ignore[misc]
        )
    context.table(TABLE, board.table)
    return Hooks(
        on_evict=board.on_evict,
        on_preempt=board.on_preempt,
        on_finish=board.on_finish,
        after_schedule=board.after_schedule,
        report=board.report,
    )


PATCH = Patch(
    name="cachedash",
    number="K5",
    area="kv",
    summary="What the prefix cache does, by tenant, prefix and tier: hits, misses by cause, reuse, waste",
    knobs=CachedashKnobs,
    build=build,
    seams=("on_evict", "on_preempt", "on_finish", "after_schedule", "report"),
    why="""\
vLLM tells one hit rate for the whole server, and a sample of how long blocks live. Neither says why a tenant's prompts
are computed anew: because nobody had sent them before, because another tenant's documents had pushed them out, because
the request that was to compute them had not got there yet, or because they lie under another cache salt. Each of these
asks for another remedy: none, a better choice of what to evict, a better order, a shared salt.""",
    how="""\
An observer: it changes no decision. After each scheduling pass it notes which blocks the admitted requests looked for and
how many were found, and which blocks were evicted for whom. Every five seconds, and when it is asked, the notes are
worked off in arrays. The last event of each block (a look-up or an eviction, and whose) is kept in a table of fixed size; from it follows why a
block is not there: never (nobody asked for it within memory), evicted (by whose request), cut (it may be there, but a
block before it was evicted), unlanded (it was asked for, and whoever asked had not computed it yet), other_salt (the
same text was asked for before, under another cache salt only). First admissions count, as for the hit rate; what comes
back after a preemption is told apart as recomputed tokens.
Reuse distances are the number of different blocks asked for in between, from a sample by hash with at most 2,048 blocks in
memory: the share of reuse within N blocks is what an LRU cache of N blocks, free of running requests, would have found.
A block counts as dead and protected if it had been hit, and was evicted unused long after LRU would have let it go.
The virtual engine writes it all as cache.parquet; a server answers at /patchbench/cache and, without an identity file,
adds its counters to /metrics. Asking costs the engine a pause of a millisecond or so, so an answer is kept for a second.
What it does not see: hits of a preempted request that comes back, and what a request finds of its own output.""",
    baseline="--kv-cache-metrics (tuned leaves it off, as upstream does): block lifetime, idle time and reuse gaps, sampled, without tenants or causes",
    mechanism="cache_found_blocks",
    removable_when="vLLM tells prefix hits and misses by cause and by a label of the caller's choice",
    references=(
        "C. Waldspurger, N. Park, A. Garthwaite, I. Ahmad: Efficient MRC construction with SHARDS. FAST 2015",
        "R. Mattson et al.: Evaluation techniques for storage hierarchies. IBM Systems Journal 9(2), 1970 (reuse distance)",
    ),
)
