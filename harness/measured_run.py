"""A run that was measured on a real engine: a folder with requests.jsonl, workload.jsonl and run_meta.json.

docs/VALIDATION.md describes the three files, so that anybody can validate on a run of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.measured_rows import (
    Content,
    Timed,
    match,
    output_filler,
    prompt_filler,
    read_content,
    read_timed,
    token_ids,
)
from harness.refusals import settings
from workloads.request import TokenIds

REQUESTS, WORKLOAD, META = "requests.jsonl", "workload.jsonl", "run_meta.json"
# Requests take seconds, not days: two clocks further apart than this are not one clock.
_ONE_CLOCK_S = 100_000.0
# What the arrivals may span beyond the engine's own times, if both are seconds.
_SPAN_FACTOR, _SPAN_SLACK_S = 3.0, 60.0


@dataclass(frozen=True, slots=True)
class MeasuredRequest:
    """One request of the run. Times are s; arrival counts from the run's first arrival.

    `queued_s` is when the engine took the request; `scheduled_s` is None where it was not recorded.
    """

    request_id: str
    arrival_s: float
    queued_s: float
    scheduled_s: float | None
    first_token_s: float
    last_token_s: float
    output_tokens: int
    prompt: TokenIds
    output: TokenIds


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A measured run and what its engine was told.

    Attributes:
        folder: where it lies.
        meta_file: its description.
        requests: in order of arrival.
        skipped: rows without a first token (failed or cut off), left out on both sides.
        meta: the description as it is.
        prompts_known: false when token ids are missing, so that prompts share no prefix.
        from_arrival: latencies count from the arrival, because no queued_ts was recorded.
        notes: what had to be assumed about the rows.
    """

    folder: Path
    meta_file: Path
    requests: tuple[MeasuredRequest, ...]
    skipped: int
    meta: Mapping[str, Any]
    prompts_known: bool
    from_arrival: bool = False
    notes: tuple[str, ...] = field(default=())

    def setting(self, *path: str) -> Any:
        """A value of the description by its path, or None."""
        value: Any = self.meta
        for key in path:
            if not isinstance(value, Mapping):
                return None
            value = value.get(key)
        return value

    def recorded(self, *names: str) -> Any:
        """The first value that the description holds under one of these names, wherever; or None.

        A configuration that was dumped with `<type>` in place of a value does not hold it.
        """
        for name in names:
            for value in settings(self.meta, name):
                if value is not None and not (isinstance(value, str) and value.startswith("<")):
                    return value
        return None

    @property
    def has_resolved_scheduler(self) -> bool:
        """Whether the scheduler's resolved configuration was recorded, so that what it lacks did not exist."""
        return isinstance(self.setting("resolved_config", "scheduler_config"), Mapping)


def read_measured_run(folder: Path) -> MeasuredRun:
    """Read and check a folder; UserError names file and line."""
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; a measured run is {REQUESTS}, {WORKLOAD} and {META} in one folder"
        )
    requests_file = _one_of(folder, REQUESTS, f"{REQUESTS}.gz")
    meta_file = _one_of(folder, META, "meta.json")
    workload_file = _one_of(folder, WORKLOAD, f"{WORKLOAD}.gz", needed=False)
    meta = _read_meta(meta_file)
    timed = read_timed(requests_file)
    if not timed:
        raise UserError(f"{requests_file}: no rows; one JSON object a request is expected")
    _refuse_twice(timed, requests_file)
    notes: list[str] = []
    content = _content(timed, workload_file, requests_file, notes)
    served = [(t, c) for t, c in zip(timed, content, strict=True) if t[1].served]
    if not served:
        raise UserError(f"{requests_file}: no request has a first token; nothing to compare with")
    from_arrival = all(row.queued_ts is None for (_, row), _ in served)
    if from_arrival:
        _check_one_clock(served, requests_file)
        notes.append("no queued_ts is recorded: latencies count from arrival, on both sides")
    else:
        served = [pair for pair in served if pair[0][1].queued_ts is not None]
    arrivals = _arrivals(served, requests_file, notes)
    requests: list[MeasuredRequest] = []
    for (line, row), (_, sent), arrival in zip(*zip(*served, strict=True), arrivals, strict=True):
        where = f"{requests_file}: line {line}"
        position = len(requests)
        inputs, outputs = row.input_toks or sent.input_toks, row.output_toks
        if outputs is None:
            outputs = sent.output_toks
        if inputs is None or outputs is None:
            raise UserError(f"{where}: no {'input_toks' if inputs is None else 'output_toks'}")
        first, last = row.first_token_ts, row.last_token_ts
        assert first is not None
        queued = row.arrival_time if from_arrival else row.queued_ts
        assert queued is not None
        where_sent = f"{workload_file or requests_file}: the row of {row.request_id or line!r}"
        requests.append(
            MeasuredRequest(
                request_id=row.request_id or f"line-{line}",
                arrival_s=arrival,
                queued_s=queued,
                scheduled_s=row.scheduled_ts,
                first_token_s=first,
                last_token_s=first if last is None else last,
                output_tokens=outputs,
                prompt=token_ids(sent.input_tok_ids, inputs, prompt_filler(position), where_sent),
                output=token_ids(sent.output_tok_ids, outputs, output_filler(), where_sent),
            )
        )
    _check_spans(requests, requests_file)
    known = all(sent.input_tok_ids for _, (_, sent) in served)
    requests.sort(key=lambda r: (r.arrival_s, r.request_id))
    return MeasuredRun(
        folder,
        meta_file,
        tuple(requests),
        len(timed) - len(requests),
        meta,
        known,
        from_arrival,
        tuple(notes),
    )


