"""A few requests by hand, as a workload."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from workloads.request import Phase, PlannedRequest, Segment, Tenant, Workload

MS = 1_000_000
TENANT = Tenant("gold-a", "gold", "chat", 4, -1, 1000.0, True)


def workload(*requests: PlannedRequest) -> Workload:
    """The requests, sorted and numbered, in one measured phase."""
    ordered = sorted(requests, key=lambda r: r.intended_ns)
    numbered = [
        PlannedRequest(
            i,
            r.request_id,
            r.tenant,
            1,
            r.intended_ns,
            r.prompt,
            r.output,
            r.segments,
            r.cancel_ns,
            r.session,
        )
        for i, r in enumerate(ordered)
    ]
    end_ns = max((r.intended_ns for r in numbered), default=0) + 1_000 * MS
    phases = (Phase(1, "steady", 0, end_ns, True),)
    return Workload("by-hand", 1, (TENANT,), phases, tuple(numbered), "", "")


def ask(
    name: str,
    at_ms: float = 0.0,
    tokens: int = 3,
    prompt: int = 20,
    cancel_ms: float | None = None,
    session: str = "",
) -> PlannedRequest:
    """One request."""
    return PlannedRequest(
        index=0,
        request_id=name,
        tenant=TENANT.name,
        phase=1,
        intended_ns=round(at_ms * MS),
        prompt=np.arange(prompt, dtype=np.int32),
        output=np.arange(tokens, dtype=np.int32),
        segments=(Segment("own", name, prompt),),
        cancel_ns=None if cancel_ms is None else round(cancel_ms * MS),
        session=session,
    )


def many(count: int, every_ms: float, **values: Any) -> Sequence[PlannedRequest]:
    """Requests at a constant rate."""
    return [ask(f"r{i}", i * every_ms, **values) for i in range(count)]


def soon_ns(lead_s: float) -> int:
    """A start for a client in this process, on CLOCK_MONOTONIC.

    A client collects garbage before it drives. After a thousand tests that takes longer than any lead, so what
    they left is collected and set aside here.
    """
    gc.collect()
    gc.freeze()
    return time.monotonic_ns() + round(lead_s * 1e9)
