"""Requests of our own (`patches.seam.injected`): how to tell one, and what a patch asks for. Imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Ids of requests of our own begin with this; a client's are made by the API server and do not.
OWN_ID = "patchbench-own-"

#: Whose they are, to whoever groups requests by tenant.
OWN_TENANT = "(own)"


def is_own_id(request_id: str) -> bool:
    """Whether a request of that id is one that a patch put in, and no client's."""
    return request_id.startswith(OWN_ID)


@dataclass(frozen=True, slots=True)
class Share:
    """How much of a step one of ours may take.

    Attributes:
        idle_tokens: prefill tokens of a step in which nothing else runs.
        beside_tokens: prefill tokens beside decodes; 0 keeps out of their steps. Rounded down to whole blocks.
        in_flight: how many may be in steps that are not over yet; 2 keep up with asynchronous scheduling, where a step is
            scheduled before the last one is over. A request that comes waits for as many of ours.
        evict: whether blocks with something cached may be reused for it.
        beside_longest: whether it keeps out unless the longest prompt that the model takes would find its blocks beside it.
            Without, a request that comes may have to wait for ours to give back theirs: for its step, and no longer.
    """

    idle_tokens: int = 128
    beside_tokens: int = 0
    evict: bool = False
    in_flight: int = 1
    beside_longest: bool = True


@dataclass(slots=True, eq=False)
class OwnPrefix:
    """A prefix that a patch wants to have in the cache.

    Attributes:
        computing: called with the hashes (the group's id behind them, as in the pool) of blocks that ours will fill.
        block_hashes: of its full blocks, once somebody asked (`Injector.hashes`).
        computed: tokens computed for it. failures: passes in a row that did not take its request.
    """

    patch: str
    name: str
    tokens: list[int]
    cache_salt: str | None
    share: Share
    computing: Callable[[list[bytes]], None] | None = None
    block_hashes: list[Any] | None = None
    computed: int = 0
    failures: int = 0
