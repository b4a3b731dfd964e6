"""The worker's side of KV offloading, played: each transfer takes its bytes over its link, on the engine's clock.

Links are the two ways between GPU and host and the disk; on one link transfers follow each other. What is
begun when, and when its end is told, is as upstream's worker and model runner have it:

- saves of a step begin with the next step, after the passes that were given to the GPU before;
- saves whose blocks a step overwrites end before its pass;
- loads that a step needs end before its pass; other loads begin after the pass of their step;
- ends are told with the output of a later step, as of when that step was given to the GPU.

No bytes are kept: what a block holds is not modelled, so a played disk never returns a damaged one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput

from patches.kv.tiers.connector import TierMetadata
from patches.kv.tiers.disk_io import Done, Place

_NS = 1_000_000_000


class LinkSpeeds(Protocol):
    """What a profile says of its links; see `harness.profiles.profile.Transfers`."""

    @property
    def d2h_bytes_per_s(self) -> float: ...
    @property
    def h2d_bytes_per_s(self) -> float: ...
    @property
    def launch_us(self) -> float: ...
    @property
    def disk_read_bytes_per_s(self) -> float: ...
    @property
    def disk_write_bytes_per_s(self) -> float: ...
    @property
    def disk_access_us(self) -> float: ...


class ClockNow(Protocol):
    """What is needed of a clock."""

    @property
    def now_ns(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer as it went; a row of the table `transfers`."""

    begin_ns: int
    end_ns: int
    link: str
    size: int


class Link:
    """A link on which transfers follow each other in the order in which they are asked for."""

    def __init__(self, name: str, latency_us: float) -> None:
        self._name = name
        self._latency_ns = round(latency_us * 1e3)
        self._free_ns = 0

    def carry(self, size: int, bytes_per_s: float, ready_ns: int) -> Transfer:
        """Take a transfer that could begin at `ready_ns`."""
        begin_ns = max(ready_ns, self._free_ns)
        self._free_ns = begin_ns + self._latency_ns + round(size * _NS / bytes_per_s)
        return Transfer(begin_ns, self._free_ns, self._name, size)


class Links:
    """All links of one engine, and the transfers between GPU and host that are under way on them.

    Args:
        speeds: of the links. clock: of the engine. block_bytes: of a KV block.
    """

    def __init__(self, speeds: LinkSpeeds, clock: ClockNow, block_bytes: int) -> None:
        self._speeds, self._clock, self._block_bytes = speeds, clock, block_bytes
        self._d2h, self._h2d = Link("d2h", speeds.launch_us), Link("h2d", speeds.launch_us)
        self._unsubmitted: dict[int, Any] = {}
        # Job -> when it ends; request of a load that somebody waits for.
        self._ends: dict[int, Transfer] = {}
        self._waiting: dict[int, str] = {}
        self.log: list[Transfer] = []
        self.disk = PlayedDisk(speeds, clock, block_bytes, self.log)

    def before_pass(self, meta: Any, gpu_free_ns: int) -> int:
        """What a step does ahead of its pass; returns when the pass may begin, ns."""
        now_ns = self._clock.now_ns
        ready_ns = max(now_ns, gpu_free_ns)
        flush = meta.jobs_to_flush or ()
        for job in sorted(flush):
            if job in meta.store_jobs:
                self._unsubmitted[job] = meta.store_jobs.pop(job)
        for job, entry in self._unsubmitted.items():
            self._carry(self._d2h, job, entry.src_spec, self._speeds.d2h_bytes_per_s, ready_ns)
        self._unsubmitted.clear()
        begin_ns = now_ns
        for job in flush:
            if job in self._ends:
                begin_ns = max(begin_ns, self._ends[job].end_ns)
        # Upstream's own connector has none.
        sync_loads = meta.sync_loads if isinstance(meta, TierMetadata) else {}
        for job, entry in sync_loads.items():
            done = self._carry(self._h2d, job, entry.dst_spec, self._speeds.h2d_bytes_per_s, ready_ns)
            begin_ns = max(begin_ns, done.end_ns)
        return begin_ns

    def after_pass(self, meta: Any, end_ns: int) -> KVConnectorOutput | None:
        """What a step does behind its pass, which ends at `end_ns`; returns which transfers have ended until now."""
        for job, entry in meta.load_jobs.items():
            self._waiting[job] = entry.req_id
            self._carry(self._h2d, job, entry.dst_spec, self._speeds.h2d_bytes_per_s, end_ns)
        self._unsubmitted.update(meta.store_jobs)
        return self._ended()

    def _carry(self, link: Link, job: int, gpu: Any, bytes_per_s: float, ready_ns: int) -> Transfer:
        transfer = link.carry(len(gpu.block_ids) * self._block_bytes, bytes_per_s, ready_ns)
        self._ends[job] = transfer
        self.log.append(transfer)
        return transfer

    def _ended(self) -> KVConnectorOutput | None:
        now_ns = self._clock.now_ns
        ended = [(job, transfer) for job, transfer in self._ends.items() if transfer.end_ns <= now_ns]
        if not ended:
            return None
        meta = OffloadingWorkerMetadata()
        received = set()
        for job, transfer in ended:
            del self._ends[job]
            meta.mark_completed(job)
            seconds = (transfer.end_ns - transfer.begin_ns) / _NS
            stats = meta.transfer_stats
            (stats.load if transfer.link == "h2d" else stats.store).record(transfer.size, seconds)
            if job in self._waiting:
                received.add(self._waiting.pop(job))
        return KVConnectorOutput(finished_recving=received or None, kv_connector_worker_meta=meta)


class PlayedDisk:
    """A disk that only takes time: reads and writes follow each other, and none fails."""

    def __init__(
        self, speeds: LinkSpeeds, clock: ClockNow, block_bytes: int, log: list[Transfer] | None = None
    ) -> None:
        self._speeds, self._clock, self._block_bytes = speeds, clock, block_bytes
        self._link = Link("disk", speeds.disk_access_us)
        self._log = log if log is not None else []
        self._under_way: deque[tuple[int, Done]] = deque()

    def write(self, job: int, places: Sequence[Place]) -> None:
        """See `DiskIO`."""
        self._carry(job, places, self._speeds.disk_write_bytes_per_s, "disk write")

    def read(self, job: int, places: Sequence[Place]) -> None:
        """See `DiskIO`."""
        self._carry(job, places, self._speeds.disk_read_bytes_per_s, "disk read")

    def drop(self, keys: Sequence[bytes]) -> None:
        """See `DiskIO`; takes no time."""

    def finished(self) -> list[Done]:
        """See `DiskIO`."""
        done = []
        while self._under_way and self._under_way[0][0] <= self._clock.now_ns:
            done.append(self._under_way.popleft()[1])
        return done

    def close(self) -> None:
        """See `DiskIO`."""

    def _carry(self, job: int, places: Sequence[Place], bytes_per_s: float, name: str) -> None:
        size = len(places) * self._block_bytes
        transfer = self._link.carry(size, bytes_per_s, self._clock.now_ns)
        self._log.append(replace(transfer, link=name))
        seconds = (transfer.end_ns - transfer.begin_ns) / _NS
        keys = tuple(key for key, _ in places)
        self._under_way.append((transfer.end_ns, Done(job, keys, seconds=seconds)))
