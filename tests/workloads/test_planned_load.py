"""Counts and the bound of the hit rate, against a plain count of prefixes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from workloads.planned_load import BLOCK_TOKENS, describe, total
from workloads.request import Phase, PlannedRequest, Segment, Tenant, Workload


def _request(index: int, prompt: list[int], output: list[int]) -> PlannedRequest:
    return PlannedRequest(
        index=index,
        request_id=str(index),
        tenant="a",
        phase=1,
        intended_ns=index,
        prompt=np.array(prompt, dtype=np.int32),
        output=np.array(output, dtype=np.int32),
        segments=(Segment("all", str(index), len(prompt)),),
    )


def _workload(*requests: PlannedRequest) -> Workload:
    tenant = Tenant("a", "gold", "chat", 1, 0, 100.0, True)
    phase = Phase(1, "only", 0, 2_000_000_000, True)
    return Workload("hand-made", 0, (tenant,), (phase,), requests, "", "")


def test_what_is_shared() -> None:
    base = list(range(40))
    row = describe(
        _workload(
            _request(0, base, [7] * 8),  # nothing is known yet
            _request(1, base, [1]),  # two whole blocks
            _request(2, [*base, *[7] * 8, 9], [1]),  # the first one's answer too: three blocks
            _request(3, base[:32], [1]),  # all is known, but the last token is computed again: one block
            _request(4, [99, *base[1:]], [1]),  # differs at the front: nothing
        )
    )[0]
    assert row.shared_tokens == (0 + 2 + 3 + 1 + 0) * BLOCK_TOKENS
    assert (row.requests, row.prompt_tokens, row.output_tokens) == (5, 40 + 40 + 49 + 32 + 40, 12)
    assert row.rate_rps == 2.5
    assert row.as_json()["unique_tokens"] == row.prompt_tokens - row.shared_tokens


def test_against_a_plain_count(thin: Workload) -> None:
    seen: set[bytes] = set()
    expected = 0
    for request in thin.requests:
        text = np.concatenate([request.prompt, request.output])
        chain = hashlib.sha256()
        prefixes = []
        for end in range(BLOCK_TOKENS, len(text) + 1, BLOCK_TOKENS):
            chain.update(text[end - BLOCK_TOKENS : end].tobytes())
            prefixes.append(chain.digest())
        usable = prefixes[: (len(request.prompt) - 1) // BLOCK_TOKENS]
        expected += BLOCK_TOKENS * next((i for i, p in enumerate(usable) if p not in seen), len(usable))
        seen.update(prefixes)
    assert total(describe(thin)).shared_tokens == expected


def test_rows_cover_every_tenant_and_phase(thin: Workload) -> None:
    rows = describe(thin)
    assert [(row.phase, row.tenant) for row in rows] == [
        (phase.number, tenant.name) for phase in thin.phases for tenant in thin.tenants
    ]
    whole = total(rows)
    assert whole.requests == len(thin.requests) == sum(row.requests for row in rows)
    assert whole.seconds == 300
    assert whole.rate_rps == pytest.approx(len(thin.requests) / 300)
