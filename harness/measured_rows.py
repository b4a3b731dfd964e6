"""The rows of a measured run: parsing them, and finding what was sent for each that was timed."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from harness.errors import UserError
from harness.refusals import refuse_row
from workloads.request import TokenIds

_INDEX = re.compile(r"(\d+)$")
# Token ids that stand for an output or a prompt whose content was not recorded.
_FILLER_TOKEN = 100
_MOST_TOKENS = 10_000_000


class _Row(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="ignore", allow_inf_nan=False, coerce_numbers_to_str=True, populate_by_name=True
    )

    request_id: str | None = None
    input_toks: int | None = Field(default=None, gt=0, le=_MOST_TOKENS)
    output_toks: int | None = Field(default=None, ge=0, le=_MOST_TOKENS)


class Timed(_Row):
    """One row of requests.jsonl. Times are s; the engine's share one monotonic clock.

    vLLM's request statistics start out as 0.0, so a first token at 0 was never seen.
    """

    arrival_time: float | None = None
    queued_ts: float | None = None
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None

    @field_validator("first_token_ts", "last_token_ts")
    @classmethod
    def _zero_is_never(cls, value: float | None) -> float | None:
        return value or None

    @model_validator(mode="after")
    def _in_order(self) -> Timed:
        times = (self.queued_ts, self.scheduled_ts, self.first_token_ts, self.last_token_ts)
        known = [t for t in times if t is not None]
        if self.first_token_ts is not None and known != sorted(known):
            raise ValueError("queued_ts, scheduled_ts, first_token_ts and last_token_ts must not decrease")
        return self

    @property
    def served(self) -> bool:
        """Whether its first and last token were seen."""
        last = self.last_token_ts if self.output_toks != 1 else self.first_token_ts
        return self.first_token_ts is not None and last is not None and self.output_toks != 0


class Content(_Row):
    """One row of workload.jsonl: what was sent, and what came back."""

    arrival_time_ns: float | None = None
    input_tok_ids: Any = None
    output_tok_ids: Any = None


Row = TypeVar("Row", bound=_Row)
Numbered = list[tuple[int, Row]]


@dataclass(frozen=True, slots=True)
class Sent:
    """The workload's rows that stand for single requests, and how many stand for sessions of several."""

    file: Path
    rows: list[tuple[int, Content]]
    sessions: int


def read_timed(file: Path) -> list[tuple[int, Timed]]:
    """(line number, row) of requests.jsonl."""
    return [(number, _parse(Timed, raw, file, number)) for number, raw in _objects(file)]


def read_content(file: Path, rows: int) -> Sent:
    """workload.jsonl, for `rows` timed requests.

    Rows of sessions (`sub_requests`) are passed over when the other rows suffice, since then nobody sent
    them; UserError when they were sent, or when a row asks for what is not modelled.
    """
    objects = list(_objects(file))
    sessions = [number for number, raw in objects if raw.get("sub_requests")]
    flat = [(number, raw) for number, raw in objects if "sub_requests" not in raw]
    for number, raw in objects if len(flat) < rows else flat:
        refuse_row(raw, f"{file}: line {number}")
    return Sent(file, [(number, _parse(Content, raw, file, number)) for number, raw in flat], len(sessions))


def match(timed: Sequence[tuple[int, Timed]], sent: Sent, where: Path) -> list[tuple[int, Content]]:
    """The workload row of each timed row, with its line.

    Rows go together by `request_id` where the workload has it, else by the number that an id ends with
    (counted from 0 or from 1), else by position, else in order of arrival: the first way in which all
    lengths agree. UserError when there is none.
    """
    rows = sent.rows
    if len(rows) < len(timed):
        raise UserError(
            f"{where}: {len(timed)} requests, but {sent.file} has {len(rows)} rows; it must hold what was sent "
            "for each (or leave the file out: then lengths alone are replayed)"
        )
    ways = [way for way in _ways(timed, rows) if way is not None]
    faults = [_fault(timed, rows, way) for way in ways]
    for way, fault in zip(ways, faults, strict=True):
        if fault is None:
            return [rows[i] for i in way]
    # The way that gets furthest says best what is wrong.
    way, at = max(zip(ways, faults, strict=True), key=lambda pair: pair[1] or 0)
    assert at is not None
    (line, row), (its_line, content) = timed[at], rows[way[at]]
    raise UserError(
        f"{where}: line {line}: {row.request_id or 'the request'!r} has {row.input_toks} input tokens, but line "
        f"{its_line} of {sent.file.name} has {content.input_toks}; the two files must describe one run"
    )


