"""What a workload asks of a server: counts, tokens and rates by tenant and phase.

Also how much of it could come from a prefix cache: the share of prompt tokens that a cache without
limits would hold, when every request ends before the next begins. No real cache exceeds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from workloads.request import PlannedRequest, Workload

BLOCK_TOKENS = 16
NS_PER_S = 1_000_000_000
_HASH_SEED = 16


@dataclass(frozen=True, slots=True)
class LoadRow:
    """One tenant in one phase.

    Attributes:
        phase: number of the phase; 0 for all together.
        seconds: length of the phase.
        cancelled: requests that their client gives up when it sends the next one.
        shared_tokens: prompt tokens that a cache without limits would hold.
    """

    phase: int
    tenant: str
    tier: str
    measured: bool
    seconds: float
    requests: int
    cancelled: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int

    @property
    def rate_rps(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds

    @property
    def hit_rate_bound(self) -> float | None:
        """Shared prompt tokens / prompt tokens; None without a prompt."""
        return self.shared_tokens / self.prompt_tokens if self.prompt_tokens else None

    def as_json(self) -> dict[str, Any]:
        """The row with its ratios, rounded, for `--json`."""
        mean = max(1, self.requests)
        bound = self.hit_rate_bound
        return asdict(self) | {
            "rate_rps": round(self.rate_rps, 4),
            "cancelled_share": round(self.cancelled / mean, 4),
            "prompt_tokens_mean": round(self.prompt_tokens / mean, 1),
            "output_tokens_mean": round(self.output_tokens / mean, 1),
            "unique_tokens": self.prompt_tokens - self.shared_tokens,
            "hit_rate_bound": None if bound is None else round(bound, 4),
        }


def describe(workload: Workload) -> tuple[LoadRow, ...]:
    """One row for every tenant in every phase, phase by phase, tenants in the workload's order."""
    shared = _shared_tokens(workload.requests)
    groups: dict[tuple[int, str], list[PlannedRequest]] = {}
    for request in workload.requests:
        groups.setdefault((request.phase, request.tenant), []).append(request)
    rows = []
    for phase in workload.phases:
        for tenant in workload.tenants:
            requests = groups.get((phase.number, tenant.name), [])
            rows.append(
                LoadRow(
                    phase=phase.number,
                    tenant=tenant.name,
                    tier=tenant.tier,
                    measured=phase.measured,
                    seconds=(phase.end_ns - phase.start_ns) / NS_PER_S,
                    requests=len(requests),
                    cancelled=sum(request.cancel_ns is not None for request in requests),
                    prompt_tokens=sum(len(request.prompt) for request in requests),
                    output_tokens=sum(len(request.output) for request in requests),
                    shared_tokens=sum(shared[request.index] for request in requests),
                )
            )
    return tuple(rows)


def total(rows: Sequence[LoadRow]) -> LoadRow:
    """All rows as one; its seconds are those of the whole run, replayed phases included."""
    return LoadRow(
        phase=0,
        tenant="all",
        tier="all",
        measured=all(row.measured for row in rows),
        seconds=sum({row.phase: row.seconds for row in rows}.values()),
        requests=sum(row.requests for row in rows),
        cancelled=sum(row.cancelled for row in rows),
        prompt_tokens=sum(row.prompt_tokens for row in rows),
        output_tokens=sum(row.output_tokens for row in rows),
        shared_tokens=sum(row.shared_tokens for row in rows),
    )


def _shared_tokens(requests: tuple[PlannedRequest, ...]) -> list[int]:
    """Prompt tokens of each request in leading blocks that an earlier prompt or output began with."""
    longest = max((len(request.prompt) + len(request.output) for request in requests), default=0)
    weights = np.random.Generator(np.random.PCG64(_HASH_SEED)).integers(
        1, 2**63, size=longest, dtype=np.uint64
    )
    seen: set[int] = set()
    shared = []
    for request in requests:
        keys = _prefix_keys(np.concatenate([request.prompt, request.output]), weights)
        # As in vLLM, the last prompt token is computed even when everything is cached.
        usable = keys[: (len(request.prompt) - 1) // BLOCK_TOKENS]
        # A known prefix has only known prefixes, so counting them is finding the longest.
        shared.append(BLOCK_TOKENS * sum(key in seen for key in usable))
        seen.update(keys)
    return shared


def _prefix_keys(ids: npt.NDArray[np.int32], weights: npt.NDArray[np.uint64]) -> list[int]:
    """A 64-bit key for each prefix of whole blocks: the tokens' sum, weighted by position, modulo 2**64."""
    sums = np.cumsum((ids.astype(np.uint64) + np.uint64(1)) * weights[: len(ids)])
    keys: list[int] = sums[BLOCK_TOKENS - 1 :: BLOCK_TOKENS].tolist()
    return keys
