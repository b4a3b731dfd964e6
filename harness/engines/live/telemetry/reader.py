"""Reads a tape back, up to its last whole record."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.engines.live.telemetry import layout
from harness.errors import RunFailed


@dataclass(slots=True)
class ReadRequest:
    """One request as the engine saw it; times in ns of CLOCK_MONOTONIC, None where it did not happen."""

    engine_id: str
    received_ns: int | None
    queued_ns: int
    prompt_tokens: int
    scheduled_ns: int | None = None
    cached_tokens: int | None = None
    first_token_ns: int | None = None
    end_ns: int | None = None
    output_tokens: int = 0
    finish_reason: str | None = None
    preemptions: int = 0
    recomputed_tokens: int = 0
    lost_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Tape:
    """What one Scheduler wrote.

    Attributes:
        header: what it said about itself.
        steps: one tuple a step, in the order of `layout.STEP_INTS`, then kv_usage and the prefill chunks.
        requests: in the order of their arrival.
        events: (t_ns, kind, number of the request in `requests` or None, value), in order.
    """

    header: dict[str, Any]
    steps: list[tuple[Any, ...]] = field(default_factory=list)
    requests: list[ReadRequest] = field(default_factory=list)
    events: list[tuple[int, str, int | None, float]] = field(default_factory=list)


def read_tape(path: Path) -> Tape:
    """All whole records of a tape; RunFailed where it is none, or where its records make no sense."""
    blob = path.read_bytes()
    try:
        magic, end, length = layout.HEADER.unpack_from(blob, 0)
        if magic != layout.MAGIC or end > len(blob):
            raise ValueError("not a tape, or cut off")
        start = layout.HEADER.size + length
        tape = Tape(json.loads(blob[layout.HEADER.size : start]))
        for kind, at, stop in _records(blob, start, end):
            _READ[kind](tape, blob, at, stop)
    except (ValueError, KeyError, IndexError, struct.error) as error:
        raise RunFailed(f"{path} cannot be read as telemetry ({error}); run the arm again") from error
    return tape


def _records(blob: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    while at < end:
        kind, length = layout.PREFIX.unpack_from(blob, at)
        if length < layout.PREFIX.size or at + length > end:
            raise ValueError(f"a record of {length} bytes at byte {at}")
        yield kind, at, at + length
        at += length


def _step(tape: Tape, blob: bytes, at: int, stop: int) -> None:
    _, _, *values, count = layout.STEP_BODY.unpack_from(blob, at)
    first = at + layout.STEP_BODY.size
    if first + count * layout.CHUNK.size != stop:
        raise ValueError(f"{count} chunks in the step at byte {at}")
    tape.steps.append((*values, list(layout.CHUNK.iter_unpack(blob[first:stop]))))


def _arrive(tape: Tape, blob: bytes, at: int, stop: int) -> None:
    _, _, row, t_ns, received_ns, prompt_tokens = layout.ARRIVE_BODY.unpack_from(blob, at)
    if row != len(tape.requests):
        raise ValueError(f"request {row} after request {len(tape.requests) - 1}")
    text = blob[at + layout.ARRIVE_BODY.size : stop].decode()
    received = None if received_ns < 0 else received_ns
    tape.requests.append(ReadRequest(text, received, t_ns, prompt_tokens))


def _admit(tape: Tape, blob: bytes, at: int, stop: int) -> None:
    _, _, row, t_ns, cached = layout.ADMIT_BODY.unpack_from(blob, at)
    tape.requests[row].scheduled_ns, tape.requests[row].cached_tokens = t_ns, cached


def _first(tape: Tape, blob: bytes, at: int, stop: int) -> None:
    _, _, row, t_ns = layout.FIRST_BODY.unpack_from(blob, at)
    tape.requests[row].first_token_ns = t_ns


def _finish(tape: Tape, blob: bytes, at: int, stop: int) -> None:
    _, _, row, t_ns, tokens = layout.FINISH_BODY.unpack_from(blob, at)
    request = tape.requests[row]
    request.end_ns, request.output_tokens = t_ns, tokens
    request.finish_reason = blob[at + layout.FINISH_BODY.size : stop].decode()


def _event(tape: Tape, blob: bytes, at: int, stop: int) -> None:
    _, _, row, t_ns, value = layout.EVENT_BODY.unpack_from(blob, at)
    kind = blob[at + layout.EVENT_BODY.size : stop].decode()
    tape.events.append((t_ns, kind, None if row == layout.NO_REQUEST else row, value))
    if kind == "preempt":
        request = tape.requests[row]
        request.preemptions += 1
        request.lost_tokens = int(value)
    elif kind == "resume":
        request = tape.requests[row]
        request.recomputed_tokens += max(0, request.lost_tokens - int(value))
        request.lost_tokens = 0


_READ = {
    layout.STEP: _step,
    layout.ARRIVE: _arrive,
    layout.ADMIT: _admit,
    layout.FIRST: _first,
    layout.FINISH: _finish,
    layout.EVENT: _event,
}
