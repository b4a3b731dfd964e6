"""A trace file as records, before anybody knows its format: fields of a CSV, or objects of JSON."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from harness.errors import UserError
from workloads.traces.lines import MAX_LINE_CHARS, numbered, open_text

# By how many records a format is recognised.
SAMPLED = 64
_CHUNK_CHARS = 1 << 20
_BETWEEN = re.compile(r"[\s,]*")
_MAX_DIGITS = 60
# Nested too deeply, or a number that no decimal holds.
_NOT_JSON = (ValueError, RecursionError, ArithmeticError)

Kind = Literal["csv", "json"]
# (line, fields): the texts of a CSV line, or a JSON object
Record = tuple[int, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """The beginning of a trace.

    Attributes:
        kind: "csv" with a header, or "json": an object a line, or one array of objects.
        noun: what a record's number counts: "line" or "element".
        header: names of the columns, as written; for JSON the keys of the first object.
        records: the first records.
    """

    path: Path
    kind: Kind
    noun: str
    header: tuple[str, ...]
    records: tuple[Record, ...]

    @property
    def names(self) -> frozenset[str]:
        """The header in lower case."""
        return frozenset(name.lower() for name in self.header)


def sample(path: Path) -> Sample:
    """Read the beginning of a file.

    Raises:
        UserError: if it cannot be read, is empty, or begins with something that is neither CSV nor JSON.
    """
    kind, noun = _kind(path)
    found: list[Record] = []
    try:
        found.extend(islice(records(path, kind, noun), SAMPLED + (kind == "csv")))
    except UserError:
        # What comes before a broken record tells the format; who reads that far is told of the record then.
        if len(found) < 1 + (kind == "csv"):
            raise
    if kind == "json":
        if not found:
            raise UserError(f"{path}: no request in it; is the file complete?")
        return Sample(path, kind, noun, tuple(found[0][1]), tuple(found))
    line, first = found[0]
    header = tuple(name.strip() for name in first)
    low = [name.lower() for name in header]
    for name in low:
        if low.count(name) > 1:
            raise UserError(f"{path}: line {line}: the header names the column {name!r} twice; remove one")
    return Sample(path, kind, noun, header, tuple(found[1:]))


def _kind(path: Path) -> tuple[Kind, str]:
    with open_text(path) as text:
        for _, line in numbered(path, text):
            start = line.strip()
            if start:
                if start[0] in "{[":
                    # A line that is an array of something else is refused as a row, not read as the whole file.
                    return "json", "element" if start[0] == "[" and start[1:].lstrip()[:1] in (
                        "",
                        "{",
                        "]",
                    ) else "line"
                return "csv", "line"
    raise UserError(f"{path}: no request in it; the file is empty")


def records(path: Path, kind: Kind, noun: str) -> Iterator[Record]:
    """All records in the file's order; the first of a CSV is its header. Blank lines are skipped.

    Raises:
        UserError: naming the line that is none.
    """
    with open_text(path) as text:
        if kind == "csv":
            yield from _csv_records(path, text)
        elif noun == "element":
            yield from _array_records(path, text)
        else:
            for number, line in numbered(path, text):
                if line.strip():
                    yield number, parse_object(line.rstrip(), f"{path}: line {number}")


def _csv_records(path: Path, text: io.TextIOWrapper) -> Iterator[Record]:
    reader = csv.reader((line for _, line in numbered(path, text)), strict=True)
    width = 0
    try:
        for fields in reader:
            if not fields or (len(fields) == 1 and not fields[0].strip()):
                continue
            if width and len(fields) != width:
                raise UserError(
                    f"{path}: line {reader.line_num}: {len(fields)} fields, but the header names {width} columns; "
                    "is the file complete?"
                )
            width = len(fields)
            yield reader.line_num, fields
    except csv.Error as error:
        raise UserError(f"{path}: line {reader.line_num}: not CSV ({error}); is the file complete?") from None


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _exact(text: str) -> Decimal:
    value = Decimal(text) if len(text) <= _MAX_DIGITS else Decimal("nan")
    return value if value.is_finite() else _no_number(f"{text[:20]}...")


_DECODER = json.JSONDecoder(parse_float=_exact, parse_constant=_no_number)


def parse_object(text: str, where: str) -> dict[str, Any]:
    """One JSON object; fractions come as exact decimals.

    Raises:
        UserError: if it is none; it begins with `where`.
    """
    try:
        value = _DECODER.decode(text)
    except _NOT_JSON as error:
        raise _not_json(error, where) from None
    return _as_object(value, where)


def _not_json(error: Exception, where: str) -> UserError:
    if isinstance(error, json.JSONDecodeError):
        said = f"{error.msg}, column {error.colno}"
    else:
        said = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
    return UserError(f"{where}: not JSON ({said}); is the file complete?")


def _as_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f'{where}: expected an object such as {{"timestamp": 0, ...}}, one a line')
    return value


def _array_records(path: Path, text: io.TextIOWrapper) -> Iterator[Record]:
    """The objects of one JSON array, read piece by piece."""
    held = text.read(_CHUNK_CHARS)
    at = held.index("[") + 1
    number, ended = 0, False
    while True:
        found = _BETWEEN.match(held, at)
        at = at if found is None else found.end()
        where = f"{path}: element {number + 1}"
        if held.startswith("]", at):
            return
        if at < len(held):
            try:
                value, at = _DECODER.raw_decode(held, at)
            except _NOT_JSON as error:
                # A piece that ends in the middle of an object is no error before the file ends there too.
                if ended or len(held) - at > MAX_LINE_CHARS or not isinstance(error, json.JSONDecodeError):
                    raise _not_json(error, where) from None
            else:
                number += 1
                yield number, _as_object(value, where)
                continue
        more = text.read(_CHUNK_CHARS)
        if not more and at == len(held):
            raise UserError(f"{where}: the array is not closed; is the file complete?")
        ended = not more
        held, at = held[at:] + more, 0
