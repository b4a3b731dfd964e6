"""Transfers between the GPU and the host tier: what was begun, what must end before a block may be overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Move:
    """Blocks to be copied: (GPU block, slot) each.

    `request_id` is whom a load is for, "" for a save; `beside` says that the load is made beside steps.
    """

    keys: tuple[bytes, ...]
    gpu_blocks: tuple[int, ...]
    slots: tuple[int, ...]
    request_id: str = ""
    beside: bool = False

    @property
    def is_load(self) -> bool:
        """From host to GPU."""
        return bool(self.request_id)


class Moves:
    """What is handed to the worker with the next step, and what it has not reported yet."""

    def __init__(self) -> None:
        self._next = 0
        self.under_way: dict[int, Move] = {}
        self.saves: dict[int, Move] = {}
        self.loads: dict[int, Move] = {}
        self.sync_loads: dict[int, Move] = {}
        self.flush: set[int] = set()
        # GPU block -> saves that still read it.
        self._read_by: dict[int, set[int]] = {}

    def save(self, move: Move) -> int:
        """Copy to the host, beside steps; until it is done its GPU blocks are watched."""
        job = self._number(move)
        self.saves[job] = move
        for block in move.gpu_blocks:
            self._read_by.setdefault(block, set()).add(job)
        return job

    def load(self, move: Move) -> int:
        """Copy to the GPU: before this step's forward pass, or beside steps."""
        job = self._number(move)
        (self.loads if move.beside else self.sync_loads)[job] = move
        return job

    @property
    def reads(self) -> bool:
        """Whether saves read GPU blocks."""
        return bool(self._read_by)

    def overwritten(self, blocks: Iterable[int]) -> None:
        """GPU blocks are about to get other content: saves that read them must end before the step."""
        if self._read_by:
            for block in blocks:
                self.flush.update(self._read_by.get(block, ()))

    def take(self) -> tuple[dict[int, Move], dict[int, Move], dict[int, Move], set[int]]:
        """(saves, loads, loads before the pass, what to flush) of this step."""
        taken = self.saves, self.loads, self.sync_loads, self.flush
        self.saves, self.loads, self.sync_loads, self.flush = {}, {}, {}, set()
        return taken

    def done(self, jobs: Iterable[int]) -> list[tuple[int, Move]]:
        """These are done, as the worker reports; unknown ones are passed over."""
        ended = []
        for job in jobs:
            move = self.under_way.pop(job, None)
            if move is None:
                continue
            if not move.is_load:
                self._unwatch(job, move.gpu_blocks)
            ended.append((job, move))
        return ended

    def _number(self, move: Move) -> int:
        job, self._next = self._next, self._next + 1
        self.under_way[job] = move
        return job

    def _unwatch(self, job: int, gpu_blocks: Sequence[int]) -> None:
        for block in gpu_blocks:
            jobs = self._read_by[block]
            jobs.discard(job)
            if not jobs:
                del self._read_by[block]
