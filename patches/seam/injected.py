"""Requests of our own: a patch asks for a prefix to be computed that no client waits for.

Each takes one step and no more: its prompt is cut so that what is not in the cache yet fits the step's share, it
generates one token, and that token goes nowhere. A longer prefix takes several of them, each of which finds the
blocks of the one before. They enter an engine only when nobody waits, one at a time (`in_flight`); one that somebody would
have to wait for is ended before the pass. Other patches see nothing of them: no hook is called for them, and what
hooks are shown of a step is the step without them.

What they may cost the traffic. At the start: nothing, the engine has not said that it is ready. Later: a request that
comes while one is computed waits for the end of that step. That is the time of one step with `idle_tokens` of prefill
and nothing else, or, where `beside_tokens` allows one beside decodes, what these tokens add to that step. Seats and blocks
cost nothing: those of one that runs are given back before the next pass that has somebody waiting, and it takes
only blocks that hold nothing, as long as a whole prompt and a whole step fit beside it. What a `Share` says can loosen each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, make_block_hash_with_group_id
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from patches.seam.own import OWN_ID, OwnPrefix

if TYPE_CHECKING:
    from patches.seam.runtime import Runtime

#: Prefixes that wait at most; further ones are refused.
MOST_WAITING = 4096
# A prefix that no pass took so often is given up, and one that was computed so many times over and is not there.
_MOST_FAILURES = 3
_MOST_COMPUTED = 2
# vLLM serves smaller priorities first.
_LAST = 2**31 - 1


class Injector:
    """Puts requests of our own into one scheduler; made for plans in which a patch uses the seam `on_own`.

    Args:
        runtime: the scheduler's runtime.
        on_own: called with (patch, the prefix's name, outcome, now) when a prefix is done. Outcomes: `cached` (it is
            in the cache, computed or found), `dropped` (it does not fit, or got nowhere).

    Attributes:
        live: our requests that the scheduler has, by id: prefix, request.
        computed_tokens, steps, withdrawn: tokens computed, steps that held one of ours, requests ended early.
        traffic_steps, longest_chunk_tokens: of the steps after the start: how many, and the most tokens of one of ours.
    """

    def __init__(self, runtime: Runtime, on_own: Callable[[str, str, str, float], None]) -> None:
        self._runtime = runtime
        self._on_own = on_own
        self._waiting: deque[OwnPrefix] = deque()
        self._at_start: list[Callable[[], None]] = []
        self._starting = False
        self._admitted = 0
        # Whether the pass that is under way may admit one of ours; then it admits nobody else.
        self.in_pass = False
        self._hasher: Any = None
        self.live: dict[str, tuple[OwnPrefix, Any]] = {}
        # Ids that some output of a pass may still name, and what others are shown of those that do.
        self._named: set[str] = set()
        self._views: dict[int, Any] = {}
        self.computed_tokens = self.steps = self.withdrawn = 0
        self.traffic_steps = self.longest_chunk_tokens = 0

    def __bool__(self) -> bool:
        """Whether some prefix waits to be computed."""
        return bool(self._waiting)

    # what patches ask for

    def at_start(self, act: Callable[[], None]) -> None:
        """Call this once, when the scheduler is there and before its first pass."""
        self._at_start.append(act)

    def ask(self, prefix: OwnPrefix) -> bool:
        """Queue a prefix; False if there are too many already or it can never be computed here."""
        config = self._runtime.scheduler.vllm_config
        blocks = len(prefix.tokens) // self._runtime.scheduler.block_size
        fits = 0 < len(prefix.tokens) < config.model_config.max_model_len and blocks
        if not fits or len(self._waiting) >= MOST_WAITING or not config.cache_config.enable_prefix_caching:
            return False
        vocab = config.model_config.get_vocab_size()
        if not all(0 <= token < vocab for token in prefix.tokens):
            return False
        self._waiting.append(prefix)
        return True

    def hashes(self, prefix: OwnPrefix) -> list[Any]:
        """Hashes of the prefix's full blocks; computed once."""
        if prefix.block_hashes is None:
            if self._hasher is None:
                scheduler = self._runtime.scheduler
                function = get_hash_fn_by_name(scheduler.cache_config.prefix_caching_hash_algo)
                self._hasher = get_request_block_hasher(scheduler.hash_block_size, function)
            whole = self._request("", prefix, prefix.tokens, self._hasher)
            prefix.block_hashes = list(whole.block_hashes)
        return prefix.block_hashes

    def cached_tokens(self, prefix: OwnPrefix) -> int:
        """How much of the prefix is in the cache, in tokens; touches nothing."""
        coordinator = self._runtime.scheduler.kv_cache_manager.coordinator
        return int(coordinator.find_longest_cache_hit(self.hashes(prefix), len(prefix.tokens))[1])

    # around a pass

    def before_pass(self) -> None:
        """End those of ours that somebody would wait for, and any that has not ended with its step."""
        self._begin()
        if not self.live:
            return
        # Not counting one that was put in for the pass that begins now.
        somebody = self._runtime.scheduler.get_request_counts()[1] > self.in_pass
        if self.in_pass and not somebody:
            return
        self.in_pass = False
        for request_id, (_, request) in list(self.live.items()):
            if somebody or request.is_prefill_chunk or request.status != RequestStatus.RUNNING:
                self._withdraw(request_id)

    def admit(self) -> None:
        """Put the next of ours before the scheduler if this is the moment for one; the last thing before a pass."""
        if not self._waiting or self.in_pass or len(self.live) >= self._waiting[0].share.in_flight:
            return
        now = self._runtime.clock()
        while self._waiting:
            prefix = self._waiting[0]
            goal = len(prefix.tokens) - len(prefix.tokens) % self._runtime.scheduler.block_size
            cached = self.cached_tokens(prefix)
            tokens = self._room(prefix, cached, goal) if cached < goal else 0
            useless = prefix.failures >= _MOST_FAILURES or prefix.computed >= _MOST_COMPUTED * goal
            if cached >= goal or useless or (self._starting and not tokens):
                self._waiting.popleft()
                self._on_own(prefix.patch, prefix.name, "cached" if cached >= goal else "dropped", now)
                continue
            if tokens:
                self._add(prefix, cached + tokens)
            return

    def after_pass(self, output: Any) -> Any:
        """Take back what was not scheduled; returns the output as other patches are to see it."""
        self.in_pass = False
        stats = self._runtime.scheduler.kv_cache_manager.prefix_cache_stats
        for new in output.scheduled_new_reqs if self.live else ():
            entry = self.live.get(new.req_id)
            if entry is None:
                continue
            prefix, request = entry
            tokens = output.num_scheduled_tokens[new.req_id]
            prefix.computed += tokens
            prefix.failures = 0
            if prefix.computing is not None:
                prefix.computing(self._keys(prefix, new.num_computed_tokens, request.num_tokens))
            self.computed_tokens += tokens
            self.steps += 1
            if not self._starting:
                self.traffic_steps += 1
                self.longest_chunk_tokens = max(self.longest_chunk_tokens, tokens)
            if stats is not None:
                # The engine's own counters speak of what clients asked for.
                stats.requests -= 1
                stats.queries -= request.num_tokens
                stats.hits -= new.num_computed_tokens
        for request_id, (prefix, request) in list(self.live.items()):
            if request.status != RequestStatus.RUNNING:
                prefix.failures += 1
                self._withdraw(request_id)
        return self._without(output)

    def view(self, output: Any) -> Any:
        """A pass's output as `after_pass` gave it; once, when the model's answer to it is applied."""
        return self._views.pop(id(output), output)

    def after_update(self, outputs: dict[int, Any]) -> None:
        """Swallow what ours produced, and forget those that have ended."""
        for request_id, (_, request) in list(self.live.items()):
            if request.is_finished():
                del self.live[request_id]
                for each in outputs.values():
                    each.outputs = [out for out in each.outputs if out.request_id != request_id]

    # at the start

    def start(self, step: Callable[[], None], busy: Callable[[], bool]) -> None:
        """Compute what is asked for at the start, before the engine says that it is ready.

        Args:
            step: one turn of the engine's loop. busy: whether it has anything to do.
        """
        self._starting = True
        try:
            self._begin()
            turns = sum(2 + len(prefix.tokens) for prefix in self._waiting)
            self.admit()
            while busy() and turns:
                step()
                if not busy():
                    self.admit()
                turns -= 1
        finally:
            self._starting = False

    # inside

    def _begin(self) -> None:
        if self._at_start:
            acts, self._at_start = self._at_start, []
            for act in acts:
                act()

    def _room(self, prefix: OwnPrefix, cached: int, goal: int) -> int:
        """Tokens, whole blocks, that one of ours may take in the coming pass; 0 if it may not be there at all."""
        scheduler = self._runtime.scheduler
        running, waiting = scheduler.get_request_counts()
        budget = scheduler.max_num_scheduled_tokens
        if (
            waiting
            or scheduler.pause_state != PauseState.UNPAUSED
            or running >= scheduler.max_num_active_reqs
        ):
            return 0
        if self._starting:
            most = budget
        elif not running:
            most = prefix.share.idle_tokens
        elif prefix.share.beside_tokens and not any(r.is_prefill_chunk for r in scheduler.running):
            each = 1 + scheduler.num_spec_tokens + scheduler.num_lookahead_tokens
            most = min(prefix.share.beside_tokens, budget - running * each)
        else:
            return 0
        if (threshold := scheduler.scheduler_config.long_prefill_token_threshold) > 0:
            most = min(most, threshold)
        size = scheduler.block_size
        tokens = min(goal - cached, min(most, budget) // size * size)
        return tokens if tokens > 0 and self._blocks_suffice(prefix, cached, tokens) else 0

    def _blocks_suffice(self, prefix: OwnPrefix, cached: int, tokens: int) -> bool:
        """Whether enough blocks are free beside it for a whole step, growth of what runs, and (`Share`) the longest prompt."""
        scheduler, manager = self._runtime.scheduler, self._runtime.scheduler.kv_cache_manager
        size, groups = scheduler.block_size, len(scheduler.kv_cache_config.kv_cache_groups)
        fresh = groups * (tokens // size)
        beside = scheduler.max_num_scheduled_tokens // size
        if prefix.share.beside_longest:
            beside += scheduler.max_model_len // size
        beside = groups * (beside + len(scheduler.running) + 2) + manager.watermark_blocks
        if self._starting:
            # No traffic yet, and nothing referenced.
            beside = 0
        if manager.block_pool.get_num_free_blocks() - groups * (cached // size) - fresh < beside:
            return False
        if prefix.share.evict:
            return True
        following = islice(manager.block_pool.free_block_queue.iter_blocks_after(None), fresh)
        return all(block.block_hash is None for block in following)

    def _add(self, prefix: OwnPrefix, end: int) -> None:
        scheduler = self._runtime.scheduler
        request_id = f"{OWN_ID}{prefix.patch}-{self._admitted}"
        self._admitted += 1
        request = self._request(request_id, prefix, prefix.tokens[:end], None)
        request.block_hashes = self.hashes(prefix)[: end // scheduler.hash_block_size]
        self.live[request_id] = (prefix, request)
        self.in_pass = True
        self._named.add(request_id)
        scheduler.add_request(request)

    def _request(self, request_id: str, prefix: OwnPrefix, tokens: Sequence[int], hasher: Any) -> Any:
        return Request(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(
                max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, extra_args={}
            ),
            pooling_params=None,
            arrival_time=self._runtime.clock(),
            cache_salt=prefix.cache_salt,
            priority=_LAST,
            block_hasher=hasher,
        )

    def _keys(self, prefix: OwnPrefix, begin: int, end: int) -> list[bytes]:
        """What the blocks of these tokens are called in the pool, in every group."""
        scheduler = self._runtime.scheduler
        groups, size = range(len(scheduler.kv_cache_config.kv_cache_groups)), scheduler.hash_block_size
        hashes = self.hashes(prefix)[begin // size : end // size]
        return [make_block_hash_with_group_id(each, group) for each in hashes for group in groups]

    def _withdraw(self, request_id: str) -> None:
        """End one of ours. What it computed stays in the cache."""
        self._runtime.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        del self.live[request_id]
        self.withdrawn += 1

    def _without(self, output: Any) -> Any:
        """The output of a pass without ours; the very same object where it holds none."""
        if not self._named:
            return output
        ended = self._named & output.finished_req_ids
        ours = ended | (self._named & output.num_scheduled_tokens.keys())
        self._named -= ended
        if not ours:
            return output
        tokens = {rid: n for rid, n in output.num_scheduled_tokens.items() if rid not in ours}
        view = replace(
            output,
            scheduled_new_reqs=[new for new in output.scheduled_new_reqs if new.req_id not in ours],
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            finished_req_ids=output.finished_req_ids - ours,
        )
        if output.total_num_scheduled_tokens:
            self._views[id(output)] = view
        return view
