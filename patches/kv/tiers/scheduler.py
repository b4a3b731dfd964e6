"""The scheduler's side of the tiers: which blocks are saved, which are loaded, and for whom.

vLLM calls it through the connector, the patch through its hooks. Full attention in one group of
layers: a block is named by the hash of all tokens up to its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from patches.kv.tiers.cache import BlockCache
from patches.kv.tiers.disk import DiskTier, MakeDisk
from patches.kv.tiers.files import tenant_digest
from patches.kv.tiers.jobs import Move, Moves
from patches.kv.tiers.knobs import TieringKnobs
from patches.kv.tiers.rates import Rates
from patches.kv.tiers.recovery import Recoveries
from patches.kv.tiers.state import Counts, Freed, State
from patches.seam.context import Context

# Blocks that wait to be saved, at most, as a multiple of the pool: what is beyond has long been overwritten.
_CANDIDATES = 4
# Of the host tier, what preempted requests may hold on to until they come back.
_RESERVED_SHARE = 0.5


class TierScheduler:
    """One engine's tiers.

    Args:
        knobs: of the patch. block_tokens: tokens in a block. block_bytes: bytes of a block, all workers.
        make_disk: makes the tier below the host's; None for none.
    """

    def __init__(
        self, knobs: TieringKnobs, block_tokens: int, block_bytes: int, make_disk: MakeDisk | None = None
    ) -> None:
        self.knobs = knobs
        self._tokens, self._bytes = block_tokens, block_bytes
        factor = knobs.high_keep_factor if make_disk is not None else 1.0
        self.host = BlockCache(
            max(1, knobs.host_bytes // block_bytes), high_factor=factor, least_rate=knobs.save_return_share
        )
        self.rates = Rates(knobs)
        self.disk: DiskTier | None = make_disk(self.host) if make_disk is not None else None
        self.moves = Moves()
        self.counts = Counts()
        self.recoveries = Recoveries()
        self._states: dict[str, State] = {}
        self._context: Context | None = None
        self._manager: Any = None
        self._allocated = 0
        self._freed: deque[Freed] = deque()
        self._freed_blocks = 0
        self._sync_left_s = 0.0
        self._reserved = 0
        self._prefetch_due_s = 0.0
        self._prefetch_seen: tuple[Any, int] | None = None

    # what the patch tells

    def bind(self, context: Context) -> None:
        """Whose requests these are, and what time it is."""
        self._context = context
        self._manager = context.scheduler.kv_cache_manager
        # Where a connector loads, upstream holds freed blocks back for as long as a pass may write to them, and then can
        # preempt nobody who ran in the pass before. Loads of ours, as upstream's worker makes them, wait for all that the
        # GPU was given before them.
        context.scheduler.defer_block_free = False

    @property
    def bound(self) -> bool:
        """Whether the patch is in force; without it nothing is saved."""
        return self._context is not None

    def on_preempt(self, request: Any) -> None:
        """Its blocks are about to be freed: save what is not below yet, and keep it until it comes back."""
        state = self._state(request)
        state.look_afresh()
        tokens = min(request.num_computed_tokens, request.num_tokens)
        self.recoveries.on_preempt(request.request_id, tokens)
        self._release(state)
        blocks = self._hashed(state)
        held = [key for key in state.keys[: len(blocks)] if self.host.get(key) is not None]
        self.host.pin(held)
        places: list[tuple[Any, bytes, int]] = []
        for block, _, key in blocks:
            if self.host.get(key) is not None:
                continue
            entry = self.host.add(key, state.low, must=True, passing=True)
            if entry is None:
                break
            self.host.pin([key])
            held.append(key)
            places.append((block, key, entry.slot))
        self._save(places)
        if self._reserved + len(held) <= _RESERVED_SHARE * self.host.slots:
            state.reserved = tuple(held)
            self._reserved += len(held)
        else:
            # No room to hold on to them; but nothing is as likely to be asked for.
            for key in held:
                if (entry := self.host.get(key)) is not None:
                    entry.passing = False
            self.host.unpin(held)

    def on_finish(self, request: Any) -> None:
        """It ended, its blocks are about to be freed: they stay in the GPU for a while, and may be saved then."""
        state = self._states.pop(request.request_id, None)
        self.recoveries.forget(request.request_id)
        if state is None:
            return
        self._release(state)
        saved = None if self.knobs.save_outputs else request.num_prompt_tokens // self._tokens
        blocks = self._hashed(state, saved)
        if not blocks:
            return
        ahead = self._manager.block_pool.get_num_free_blocks()
        due = self._allocated + int(self.knobs.save_ahead_share * ahead)
        self._freed.append(Freed(due, tuple(blocks), state.low))
        self._freed_blocks += len(blocks)
        while self._freed_blocks > _CANDIDATES * self._manager.block_pool.num_gpu_blocks:
            self._freed_blocks -= len(self._freed.popleft().blocks)

    def on_evict(self, blocks: Iterable[Any]) -> None:
        """Blocks of the GPU are about to be overwritten."""
        self.moves.overwritten(block.block_id for block in blocks)

    def before_schedule(self, now: float) -> None:
        """Between passes: what the disk has done, what is to be saved, put down and fetched."""
        self._sync_left_s = self.knobs.reload_sync_ms / 1e3
        if self.disk is not None:
            self.disk.collect(now)
        self._save_due()
        if self.disk is not None:
            self.disk.demote(self.knobs.demote_step_blocks, now)
            self._prefetch(now)

    # what vLLM asks

    def match(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded behind `computed_tokens`, and whether beside steps; None: ask again later."""
        if not self.bound:
            return 0, False
        state = self._state(request)
        state.local_tokens = computed_tokens
        start = computed_tokens // self._tokens
        limit = (request.num_tokens - 1) // self._tokens
        if limit - start < self.knobs.reload_min_blocks:
            return 0, False
        found = self._look_up(state, start, limit)
        if found is None:
            return None, False
        if found < self.knobs.reload_min_blocks:
            return 0, False
        size, whole_s = found * self._bytes, self.knobs.reload_sync_ms / 1e3
        load_s = self.rates.load.seconds(size)
        # Behind those that hold up this step already.
        done_s = whole_s - self._sync_left_s + load_s
        if done_s > self.knobs.reload_cost_ratio * self.rates.recompute_s(found * self._tokens):
            self._too_dear(state)
            return 0, False
        state.sync = load_s <= self._sync_left_s
        if not state.sync and size / self.rates.load.bytes_per_s <= whole_s and self._put_off(state):
            # Beside steps it would take several: it has the next one, or the one after loads that are under way.
            return None, False
        if state.sync:
            state.put_off_since_s = None
        return found * self._tokens, not state.sync

    def allocated(self, request: Any, blocks: Sequence[Any], loaded_tokens: int) -> None:
        """The request has its blocks; `loaded_tokens` of them are to be loaded behind what the GPU had."""
        if not self.bound:
            return
        assert self._context is not None
        state = self._state(request)
        self.recoveries.on_pick(request.request_id, state.local_tokens + loaded_tokens, self._context.clock())
        if not state.admitted:
            self._note_use(state)
        self._release(state)
        state.look_afresh()
        if not loaded_tokens:
            return
        start, count = state.local_tokens // self._tokens, loaded_tokens // self._tokens
        keys = tuple(state.keys[start : start + count])
        slots = tuple(self._slot(key) for key in keys)
        self.host.pin(keys)
        from_disk = self.disk.used(keys) if self.disk is not None else 0
        self.counts.disk_hit_tokens += from_disk * self._tokens
        self.counts.host_hit_tokens += (count - from_disk) * self._tokens
        size = count * self._bytes
        self.counts.loads += 1
        if state.sync:
            seconds = size / self.rates.load.bytes_per_s
            self._sync_left_s -= seconds
            self.counts.loads_within_step += 1
            self.recoveries.on_load_within_step(request.request_id, seconds)
        else:
            self.rates.load.begin(size)
            # Those of a load within the step are named by the step itself.
            self._allocated += count
        ids = tuple(block.block_id for block in blocks[start : start + count])
        self.moves.load(Move(keys, ids, slots, request.request_id, beside=not state.sync))

    def scheduled(self, new_blocks: int) -> None:
        """A pass is over; it handed out so many blocks."""
        self._allocated += new_blocks
        self.counts.flushed_saves += len(self.moves.flush)

    def completed(self, jobs: Iterable[int]) -> None:
        """The worker reports these as done."""
        for _, move in self.moves.done(jobs):
            size = len(move.keys) * self._bytes
            if move.is_load:
                self.counts.h2d_bytes += size
                if move.beside:
                    self.rates.load.end(size)
                self.host.unpin(move.keys)
            else:
                self.counts.d2h_bytes += size
                self.host.written(move.keys)

    @property
    def busy(self) -> bool:
        """Whether the engine must go on stepping although nothing is scheduled."""
        return bool(self.moves.under_way)

    def reset(self) -> None:
        """Forget all blocks: the model they belong to has changed."""
        for state in self._states.values():
            self._release(state)
            state.memo = None
        self._freed.clear()
        self._freed_blocks = 0
        self.host.clear()
        if self.disk is not None:
            self.disk.clear()

    # how

    def _state(self, request: Any) -> State:
        state = self._states.get(request.request_id)
        if state is None:
            assert self._context is not None
            info = self._context.request_info(request)
            state = State(request, tenant_digest(info.tenant), info.priority >= self.knobs.disk_from_rank)
            self._states[request.request_id] = state
        hashes = request.block_hashes
        if len(state.keys) < len(hashes):
            state.keys += map(state.tenant.__add__, hashes[len(state.keys) :])
        return state

    def _hashed(self, state: State, most: int | None = None) -> list[tuple[Any, Any, bytes]]:
        """Its first blocks, as far as the GPU's cache vouches for them: block, its hash there, key."""
        tenant, out = state.tenant, []
        blocks = self._manager.get_blocks(state.request.request_id).blocks[0]
        for block, key in zip(blocks[:most], state.keys, strict=False):
            # The hash of a block, with the number of its group behind it.
            if (name := block.block_hash) is None or tenant + name[:-4] != key:
                break
            out.append((block, name, key))
        return out

    def _look_up(self, state: State, start: int, limit: int) -> int | None:
        """Blocks behind `start` that the host tier has; None if more are on their way and worth waiting for."""
        assert self._context is not None
        disk_version = self.disk.cache.version if self.disk is not None else 0
        memo = start, limit, self.host.version, disk_version
        if memo == state.memo and state.waits_since_s is None:
            return state.found
        keys, end = state.keys, start
        while end < limit and (entry := self.host.get(keys[end])) is not None and entry.ready:
            end += 1
        state.memo, state.found = memo, end - start
        if end < limit and not state.patience_over and self._on_its_way(state, end, limit):
            now = self._context.clock()
            if state.waits_since_s is None:
                state.waits_since_s = now
            if now - state.waits_since_s < self.knobs.reload_patience_ms / 1e3:
                return None
            state.patience_over = True
            self.counts.patience_ended += 1
        state.waits_since_s = None
        return state.found

    def _on_its_way(self, state: State, at: int, limit: int) -> bool:
        """Whether the block at this place will be in the host tier soon; fetched from the disk if that is cheaper."""
        if self.host.get(state.keys[at]) is not None:
            return True
        if self.disk is None:
            return False
        end = at
        while end < limit and self.disk.has(state.keys[end]) and self.host.get(state.keys[end]) is None:
            end += 1
        count = end - at
        if count < self.knobs.reload_min_blocks:
            return False
        size = count * self._bytes
        cost_s = self.rates.disk_read.seconds(size) + self.rates.load.seconds(size)
        if cost_s > self.knobs.reload_cost_ratio * self.rates.recompute_s(count * self._tokens):
            self._too_dear(state)
            return False
        return bool(self.disk.fetch(state.keys[at:end], state.low, must=True))

    def _put_off(self, state: State) -> bool:
        """Whether its load waits for another step; not for longer than for the disk."""
        assert self._context is not None
        now = self._context.clock()
        if state.put_off_since_s is None:
            state.put_off_since_s = now
        if not state.put_off:
            state.put_off = True
            self.counts.next_step_loads += 1
        return now - state.put_off_since_s < self.knobs.reload_patience_ms / 1e3

    def _too_dear(self, state: State) -> None:
        if not state.dear:
            state.dear = True
            self.counts.dear_loads += 1

    def _note_use(self, state: State) -> None:
        state.admitted = True
        keys = state.keys[: state.request.num_prompt_tokens // self._tokens]
        self.counts.asked_tokens += state.request.num_prompt_tokens
        self.host.note(keys)
        self.host.use(keys, state.low)
        if self.disk is not None:
            self.disk.cache.note(keys)

    def _slot(self, key: bytes) -> int:
        entry = self.host.get(key)
        assert entry is not None and entry.ready
        return entry.slot

    def _release(self, state: State) -> None:
        if state.reserved:
            self._reserved -= len(state.reserved)
            self.host.unpin(state.reserved)
            state.reserved = ()

    def _save(self, places: Sequence[tuple[Any, bytes, int]]) -> None:
        if places:
            self.counts.saved_blocks += len(places)
            self.moves.save(
                Move(
                    tuple(key for _, key, _ in places),
                    tuple(block.block_id for block, _, _ in places),
                    tuple(slot for _, _, slot in places),
                )
            )

    def _save_due(self) -> None:
        """Save blocks that are due, by default all at once, heads first: a tail is worth nothing without its head."""
        left = self.knobs.save_step_blocks
        while self._freed and self._freed[0].due <= self._allocated and left > 0:
            freed = self._freed.popleft()
            self._freed_blocks -= len(freed.blocks)
            places: list[tuple[Any, bytes, int]] = []
            for block, block_hash, key in freed.blocks:
                entry = self.host.get(key)
                if entry is not None:
                    if entry.passing:
                        self.host.keep(entry)
                    continue
                if block.block_hash != block_hash:
                    self.counts.late_saves += 1
                    break
                entry = self.host.add(key, freed.low)
                if entry is None:
                    break
                places.append((block, key, entry.slot))
            self._save(places)
            left -= len(places)

    def _prefetch(self, now: float) -> None:
        """Bring up from the disk what the next waiting requests will need."""
        disk, knobs = self.disk, self.knobs
        if disk is None or not knobs.prefetch_requests or now < self._prefetch_due_s or not len(disk.cache):
            return
        assert self._context is not None
        self._prefetch_due_s = now + knobs.prefetch_every_ms / 1e3
        cached = self._manager.block_pool.get_cached_block
        for request in self._context.first_waiting(knobs.prefetch_requests):
            state = self._state(request)
            limit = (request.num_tokens - 1) // self._tokens
            at = 0
            while at < limit and (
                self.host.get(state.keys[at]) is not None or cached(request.block_hashes[at], [0]) is not None
            ):
                at += 1
            if at < limit and disk.has(state.keys[at]):
                self._on_its_way(state, at, limit)