def _ways(
    timed: Sequence[tuple[int, Timed]], rows: Sequence[tuple[int, Content]]
) -> Iterator[list[int] | None]:
    by_id = {row.request_id: i for i, (_, row) in enumerate(rows) if row.request_id is not None}
    yield _all([by_id.get(row.request_id or "") for _, row in timed], len(rows))
    found = [_INDEX.search(row.request_id or "") for _, row in timed]
    numbers = [int(m.group(1)) if m and len(m.group(1)) < 10 else None for m in found]
    yield _all(numbers, len(rows))
    yield _all([None if n is None else n - 1 for n in numbers], len(rows))
    yield list(range(len(timed)))
    sent_at = sorted(range(len(rows)), key=lambda i: rows[i][1].arrival_time_ns or 0)
    arrivals = [row.arrival_time if row.arrival_time is not None else row.queued_ts for _, row in timed]
    if all(t is not None for t in arrivals):
        order = sorted(range(len(timed)), key=lambda i: arrivals[i] or 0.0)
        yield [sent_at[rank] for _, rank in sorted(zip(order, range(len(order)), strict=True))]


def _all(indices: list[int | None], rows: int) -> list[int] | None:
    """The indices, if each is there, within the rows, and used once."""
    known = [i for i in indices if i is not None and 0 <= i < rows]
    return known if len(known) == len(indices) == len(set(known)) else None


def _fault(
    timed: Sequence[tuple[int, Timed]], rows: Sequence[tuple[int, Content]], way: list[int]
) -> int | None:
    """The first timed row whose prompt has another length in the workload, or None."""
    for at, ((_, row), index) in enumerate(zip(timed, way, strict=True)):
        lengths = {n for n in (row.input_toks, rows[index][1].input_toks) if n is not None}
        if len(lengths) > 1:
            return at
    return None


def token_ids(ids: Any, count: int, filler: int, where: str) -> TokenIds:
    """Exactly `count` ids: those given, cut or filled up; without any, `filler` alone."""
    if not ids:
        return np.full(count, filler, dtype=np.int32)
    if not isinstance(ids, list) or set(map(type, ids)) != {int}:
        raise UserError(f"{where}: token ids must be a list of whole numbers")
    if min(ids) < 0 or max(ids) >= 2**31:
        raise UserError(f"{where}: token ids must lie between 0 and 2^31")
    return np.asarray((ids + [_FILLER_TOKEN] * (count - len(ids)))[:count], dtype=np.int32)


def prompt_filler(position: int) -> int:
    """A token for a prompt that was not recorded: no two share a prefix."""
    return 1000 + position


def output_filler() -> int:
    """A token for an output that was not recorded."""
    return _FILLER_TOKEN


def _parse(kind: type[Row], raw: dict[str, Any], file: Path, number: int) -> Row:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        what = f"{field}: {first['msg']}" if field else str(first["msg"])
        raise UserError(f"{file}: line {number}: {what}") from None


def _objects(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a file of JSON lines, gzipped or not; blank lines are passed over."""
    opener = gzip.open if file.suffix == ".gz" else open
    try:
        with opener(file, "rt", encoding="utf-8-sig") as handle:
            for number, line in enumerate(handle, 1):
                if not line.strip():
                    continue
                try:
                    raw = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{file}: line {number}: Invalid JSON: {error}") from None
                if not isinstance(raw, dict):
                    raise UserError(f"{file}: line {number}: must be a JSON object, one a line")
                yield number, raw
    except UnicodeDecodeError:
        raise UserError(f"{file}: not UTF-8 text") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
