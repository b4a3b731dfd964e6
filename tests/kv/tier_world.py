"""A real Scheduler with tiers, on memory that remembers what was written: any mix-up of blocks shows at once.

What a block holds at a token is a checksum over all tokens up to it. Copies take the scheduler at its word: they
read and write as late as the worker may, so a block that is overwritten too early, or a slot that is given away
while it is read, ends up as a wrong checksum in a request's context.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from patches.kv.tiers import disk_io
from patches.kv.tiers.disk_io import Done, Place
from patches.seam.plan import resolve
from tests.drive import cancel, make_config, make_request, make_scheduler

BLOCK_TOKENS, TOKEN = 16, 7
# What the smallest block takes in host memory: a page.
BLOCK_BYTES = 4096
Content = tuple[int, ...]


class MixUp(AssertionError):
    """A request would compute on KV that is not its own."""


@dataclass
class LateDisk:
    """A disk that keeps contents by key, ends jobs later, and loses or refuses some blocks."""

    rng: random.Random
    slots: dict[int, Content]
    loss: float = 0.0
    kept: dict[bytes, Content] = field(default_factory=dict)
    under_way: deque[tuple[bool, int, tuple[Place, ...]]] = field(default_factory=deque)

    def write(self, job: int, places: Sequence[Place]) -> None:
        """See `DiskIO`."""
        self.under_way.append((True, job, tuple(places)))

    def read(self, job: int, places: Sequence[Place]) -> None:
        """See `DiskIO`."""
        self.under_way.append((False, job, tuple(places)))

    def drop(self, keys: Sequence[bytes]) -> None:
        """See `DiskIO`."""
        for key in keys:
            self.kept.pop(key, None)

    def finished(self) -> list[Done]:
        """See `DiskIO`."""
        done = []
        while self.under_way and self.rng.random() < 0.5:
            is_write, job, places = self.under_way.popleft()
            moved: list[bytes] = []
            bad: list[bytes] = []
            refused: list[bytes] = []
            for key, slot in places:
                if self.rng.random() < self.loss:
                    (refused if is_write else bad).append(key)
                elif is_write:
                    self.kept[key] = self.slots[slot]
                    moved.append(key)
                elif key in self.kept:
                    self.slots[slot] = self.kept[key]
                    moved.append(key)
                else:
                    bad.append(key)
            done.append(Done(job, tuple(moved), tuple(bad), tuple(refused), 0.001))
        return done

    def close(self) -> None:
        """See `DiskIO`."""


class World:
    """One engine.

    Args:
        knobs: of `tiering`; the plan must be installed by the caller before.
        blocks: KV blocks of the GPU. seed: of the delays.
    """

    def __init__(
        self, knobs: Mapping[str, Any], blocks: int, seed: int, *, async_scheduling: bool, loss: float = 0.0
    ) -> None:
        self._rng = random.Random(seed)
        self.gpu: dict[int, dict[int, int]] = {}
        self.slots: dict[int, Content] = {}
        self.disk = LateDisk(self._rng, self.slots, loss)
        self.config = make_config(
            max_num_seqs=6, max_num_batched_tokens=128, async_scheduling=async_scheduling
        )
        brought = resolve("tiering", knobs={"tiering": dict(knobs)}).engine_flags
        self.config.kv_transfer_config = KVTransferConfig(**brought["kv_transfer_config"])
        with disk_io.play(lambda _: self.disk):
            self.scheduler = make_scheduler(self.config, blocks, log_stats=False)
        self.tiers = self.scheduler.connector.tiers
        self._depth = 2 if async_scheduling else 1
        self._tables: dict[str, list[int]] = {}
        self._sums: dict[str, list[int]] = {}
        self._unsubmitted: dict[int, Any] = {}
        self._under_way: dict[int, tuple[bool, Any]] = {}
        self._order: deque[int] = deque()
        self.loaded: list[tuple[str, bytes]] = []
        self.finished: dict[str, int] = {}
        # Of each step under way, the requests whose prefill goes on.
        self._cut: dict[int, set[str]] = {}

    def request(self, name: str, prompt: list[int], output: int, tenant: str, priority: int) -> Any:
        """A request of these tokens."""
        made = make_request(
            self.config, name, prompt, max_tokens=output, priority=priority, tenant=tenant, tier="bronze"
        )
        total = 0
        self._sums[name] = []
        for token in [*prompt, *[TOKEN] * (output + 4)]:
            total = zlib.crc32(token.to_bytes(4, "big"), total)
            self._sums[name].append(total)
        return made

    def run(
        self,
        arrivals: Sequence[tuple[int, Any]],
        cancels: Mapping[int, str],
        clock: Any = None,
        resets: Collection[int] = (),
    ) -> None:
        """Serve all, each added before its step and cancelled before its, if it is there then.

        Before the steps in `resets` all are preempted and the GPU's cache is forgotten.
        """
        pending = deque(sorted(arrivals, key=lambda arrival: arrival[0]))
        in_flight: deque[tuple[Any, Any]] = deque()
        scheduler, step = self.scheduler, 0
        while pending or in_flight or scheduler.has_requests():
            assert step < 20_000, "the run does not end"
            if clock is not None:
                clock.advance_to(clock.now_ns + 20_000_000)
            while pending and pending[0][0] <= step:
                scheduler.add_request(pending.popleft()[1])
            if cancels.get(step) in scheduler.requests:
                cancel(scheduler, cancels[step])
            if step in resets:
                scheduler.reset_prefix_cache(reset_running_requests=True)
            step += 1
            if scheduler.has_requests() and len(in_flight) < self._depth:
                out = scheduler.schedule()
                in_flight.append((out, self._execute(out)))
                if len(in_flight) < self._depth and out.total_num_scheduled_tokens:
                    continue
            if in_flight:
                self._update(*in_flight.popleft())
            assert len(self.tiers.host) <= self.tiers.host.slots

    def _update(self, out: Any, told: Any) -> None:
        ids = list(out.num_scheduled_tokens)
        cut = self._cut.pop(id(out))
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={rid: index for index, rid in enumerate(ids)},
            sampled_token_ids=[[] if rid in cut else [TOKEN] for rid in ids],
            kv_connector_output=told,
        )
        for client in self.scheduler.update_from_output(out, output).values():
            for one in client.outputs:
                self.finished[one.request_id] = self.finished.get(one.request_id, 0) + len(one.new_token_ids)

    def _execute(self, out: Any) -> Any:
        """What the worker does with a step, at once; returns what it tells."""
        requests = self.scheduler.requests
        self._cut[id(out)] = {rid for rid in out.num_scheduled_tokens if requests[rid].is_prefill_chunk}
        meta = out.kv_connector_metadata
        for job in sorted(meta.jobs_to_flush):
            if job in meta.store_jobs:
                self._unsubmitted[job] = meta.store_jobs.pop(job)
        for job, entry in self._unsubmitted.items():
            self._begin(job, True, entry)
        self._unsubmitted = {}
        ended = [self._end(job) for job in sorted(meta.jobs_to_flush) if job in self._under_way]
        for job, entry in meta.sync_loads.items():
            self._begin(job, False, entry)
            ended.append(self._end(job))
        self._compute(out)
        for job, entry in meta.load_jobs.items():
            self._begin(job, False, entry)
        self._unsubmitted = dict(meta.store_jobs)
        while self._order and self._rng.random() < 0.6:
            job = self._order[0]
            ended.append(self._end(job))
        if not ended:
            return None
        told = OffloadingWorkerMetadata()
        for job, _, _ in ended:
            told.mark_completed(job)
        asked = {
            entry.req_id for job, is_store, entry in ended if not is_store and job not in meta.sync_loads
        }
        return KVConnectorOutput(finished_recving=asked or None, kv_connector_worker_meta=told)

    def _begin(self, job: int, is_store: bool, entry: Any) -> None:
        self._under_way[job] = is_store, entry
        self._order.append(job)

    def _end(self, job: int) -> tuple[int, bool, Any]:
        is_store, entry = self._under_way.pop(job)
        self._order.remove(job)
        gpu, host = (entry.src_spec, entry.dst_spec) if is_store else (entry.dst_spec, entry.src_spec)
        for block, slot in zip(gpu.block_ids.tolist(), host.block_ids.tolist(), strict=True):
            if is_store:
                held = self.gpu.get(block, {})
                self.slots[slot] = tuple(held.get(i, -1) for i in range(BLOCK_TOKENS))
            else:
                self.gpu[block] = dict(enumerate(self.slots[slot]))
        return job, is_store, entry

    def _compute(self, out: Any) -> None:
        computed: dict[str, int] = {}
        for new in out.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            computed[new.req_id] = new.num_computed_tokens
        cached = out.scheduled_cached_reqs
        for rid, ids, done in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if rid in cached.resumed_req_ids:
                self._tables[rid] = []
            self._tables[rid] += ids[0] if ids is not None else []
            computed[rid] = done
        for rid, tokens in out.num_scheduled_tokens.items():
            for at in range(computed[rid], computed[rid] + tokens):
                block = self._tables[rid][at // BLOCK_TOKENS]
                self.gpu.setdefault(block, {})[at % BLOCK_TOKENS] = self._sums[rid][at]
        # A pass writes the keys and values of all its tokens before any of them looks back: one request may hit
        # what another computes in the same step.
        for rid, tokens in out.num_scheduled_tokens.items():
            self._check(rid, computed[rid] + tokens)

    def _check(self, rid: str, computed: int) -> None:
        for at in range(computed):
            block = self._tables[rid][at // BLOCK_TOKENS]
            if self.gpu.get(block, {}).get(at % BLOCK_TOKENS) != self._sums[rid][at]:
                raise MixUp(f"{rid}: token {at} of {computed} in block {block}")
