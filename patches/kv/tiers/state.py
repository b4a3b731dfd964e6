"""What the scheduler's side of the tiers remembers: of a request, of blocks to be saved, and of all that happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Counts:
    """What happened since the start, in bytes, tokens and blocks.

    `next_step_loads`: loads that were put off to a later step. `dear_loads`: hits of a request on its way into the GPU
    that were too dear to load. Each counts once, however often it was looked at.
    """

    saved_blocks: int = 0
    d2h_bytes: int = 0
    h2d_bytes: int = 0
    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    asked_tokens: int = 0
    loads: int = 0
    loads_within_step: int = 0
    next_step_loads: int = 0
    dear_loads: int = 0
    late_saves: int = 0
    flushed_saves: int = 0
    patience_ended: int = 0


@dataclass(slots=True, eq=False)
class State:
    """What is remembered of a request while it lives."""

    request: Any
    tenant: bytes
    low: bool
    keys: list[bytes] = field(default_factory=list)
    local_tokens: int = 0
    sync: bool = False
    admitted: bool = False
    waits_since_s: float | None = None
    patience_over: bool = False
    put_off: bool = False
    put_off_since_s: float | None = None
    dear: bool = False
    reserved: tuple[bytes, ...] = ()
    memo: tuple[int, int, int, int] | None = None
    found: int = 0

    def look_afresh(self) -> None:
        """It has blocks, or lost them: what it waited for before says nothing of the next time."""
        self.waits_since_s = self.put_off_since_s = None
        self.patience_over = self.put_off = self.dear = False


@dataclass(frozen=True, slots=True)
class Freed:
    """Blocks of a request that ended, head first, to be saved once so many others were handed out: by default at once."""

    due: int
    blocks: tuple[tuple[Any, Any, bytes], ...]
    low: bool
