"""What the formats with `input_length`, `output_length` and `hash_ids` have in common."""

from __future__ import annotations

from typing import Any, ClassVar

from workloads.traces.reader import Reader, block_ids
from workloads.traces.records import Sample
from workloads.traces.row import TraceRow
from workloads.traces.values import since_start_ns, tokens

LENGTHS = ("timestamp", "input_length", "output_length", "hash_ids")


class JsonLengths(Reader):
    """One object a request; other keys with plain values become labels."""

    kind = "json"
    unit_ns: ClassVar[int]

    def __init__(self, sample: Sample) -> None:
        super().__init__(sample)
        first = sample.records[0][1]
        self.label_names = tuple(
            key for key, value in first.items() if key not in self._known() and isinstance(value, str | int)
        )

    @classmethod
    def _known(cls) -> tuple[str, ...]:
        return LENGTHS

    def row(self, line: int, fields: dict[str, Any]) -> TraceRow | None:
        input_tokens = self.prompt_tokens(line, "input_length", fields.get("input_length"))
        named = self.block_tokens > 0
        return TraceRow(
            arrival_ns=self.checked(
                line, "timestamp", since_start_ns, _number(fields.get("timestamp")), self.unit_ns
            ),
            input_tokens=input_tokens,
            output_tokens=self.answer_tokens(line, "output_length", _number(fields.get("output_length"))),
            line=line,
            block_ids=self._blocks(line, fields.get("hash_ids"), input_tokens) if named else (),
            block_tokens=self.block_tokens,
            session=self._session(line, fields),
            labels=tuple(str(fields.get(name, "")) for name in self.label_names),
        )

    def prompt_tokens(self, line: int, name: str, value: object) -> int:
        return super().prompt_tokens(line, name, _number(value))

    def _session(self, line: int, fields: dict[str, Any]) -> str:
        return ""


class _Text:
    """A JSON text where a number should be; numbers in quotes are not taken."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return repr(self._text)


def _number(value: object) -> object:
    return _Text(value) if isinstance(value, str) else value


def is_lengths(sample: Sample) -> bool:
    """Whether the objects have times and lengths (or block ids) under these names."""
    keys = set(sample.header)
    return (
        sample.kind == "json"
        and "timestamp" in keys
        and bool(keys & {"input_length", "hash_ids"})
        and not keys & {"chat_id", "data"}
    )


def has_ids(sample: Sample) -> bool:
    """Whether any sampled row has something under `hash_ids`, in good order or not."""
    return any(fields.get("hash_ids") for _, fields in sample.records)


def rows_with_ids(sample: Sample) -> list[tuple[int, int]]:
    """(input tokens, number of ids) of the sampled rows that have both, in good order."""
    found = []
    for _, fields in sample.records:
        ids = block_ids(fields.get("hash_ids"))
        try:
            count = tokens(_number(fields.get("input_length")), least=1)
        except ValueError:
            continue
        if ids and not isinstance(ids, str):
            found.append((count, len(ids)))
    return found


def fitting(rows: list[tuple[int, int]], block_tokens: int) -> int:
    """How many rows have as many ids as their prompts have blocks of this size."""
    return sum(ids in (count // block_tokens, -(-count // block_tokens)) for count, ids in rows)