def _one_of(folder: Path, *names: str, needed: bool = True) -> Any:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    if needed:
        raise UserError(
            f"{folder / names[0]}: no such file; a measured run is {REQUESTS}, {WORKLOAD} and {META} in one folder"
        )
    return None


def _read_meta(file: Path) -> Mapping[str, Any]:
    try:
        meta = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(meta, dict):
        raise UserError(f"{file}: must be a JSON object")
    return meta


def _refuse_twice(timed: Sequence[tuple[int, Timed]], file: Path) -> None:
    seen: set[str] = set()
    for line, row in timed:
        if row.request_id is None:
            continue
        if row.request_id in seen:
            raise UserError(f"{file}: line {line}: request_id {row.request_id!r} occurs twice")
        seen.add(row.request_id)


def _content(
    timed: Sequence[tuple[int, Timed]], file: Path | None, requests_file: Path, notes: list[str]
) -> list[tuple[int, Content]]:
    if file is None:
        notes.append(f"there is no {WORKLOAD}: prompts of the recorded lengths are replayed")
        return [(line, Content(request_id=row.request_id)) for line, row in timed]
    sent = read_content(file, len(timed))
    if sent.sessions:
        notes.append(
            f"{sent.sessions} rows of {file.name} are sessions (sub_requests) that this run did not send"
        )
    return match(timed, sent, requests_file)


Served = Sequence[tuple[tuple[int, Timed], tuple[int, Content]]]


def _arrivals(served: Served, file: Path, notes: list[str]) -> list[float]:
    """When each request was sent, s after the first."""
    measured = [row.arrival_time for (_, row), _ in served]
    planned = [sent.arrival_time_ns for _, (_, sent) in served]
    queued = [row.queued_ts for (_, row), _ in served]
    if all(t is not None for t in measured):
        times = [float(t) for t in measured if t is not None]
    elif all(t is not None for t in planned):
        notes.append("arrival_time is not recorded for every request: sent at the workload's arrival_time_ns")
        times = [t / 1e9 for t in planned if t is not None]
    elif all(t is not None for t in queued):
        notes.append("arrival_time is not recorded for every request: sent when the engine took them")
        times = [float(t) for t in queued if t is not None]
    else:
        line = next(line for (line, row), _ in served if row.arrival_time is None)
        raise UserError(f"{file}: line {line}: no arrival_time, and nothing else says when it was sent")
    first = min(times)
    return [t - first for t in times]


def _check_one_clock(served: Served, file: Path) -> None:
    for (line, row), _ in served:
        first = row.first_token_ts or 0.0
        if row.arrival_time is None or not 0 <= first - row.arrival_time < _ONE_CLOCK_S:
            raise UserError(
                f"{file}: line {line}: no queued_ts, and arrival_time is not on the clock of first_token_ts; "
                "vLLM's request statistics hold queued_ts"
            )


def _check_spans(requests: Sequence[MeasuredRequest], file: Path) -> None:
    """UserError when arrivals and the engine's times cannot both be seconds."""
    arrivals = max(r.arrival_s for r in requests)
    engine = max(r.last_token_s for r in requests) - min(r.queued_s for r in requests)
    if arrivals > _SPAN_FACTOR * engine + _SPAN_SLACK_S:
        raise UserError(
            f"{file}: arrivals span {arrivals:.0f} s, but the engine's times {engine:.1f} s; all are seconds"
        )
