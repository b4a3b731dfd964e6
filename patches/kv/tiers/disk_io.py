"""Moves blocks between host memory and the disk, beside the engine's own work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from patches.kv.tiers.files import BadBlock, TierFolder

# (key of the block, its slot in the host tier)
Place = tuple[bytes, int]
_READERS = 4


@dataclass(frozen=True, slots=True)
class Done:
    """A job's end: the blocks that were moved, those that were not, and why.

    Attributes:
        bad: missing or damaged on the disk. refused: the disk would not have them (full, read-only).
        seconds: what it took once it was begun.
    """

    job: int
    moved: tuple[bytes, ...]
    bad: tuple[bytes, ...] = ()
    refused: tuple[bytes, ...] = ()
    seconds: float = 0.0


class DiskIO(Protocol):
    """What the tiers ask of the disk. Nothing here waits for it, and no call fails for what the disk does."""

    def write(self, job: int, places: Sequence[Place]) -> None:
        """Begin to put blocks down."""

    def read(self, job: int, places: Sequence[Place]) -> None:
        """Begin to fetch blocks."""

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget blocks, after what was begun before."""

    def finished(self) -> list[Done]:
        """The jobs that have ended since the last call."""

    def close(self) -> None:
        """End, when what was begun has ended."""


@dataclass
class _Ended:
    lock: threading.Lock = field(default_factory=threading.Lock)
    jobs: list[Done] = field(default_factory=list)


class ThreadedDisk:
    """Files of a folder, by threads: one writes and removes, in order; a few read.

    Args:
        folder: where they lie. rows: host memory, a row a slot.
    """

    def __init__(self, folder: TierFolder, rows: memoryview) -> None:
        assert rows.shape is not None
        self._folder, self._row_bytes = folder, rows.shape[1]
        # A memoryview of two dimensions cannot be cut to a row.
        self._bytes = rows.cast("B")
        self._writer = ThreadPoolExecutor(1, "kv-tier-write")
        self._readers = ThreadPoolExecutor(_READERS, "kv-tier-read")
        self._ended = _Ended()

    def write(self, job: int, places: Sequence[Place]) -> None:
        """See `DiskIO`."""
        self._writer.submit(self._note, job, self._write, tuple(places))

    def read(self, job: int, places: Sequence[Place]) -> None:
        """See `DiskIO`."""
        self._readers.submit(self._note, job, self._read, tuple(places))

    def drop(self, keys: Sequence[bytes]) -> None:
        """See `DiskIO`."""
        self._writer.submit(self._drop, tuple(keys))

    def finished(self) -> list[Done]:
        """See `DiskIO`."""
        with self._ended.lock:
            jobs, self._ended.jobs = self._ended.jobs, []
        return jobs

    def close(self) -> None:
        """See `DiskIO`."""
        self._writer.shutdown()
        self._readers.shutdown()
        self._folder.close()
        self._bytes.release()

    def _note(self, job: int, work: Callable[[tuple[Place, ...]], Done], places: tuple[Place, ...]) -> None:
        # Real time: how fast the disk is, not when anything happens.
        began = time.perf_counter()
        try:
            done = work(places)
        except Exception:
            # Whatever it was, the blocks are not there, and nobody may wait for them for ever.
            done = Done(job, (), refused=tuple(key for key, _ in places))
        done = Done(job, done.moved, done.bad, done.refused, time.perf_counter() - began)
        with self._ended.lock:
            self._ended.jobs.append(done)

    def _drop(self, keys: tuple[bytes, ...]) -> None:
        for key in keys:
            self._folder.drop(key)

    def _write(self, places: tuple[Place, ...]) -> Done:
        moved: list[bytes] = []
        refused: list[bytes] = []
        for key, slot in places:
            try:
                self._folder.write(key, self._row(slot))
                moved.append(key)
            except OSError:
                refused.append(key)
        return Done(0, tuple(moved), refused=tuple(refused))

    def _read(self, places: tuple[Place, ...]) -> Done:
        moved: list[bytes] = []
        bad: list[bytes] = []
        for key, slot in places:
            try:
                self._folder.read(key, self._row(slot))
                moved.append(key)
            except BadBlock:
                bad.append(key)
        return Done(0, tuple(moved), bad=tuple(bad))

    def _row(self, slot: int) -> memoryview:
        return self._bytes[slot * self._row_bytes : (slot + 1) * self._row_bytes]


DiskMaker = Callable[[int], DiskIO]
_simulated: DiskMaker | None = None


def simulated() -> DiskMaker | None:
    """Where a disk is played instead of used: makes one, given the bytes of a block."""
    return _simulated


@contextmanager
def play(maker: DiskMaker | None) -> Iterator[None]:
    """Engines that are built meanwhile have no host memory for blocks and no disk: both are played."""
    global _simulated
    before, _simulated = _simulated, maker
    try:
        yield
    finally:
        _simulated = before
