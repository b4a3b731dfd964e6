"""The disk tier as the scheduler sees it: what is on it, what goes down, what comes up, and when it is let alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from patches.kv.tiers.cache import BlockCache, Entry
from patches.kv.tiers.disk_io import DiskIO, Place
from patches.kv.tiers.files import Found
from patches.kv.tiers.rates import Link

# Writes under way at most: more would only wait for the disk and hold host memory meanwhile.
_WRITES_AT_ONCE = 2
# Blocks go down once so much of the host tier is taken: before that nothing is about to leave it.
_NEARLY_FULL = 0.9


@dataclass(slots=True)
class DiskCounts:
    """What the disk tier did since the start."""

    to_disk_bytes: int = 0
    from_disk_bytes: int = 0
    bad_blocks: int = 0
    refused_blocks: int = 0


class DiskTier:
    """Blocks of low priority below the host tier.

    Args:
        slots: blocks that the disk may hold, at least 1. block_bytes: of one. io: what moves them.
        host: the tier above. retry_s: how long a disk that refused a block is let alone.
        found: what an earlier engine left, used longest ago first.
    """

    def __init__(
        self,
        slots: int,
        block_bytes: int,
        io: DiskIO,
        host: BlockCache,
        link: Link,
        retry_s: float,
        found: Sequence[Found] = (),
    ) -> None:
        self._io, self._host, self._link = io, host, link
        self._block_bytes, self._retry_s = block_bytes, retry_s
        self.cache = BlockCache(slots, on_evict=self._forget)
        self.counts = DiskCounts()
        self._jobs: dict[int, tuple[bool, tuple[bytes, ...]]] = {}
        self._next_job = 0
        self._writes = 0
        self._closed_until_s = 0.0
        # Fetched and not used since.
        self._fetched: set[bytes] = set()
        self._adopt(found)

    def has(self, key: bytes) -> bool:
        """Whether the block can be fetched."""
        entry = self.cache.get(key)
        return entry is not None and entry.ready

    @property
    def busy(self) -> bool:
        """Whether something is being fetched: somebody may wait for it."""
        return len(self._jobs) > self._writes

    def fetch(self, keys: Sequence[bytes], low: bool, *, must: bool) -> int:
        """Begin to bring blocks of one chain up, head first; how many: the host tier may have no place for all."""
        places: list[Place] = []
        for key in keys:
            entry = self._host.add(key, low, must=must)
            if entry is None:
                break
            places.append((key, entry.slot))
        if places:
            taken = tuple(key for key, _ in places)
            self.cache.use(taken, True)
            self.cache.pin(taken)
            self._fetched.update(taken)
            self._link.begin(len(taken) * self._block_bytes)
            self._io.read(self._begin(False, taken), places)
        return len(places)

    def demote(self, most: int, now: float) -> None:
        """Begin to put down what will leave the host tier next, if it may go to disk and is not there."""
        host = self._host
        if now < self._closed_until_s or self._writes >= _WRITES_AT_ONCE:
            return
        if len(host) < _NEARLY_FULL * host.slots:
            return
        places: list[Place] = []
        for entry in [*islice(host.coldest(True), 2 * most)]:
            if self.cache.get(entry.key) is not None:
                continue
            if len(places) == most or self.cache.add(entry.key, True) is None:
                break
            places.append((entry.key, entry.slot))
        if places:
            keys = tuple(key for key, _ in places)
            host.pin(keys)
            self._writes += 1
            self._io.write(self._begin(True, keys), places)

    def collect(self, now: float) -> None:
        """Take note of what has ended."""
        for done in self._io.finished():
            is_write, keys = self._jobs.pop(done.job)
            size = len(done.moved) * self._block_bytes
            if is_write:
                self._writes -= 1
                self.counts.to_disk_bytes += size
                self.cache.written(done.moved)
                self.cache.failed((*done.refused, *done.bad))
                # Tail first again, as they stood.
                self._host.unpin(keys[::-1])
                if done.refused:
                    self.counts.refused_blocks += len(done.refused)
                    self._closed_until_s = now + self._retry_s
            else:
                self.counts.from_disk_bytes += size
                self.counts.bad_blocks += len(done.bad)
                self._link.end(len(keys) * self._block_bytes)
                self._link.measured(size, done.seconds)
                self.cache.unpin(keys)
                self._host.written(done.moved)
                lost = (*done.bad, *done.refused)
                self._host.failed(lost)
                for key in lost:
                    self.cache.remove(key)
                    self._fetched.discard(key)

    def used(self, keys: Iterable[bytes]) -> int:
        """How many of these came up from the disk and had not been used since."""
        fetched = [key for key in keys if key in self._fetched]
        self._fetched.difference_update(fetched)
        return len(fetched)

    def clear(self) -> None:
        """Forget all blocks, and remove what can be removed at once."""
        for low in (False, True):
            self._io.drop([entry.key for entry in self.cache.coldest(low)])
        self.cache.clear()
        self._fetched.clear()

    def close(self) -> None:
        """End."""
        self._io.close()

    def _forget(self, entry: Entry) -> None:
        self._io.drop([entry.key])

    def _begin(self, is_write: bool, keys: tuple[bytes, ...]) -> int:
        job, self._next_job = self._next_job, self._next_job + 1
        self._jobs[job] = is_write, keys
        return job

    def _adopt(self, found: Sequence[Found]) -> None:
        surplus = max(0, len(found) - self.cache.slots)
        self._io.drop([one.key for one in found[:surplus]])
        for one in found[surplus:]:
            if self.cache.add(one.key, True) is not None:
                self.cache.written([one.key])


MakeDisk = Callable[[BlockCache], DiskTier]
