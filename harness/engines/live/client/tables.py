"""The client's share of a run's records: the tables `requests` and `tokens` of `harness.schema`.

What only the engine knows (when a request was first scheduled, its preemptions) is left empty, to be filled in from
the engine's telemetry.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np
import pyarrow as pa

from harness.engines.live.client.report import ClientReport
from harness.planned_columns import planned_columns
from harness.schema import arrow_schema
from workloads.request import Workload


def request_table(workload: Workload, report: ClientReport) -> pa.Table:
    """One row a request, in the workload's order; `scheduled_ns` is null, the counts of preemptions are 0."""
    tenants = {tenant.name: tenant for tenant in workload.tenants}
    measured = {phase.number: phase.measured for phase in workload.phases}
    rows: list[dict[str, Any]] = []
    for planned, seen in zip(workload.requests, report.requests, strict=True):
        rows.append(
            {
                **planned_columns(planned, tenants[planned.tenant], measured[planned.phase]),
                "sent_ns": seen.sent_ns,
                "scheduled_ns": None,
                "first_token_ns": seen.first_token_ns,
                "first_output_ns": seen.first_output_token_ns,
                "last_token_ns": seen.last_token_ns,
                "end_ns": seen.end_ns,
                "first_chunk_tokens": int(seen.chunk_tokens[0]) if len(seen.chunk_tokens) else 0,
                "prompt_tokens_counted": seen.prompt_tokens_counted,
                "cached_tokens": seen.cached_tokens,
                "output_tokens": seen.output_tokens,
                "preemptions": 0,
                "recomputed_tokens": 0,
                "status": seen.status,
                "reason": seen.reason,
                "retry_after_s": _whole_seconds(seen.retry_after_s),
            }
        )
    return pa.Table.from_pylist(rows, schema=arrow_schema("requests"))


def _whole_seconds(said_s: float | None) -> int | None:
    """What a server said, rounded up; as long as the column can hold where it said more."""
    return None if said_s is None else ceil(min(said_s, 2**31 - 1))


def token_table(report: ClientReport) -> pa.Table:
    """One row a token, by request and index; tokens of one chunk share its time."""
    none = np.zeros(0, np.int64)
    counts = [seen.output_tokens for seen in report.requests]
    columns = {
        "request": np.repeat(np.arange(len(counts)), counts),
        "index": np.concatenate([none, *(np.arange(count) for count in counts)]),
        "t_ns": np.concatenate([none, *(np.repeat(s.chunk_ns, s.chunk_tokens) for s in report.requests)]),
    }
    schema = arrow_schema("tokens")
    return pa.table(
        {field.name: pa.array(columns[field.name], field.type) for field in schema}, schema=schema
    )
