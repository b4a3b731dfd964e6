"""Traces of prefix blocks (Mooncake's JSONL): one request a line, its blocks named by prefix."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.errors import UserError

_ASK = 'each line must look like {"timestamp": 0, "hash_ids": [0, 1, 2]}'


class _Row(BaseModel):
    """One line; what else stands in it is not needed here."""

    model_config = ConfigDict(strict=True)
    timestamp: int | float = Field(allow_inf_nan=False)
    hash_ids: list[int] = Field(min_length=1)


@dataclass(frozen=True)
class BlockTrace:
    """Requests in order of arrival, each a path of block ids from the first block of its prompt.

    An id names a block together with all that comes before it, so it has one predecessor in the whole trace.
    Ids are at least 0.
    """

    requests: tuple[tuple[int, ...], ...]

    @property
    def blocks(self) -> int:
        """Blocks asked for, over all requests."""
        return sum(len(request) for request in self.requests)


def read_trace(path: Path) -> BlockTrace:
    """Read a trace, ordered by timestamp (equal ones keep the file's order).

    Raises:
        UserError: the file is missing or empty, or a line is malformed; names file and line.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a trace in Mooncake's JSONL format ({_ASK})")
    rows: list[tuple[float, tuple[int, ...]]] = []
    parents: dict[int, tuple[int, int]] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    row = _parse(line, f"{path}:{number}")
                    _check_path(row.hash_ids, parents, path, number)
                    rows.append((row.timestamp, tuple(row.hash_ids)))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file ({error.reason}); {_ASK}") from None
    if not rows:
        raise UserError(f"{path}: no request in it; {_ASK}")
    rows.sort(key=lambda row: row[0])
    return BlockTrace(tuple(ids for _, ids in rows))


def _parse(line: str, where: str) -> _Row:
    try:
        return _Row.model_validate(json.loads(line))
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg}, column {error.colno}); {_ASK}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the line"
        raise UserError(f"{where}: {field}: {first['msg']}; {_ASK}") from None


def _check_path(ids: Sequence[int], parents: dict[int, tuple[int, int]], path: Path, number: int) -> None:
    before = -1
    for block in ids:
        if block < 0:
            raise UserError(f"{path}:{number}: hash_ids: {block} is below 0; {_ASK}")
        parent, line = parents.setdefault(block, (before, number))
        if parent != before:
            raise UserError(
                f"{path}:{number}: hash_ids: block {block} has another block before it than in line {line}; "
                "an id must name a block together with its whole prefix"
            )
        before = block


def served(trace: BlockTrace, scan: bool) -> Iterator[tuple[int, ...]]:
    """The requests as served: with `scan`, each is followed by one of the same length that nobody repeats.

    The scan's blocks have ids below 0, all different.
    """
    fresh = -1
    for request in trace.requests:
        yield request
        if scan:
            yield tuple(range(fresh, fresh - len(request), -1))
            fresh -= len(request)
