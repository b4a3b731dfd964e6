"""Small workloads for engine tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workloads.request import Phase, PlannedRequest, Tenant, Workload

NS = 1_000_000_000
SHORT = Tenant("gold-a", "gold", "chat", 4, 0, 200.0, True)
LONG = Tenant("bronze-0", "bronze", "rag", 1, 2, 3000.0, False)


def request(
    index: int,
    at_s: float,
    *,
    prompt: int = 64,
    output: int = 8,
    tenant: Tenant = SHORT,
    cancel_s: float | None = None,
    shared: int = 0,
) -> PlannedRequest:
    """One request; its first `shared` prompt tokens are the same for all."""
    rng = np.random.default_rng(index)
    own = rng.integers(10_000, 20_000, prompt - shared)
    tokens = np.concatenate([np.arange(shared), own]).astype(np.int32)
    return PlannedRequest(
        index=index,
        request_id=f"r{index:03d}",
        tenant=tenant.name,
        phase=1,
        intended_ns=round(at_s * NS),
        prompt=tokens,
        output=rng.integers(0, 1000, output).astype(np.int32),
        segments=(),
        cancel_ns=None if cancel_s is None else round(cancel_s * NS),
    )


def workload(requests: Sequence[PlannedRequest], end_s: float = 60.0) -> Workload:
    """A workload of one phase."""
    return Workload(
        name="toy",
        seed=0,
        tenants=(SHORT, LONG),
        phases=(Phase(1, "only", 0, round(end_s * NS), True),),
        requests=tuple(sorted(requests, key=lambda r: r.intended_ns)),
        sha256="",
        corpus_sha256="",
    )


class ConstantStep:
    """A step takes a fixed time and 0.1 ms for each prefill token."""

    def __init__(self, base_us: float = 20_000.0, prefill_us: float = 100.0) -> None:
        self.base_us, self.prefill_us = base_us, prefill_us

    def step_us(
        self, prefills: list[tuple[int, int]], n_decode: int, sum_ctx_decode: int, n_sampled: int
    ) -> float:
        """Microseconds of the step."""
        return self.base_us + self.prefill_us * sum(new for new, _ in prefills)
