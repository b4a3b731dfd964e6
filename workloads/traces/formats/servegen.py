"""Workloads that ServeGen generated: a request with its id, its time in seconds and its lengths.

As CSV (`request_id,timestamp,input_tokens,output_tokens`, a reasoning workload adds `reason_ratio`) and as JSON of
its `Request`, whose lengths lie under `data`. ServeGen's own data (distributions of clients, batch jobs without
times) are no requests to replay and are refused by name. Source: servegen/construct.py and README of
alibaba/ServeGen.
"""

from __future__ import annotations

from typing import Any

from harness.errors import UserError
from workloads.traces.reader import CsvReader, Reader
from workloads.traces.records import Sample
from workloads.traces.row import TraceRow
from workloads.traces.values import NS_PER_S, since_start_ns

_COLUMNS = ("request_id", "timestamp", "input_tokens", "output_tokens")
_MULTIMODAL = frozenset({"text_tokens", "image_tokens", "audio_tokens", "video_tokens"})


def refuse_known(sample: Sample) -> None:
    """Say what a file is that is known and cannot be replayed.

    Raises:
        UserError: for ServeGen's multimodal workloads and batch jobs, and for Azure's multimodal trace.
    """
    names = sample.names
    inner = sample.records[0][1].get("data") if sample.kind == "json" else None
    fields = names | {key.lower() for key in inner} if isinstance(inner, dict) else names
    if fields & _MULTIMODAL or "numimages" in names or "img_ids" in names:
        raise UserError(
            f"{sample.path}: its requests carry images, sound or video, which are not modelled; use a text trace"
        )
    if "request_id" in names and "input_length" in names and "timestamp" not in names:
        raise UserError(
            f"{sample.path}: a batch job without arrival times; only a trace of times can be replayed"
        )


class ServeGenCsv(CsvReader):
    """As CSV."""

    name = "servegen"
    title = "ServeGen"
    clock = "seconds"
    columns = _COLUMNS

    def row(self, line: int, fields: list[str]) -> TraceRow:
        named = {name: fields[self._at[name]].strip() for name in _COLUMNS}
        return _row(self, line, named, self._labels(fields))


class ServeGenJson(Reader):
    """As JSON, with the lengths under `data` or beside the time."""

    name = "servegen-json"
    title = "ServeGen (JSON)"
    kind = "json"
    clock = "seconds"

    def __init__(self, sample: Sample) -> None:
        super().__init__(sample)
        first = _flat(sample.records[0][1])
        self.label_names = tuple(
            key for key, value in first.items() if key not in _COLUMNS and isinstance(value, str | int)
        )

    @classmethod
    def matches(cls, sample: Sample) -> bool:
        return (
            sample.kind == "json"
            and "timestamp" in sample.names
            and _flat(sample.records[0][1]).keys() >= {"input_tokens"}
        )

    def row(self, line: int, fields: dict[str, Any]) -> TraceRow:
        flat = _flat(fields)
        return _row(self, line, flat, tuple(str(flat.get(name, "")) for name in self.label_names))


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    data = fields.get("data")
    return fields | data if isinstance(data, dict) else fields


def _row(reader: Reader, line: int, fields: dict[str, Any], labels: tuple[str, ...]) -> TraceRow:
    reader.new_id(line, "request_id", fields.get("request_id"))
    return TraceRow(
        arrival_ns=reader.checked(line, "timestamp", since_start_ns, fields.get("timestamp"), NS_PER_S),
        input_tokens=reader.prompt_tokens(line, "input_tokens", fields.get("input_tokens")),
        output_tokens=reader.answer_tokens(line, "output_tokens", fields.get("output_tokens")),
        line=line,
        labels=labels,
    )
