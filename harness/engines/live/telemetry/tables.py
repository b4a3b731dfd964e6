"""The tables that tapes become."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from harness.engines.live.telemetry.layout import STEP_INTS
from harness.engines.live.telemetry.reader import Tape
from harness.schema import arrow_schema

_i64, _i32, _f64, _str = pa.int64(), pa.int32(), pa.float64(), pa.string()


def _field(name: str, kind: pa.DataType, unit: str, meaning: str, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable, {"unit": unit, "meaning": meaning})


#: What a step cost the engine's own thread, and what a step-time model needs to know of its batch: a row a step.
BATCHES = pa.schema(
    [
        _field("engine", _i32, "", "number of the engine among those of the run"),
        _field("step_us", _f64, "us", "end_ns less start_ns of the step"),
        _field("schedule_us", _f64, "us", "time in schedule(), patches included"),
        _field("update_us", _f64, "us", "time in update_from_output(), patches included"),
        _field("telemetry_us", _f64, "us", "time to note this step and to write the one before"),
        _field(
            "context_tokens", _i64, "tokens", "contexts of the decodes, their new tokens included, summed"
        ),
        _field(
            "hit_tokens", _i64, "tokens", "found in the prefix cache by requests first admitted in this step"
        ),
        _field("chunk_tokens", pa.list_(_i32), "tokens", "new tokens of each prefill chunk"),
        _field("chunk_before", pa.list_(_i32), "tokens", "tokens in the KV cache before each chunk"),
    ]
)
#: A row a request, in the order in which they came to the scheduler; times from the run's start.
ENGINE_REQUESTS = pa.schema(
    [
        _field("engine", _i32, "", "number of the engine among those of the run"),
        _field("engine_id", _str, "", "the engine's own id of the request"),
        _field("received_ns", _i64, "ns", "when the engine's process received it", True),
        _field("queued_ns", _i64, "ns", "when the scheduler got it"),
        _field("scheduled_ns", _i64, "ns", "when it was first given tokens", True),
        _field("first_token_ns", _i64, "ns", "when its first token was there, in the engine", True),
        _field("end_ns", _i64, "ns", "when the scheduler let go of it", True),
        _field("prompt_tokens_counted", _i32, "tokens", "length of the prompt"),
        _field("cached_tokens", _i32, "tokens", "found in the prefix cache at first admission", True),
        _field("output_tokens", _i32, "tokens", "tokens generated; 0 until it has ended"),
        _field("preemptions", _i32, "count", "times it was preempted"),
        _field("recomputed_tokens", _i32, "tokens", "tokens computed again after preemptions"),
        _field(
            "finish_reason", _str, "", "length, stop, abort, error or repetition; null: never ended", True
        ),
    ]
)
# Where each column of `steps` and of `BATCHES` lies in a step of a tape; durations there are ns.
_AT = {name: index for index, name in enumerate((*STEP_INTS, "kv_usage", "chunks"))}
_TIMES = ("t_ns", "start_ns", "end_ns")


def step_tables(tapes: Sequence[Tape], zeros_ns: Sequence[int]) -> tuple[pa.Table, pa.Table]:
    """The tables `steps` and `BATCHES` of all tapes, in the order of scheduling."""
    rows = [(number, step) for number, tape in enumerate(tapes) for step in tape.steps]
    rows.sort(key=lambda row: row[1][0])
    zero = np.array([zeros_ns[number] for number, _ in rows], dtype=np.int64)

    def column(name: str) -> Any:
        at = _AT[name]
        kind = np.float64 if name == "kv_usage" else np.int64
        values = np.array([step[at] for _, step in rows], dtype=kind)
        return values - zero if name in _TIMES else values

    schema = arrow_schema("steps")
    steps = pa.Table.from_arrays([pa.array(column(f.name)).cast(f.type) for f in schema], schema=schema)
    chunks = [step[_AT["chunks"]] for _, step in rows]
    batches = pa.table(
        {
            "engine": [number for number, _ in rows],
            "step_us": (column("end_ns") - column("start_ns")) / 1000,
            "schedule_us": column("schedule_ns") / 1000,
            "update_us": column("update_ns") / 1000,
            "telemetry_us": column("telemetry_ns") / 1000,
            "context_tokens": column("context_tokens"),
            "hit_tokens": column("hit_tokens"),
            "chunk_tokens": [[new for new, _ in pairs] for pairs in chunks],
            "chunk_before": [[before for _, before in pairs] for pairs in chunks],
        },
        schema=BATCHES,
    )
    return steps, batches


def request_table(tapes: Sequence[Tape], zeros_ns: Sequence[int]) -> pa.Table:
    """The table `ENGINE_REQUESTS` of all tapes, one after the other."""
    rows = [
        {
            "engine": number,
            "engine_id": request.engine_id,
            "received_ns": _since(request.received_ns, zero),
            "queued_ns": request.queued_ns - zero,
            "scheduled_ns": _since(request.scheduled_ns, zero),
            "first_token_ns": _since(request.first_token_ns, zero),
            "end_ns": _since(request.end_ns, zero),
            "prompt_tokens_counted": request.prompt_tokens,
            "cached_tokens": request.cached_tokens,
            "output_tokens": request.output_tokens,
            "preemptions": request.preemptions,
            "recomputed_tokens": request.recomputed_tokens,
            "finish_reason": request.finish_reason,
        }
        for number, (tape, zero) in enumerate(zip(tapes, zeros_ns, strict=True))
        for request in tape.requests
    ]
    return pa.Table.from_pylist(rows, schema=ENGINE_REQUESTS)


def event_table(tapes: Sequence[Tape], zeros_ns: Sequence[int]) -> pa.Table:
    """The table `events` of all tapes by time; `request` is a row of `request_table`."""
    events: list[tuple[int, str, int | None, float | None, str]] = []
    before = 0
    for tape, zero in zip(tapes, zeros_ns, strict=True):
        events += [
            (t_ns - zero, kind, None if row is None else row + before, value, "")
            for t_ns, kind, row, value in tape.events
        ]
        before += len(tape.requests)
    events.sort(key=lambda event: event[0])
    return events_from(events)


def events_from(events: Iterable[tuple[int, str, int | None, float | None, str]]) -> pa.Table:
    """Rows as a table `events`."""
    names = arrow_schema("events").names
    rows = [dict(zip(names, event, strict=True)) for event in events]
    return pa.Table.from_pylist(rows, schema=arrow_schema("events"))


def _since(t_ns: int | None, zero_ns: int) -> int | None:
    return None if t_ns is None else t_ns - zero_ns
