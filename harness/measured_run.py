"""A run that was measured on a real engine: a folder with requests.jsonl, workload.jsonl and run_meta.json.

docs/PROFILES.md describes the three files, so that anybody can validate on a run of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.errors import UserError
from workloads.request import TokenIds

FILES = ("requests.jsonl", "workload.jsonl", "run_meta.json")
_INDEX = re.compile(r"(\d+)$")
# Token ids that stand for an output or a prompt whose content was not recorded.
_FILLER_TOKEN = 100


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Timed(_Row):
    """One row of requests.jsonl; the engine's times are on one monotonic clock, s."""

    request_id: str
    input_toks: int = Field(gt=0)
    output_toks: int = Field(ge=0)
    arrival_time: float
    queued_ts: float | None = None
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None

    @model_validator(mode="after")
    def _in_order(self) -> _Timed:
        times = (self.queued_ts, self.scheduled_ts, self.first_token_ts, self.last_token_ts)
        known = [t for t in times if t is not None]
        if known != sorted(known):
            raise ValueError("queued_ts, scheduled_ts, first_token_ts and last_token_ts must not decrease")
        return self


class _Content(_Row):
    """One row of workload.jsonl: what was sent, and what came back."""

    input_toks: int = Field(gt=0)
    output_toks: int = Field(ge=0)
    input_tok_ids: list[int] | None = None
    output_tok_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class MeasuredRequest:
    """One request of the run. Times are s; arrival counts from the run's first arrival."""

    request_id: str
    arrival_s: float
    queued_s: float
    scheduled_s: float
    first_token_s: float
    last_token_s: float
    output_tokens: int
    prompt: TokenIds
    output: TokenIds


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A measured run and what its engine was told.

    Attributes:
        requests: in order of arrival.
        skipped: rows without a first token (failed or cut off), left out on both sides.
        meta: run_meta.json as it is.
        prompts_known: false when workload.jsonl held lengths only, so that no prefix is shared.
    """

    folder: Path
    requests: tuple[MeasuredRequest, ...]
    skipped: int
    meta: Mapping[str, Any]
    prompts_known: bool

    def setting(self, *path: str) -> Any:
        """A value of run_meta.json by its path, or None."""
        value: Any = self.meta
        for key in path:
            if not isinstance(value, Mapping):
                return None
            value = value.get(key)
        return value


def read_measured_run(folder: Path) -> MeasuredRun:
    """Read and check a folder; UserError names file and line."""
    for name in FILES:
        if not (folder / name).is_file():
            raise UserError(
                f"{folder / name}: no such file; a measured run is {', '.join(FILES)} in one folder"
            )
    meta_file = folder / "run_meta.json"
    try:
        meta = json.loads(meta_file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise UserError(f"{meta_file}: not valid JSON: {error}") from None
    if not isinstance(meta, dict):
        raise UserError(f"{meta_file}: must be a JSON object")
    timed = list(_rows(folder / "requests.jsonl", _Timed))
    content = list(_rows(folder / "workload.jsonl", _Content))
    if not timed:
        raise UserError(f"{folder / 'requests.jsonl'}: no rows; one JSON object a request is expected")
    first = min(row.arrival_time for _, row in timed)
    requests, skipped, known, seen = [], 0, True, set[str]()
    for position, (line, row) in enumerate(timed):
        where = f"{folder / 'requests.jsonl'}: line {line}"
        if row.request_id in seen:
            raise UserError(f"{where}: request_id {row.request_id!r} occurs twice")
        seen.add(row.request_id)
        sent = _content_of(row, position, content, len(timed), where)
        times = (row.queued_ts, row.scheduled_ts, row.first_token_ts, row.last_token_ts)
        if row.output_toks == 0 or any(t is None for t in times):
            skipped += 1
            continue
        known = known and sent.input_tok_ids is not None
        queued, scheduled, first_token, last_token = (float(t) for t in times if t is not None)
        requests.append(
            MeasuredRequest(
                request_id=row.request_id,
                arrival_s=row.arrival_time - first,
                queued_s=queued,
                scheduled_s=scheduled,
                first_token_s=first_token,
                last_token_s=last_token,
                output_tokens=row.output_toks,
                prompt=_tokens(sent.input_tok_ids, row.input_toks, position),
                output=_tokens(sent.output_tok_ids, row.output_toks, -1),
            )
        )
    if not requests:
        raise UserError(f"{folder / 'requests.jsonl'}: no request has a first token; nothing to compare with")
    requests.sort(key=lambda r: (r.arrival_s, r.request_id))
    return MeasuredRun(folder, tuple(requests), skipped, meta, known)


def _content_of(
    row: _Timed, position: int, content: list[tuple[int, _Content]], rows: int, where: str
) -> _Content:
    """The workload row of a request: by the number that its id ends with, else by position."""
    match = _INDEX.search(row.request_id)
    index = int(match.group(1)) if match and int(match.group(1)) < len(content) else position
    if len(content) < rows or index >= len(content):
        raise UserError(f"{where}: {row.request_id!r} has no row in workload.jsonl, which has {len(content)}")
    line, sent = content[index]
    if sent.input_toks != row.input_toks:
        raise UserError(
            f"{where}: {row.request_id!r} has {row.input_toks} input tokens, "
            f"but line {line} of workload.jsonl has {sent.input_toks}"
        )
    return sent


def _tokens(ids: list[int] | None, count: int, position: int) -> TokenIds:
    """Exactly `count` ids; unknown prompts differ from each other, so that they share no prefix."""
    if ids is None:
        start = 1000 + position if position >= 0 else _FILLER_TOKEN
        return np.full(count, start, dtype=np.int32)
    return np.asarray((ids + [_FILLER_TOKEN] * (count - len(ids)))[:count], dtype=np.int32)


Row = TypeVar("Row", bound=_Row)


def _rows(file: Path, kind: type[Row]) -> Iterator[tuple[int, Row]]:
    """(line number, row); blank lines are passed over."""
    try:
        with file.open(encoding="utf-8-sig") as handle:
            for number, line in enumerate(handle, 1):
                if not line.strip():
                    continue
                try:
                    yield number, kind.model_validate_json(line)
                except ValidationError as error:
                    first = error.errors()[0]
                    field = ".".join(str(part) for part in first["loc"])
                    what = f"{field}: {first['msg']}" if field else str(first["msg"])
                    raise UserError(f"{file}: line {number}: {what}") from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
