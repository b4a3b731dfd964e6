"""The record tables of a live run: what the client saw, with what only the engine knows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from harness.engines.live.client.report import ClientReport
from harness.engines.live.client.tables import request_table, token_table
from harness.engines.live.telemetry.collect import Telemetry
from harness.engines.live.telemetry.join import Joined, join
from harness.engines.live.telemetry.tables import events_from
from workloads.request import Workload

# Beyond any run: 292 years.
_FOREVER_NS = 1 << 62
# Columns of `requests` that the engine's telemetry fills, whatever the client says of them.
_ENGINES = ("scheduled_ns", "cached_tokens", "preemptions", "recomputed_tokens")
_EVENT_OF = {"rejected": "reject", "cancelled": "cancel", "expired": "expire", "failed": "fail"}


def since_start(telemetry: Telemetry) -> Telemetry:
    """Without the warm-up."""
    return telemetry.window(0, _FOREVER_NS)


def record_tables(
    workload: Workload, report: ClientReport, telemetry: Telemetry
) -> tuple[dict[str, pa.Table], Joined]:
    """All tables of a record, and how the engine's requests were joined to the client's.

    Args:
        telemetry: from the run's start on.
    """
    joined = join(telemetry, [request.request_id for request in workload.requests])
    requests = _requests(request_table(workload, report), joined.requests)
    return {
        "requests": requests,
        "tokens": token_table(report),
        "steps": telemetry.steps,
        "events": _events(requests, joined.events),
    }, joined


def _requests(client: pa.Table, engine: pa.Table) -> pa.Table:
    columns: dict[str, Any] = {name: client[name] for name in client.column_names}
    for name in _ENGINES:
        column = engine[name]
        if not client.schema.field(name).nullable:
            column = column.fill_null(0)
        columns[name] = column.cast(client.schema.field(name).type)
    # A stream that was closed early never told it.
    counted = client["prompt_tokens_counted"].to_pylist()
    known = engine["prompt_tokens_counted"].to_pylist()
    columns["prompt_tokens_counted"] = pa.array(
        [theirs if ours is None else ours for ours, theirs in zip(counted, known, strict=True)],
        client.schema.field("prompt_tokens_counted").type,
    )
    return pa.table(columns, schema=client.schema)


def _events(requests: pa.Table, engine: pa.Table) -> pa.Table:
    """The engine's events and how requests ended that were not served, by time."""
    rows = [tuple(event.values()) for event in engine.to_pylist()]
    ends = zip(
        requests["end_ns"].to_pylist(),
        requests["status"].to_pylist(),
        requests["reason"].to_pylist(),
        strict=True,
    )
    rows += [
        (end_ns, _EVENT_OF[status], row, None, reason)
        for row, (end_ns, status, reason) in enumerate(ends)
        if status in _EVENT_OF and end_ns is not None
    ]
    rows.sort(key=lambda event: event[0])
    return events_from(rows)
