"""Reader of Mooncake traces: JSON lines with lengths, and ids that stand for blocks of 512 tokens.

Format: kvcache-ai/Mooncake, FAST'25 release.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UserError

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class MooncakeRow:
    """One request; prompts that begin with the same `hash_ids` share those blocks."""

    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


def read_mooncake(path: Path) -> Iterator[MooncakeRow]:
    """The trace's rows, in the file's order; blank lines are skipped.

    Raises:
        UserError: if the file cannot be read or a line is not a row; it names the line.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _row(line, f"{path}, line {number}")
    except OSError as error:
        raise UserError(
            f"{path}: cannot read the trace ({error.strerror}); name a Mooncake .jsonl file"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file; name a Mooncake .jsonl file") from error


def _row(line: str, where: str) -> MooncakeRow:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error}); is the file complete?") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object with timestamp, input_length, output_length, hash_ids")
    hash_ids = row.get("hash_ids")
    if not isinstance(hash_ids, list) or not all(type(block) is int for block in hash_ids):
        raise UserError(f"{where}: hash_ids is {_shown(hash_ids)}; expected a list of whole numbers")
    return MooncakeRow(
        timestamp_ms=_count(row, "timestamp", where),
        input_tokens=_count(row, "input_length", where),
        output_tokens=_count(row, "output_length", where),
        hash_ids=tuple(hash_ids),
    )


def _count(row: dict[str, object], name: str, where: str) -> int:
    value = row.get(name)
    if type(value) is not int or value < 0:
        raise UserError(f"{where}: {name} is {_shown(value)}; expected a whole number, 0 or more")
    return value


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)[:40]
