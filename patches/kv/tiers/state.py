"""What the scheduler's side of the tiers remembers: of a request, of blocks to be saved, and of all that happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Counts:
    """What happened since the start, in bytes, tokens and blocks."""

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
    reserved: tuple[bytes, ...] = ()
    memo: tuple[int, int, int, int] | None = None
    found: int = 0


@dataclass(frozen=True, slots=True)
class Freed:
    """Blocks of a request that ended, head first, to be saved when they are about to leave the GPU."""

    due: int
    blocks: tuple[tuple[Any, Any, bytes], ...]
    low: bool
