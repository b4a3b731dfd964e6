"""Traces of prefix blocks for `bench cache`: any trace whose rows name the blocks of their prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import UserError
from workloads.traces.reader import block_ids
from workloads.traces.records import records, sample
from workloads.traces.values import NS_PER_S, since_start_ns

_ASK = 'each line must look like {"timestamp": 0, "hash_ids": [0, 1, 2]}'


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
    """Read a trace, ordered by timestamp (equal ones keep the file's order); lengths need not be in it.

    Raises:
        UserError: the file is missing or empty, or a line is malformed; names file and line.
    """
    begun = sample(path)
    if begun.kind == "csv" or "hash_ids" not in begun.header:
        raise UserError(
            f"{path}: names no blocks of prompts, so there is nothing for a cache to find; {_ASK} (Mooncake, "
            "Bailian, vLLM's timed_trace)"
        )
    # Bailian's ids are of a block's content alone; with the ids before it they name what a cache looks for.
    named = _Paths() if "chat_id" in begun.header else None
    rows: list[tuple[int, tuple[int, ...]]] = []
    parents: dict[int, tuple[int, int]] = {}
    for number, fields in records(path, "json", begun.noun):
        where = f"{path}: {begun.noun} {number}"
        at, ids = _row(fields, where)
        if named is not None:
            ids = named.path(ids)
        else:
            _check_path(ids, parents, where, number)
        rows.append((at, ids))
    rows.sort(key=lambda row: row[0])
    return BlockTrace(tuple(ids for _, ids in rows))


def _row(fields: dict[str, Any], where: str) -> tuple[int, tuple[int, ...]]:
    ids = block_ids(fields.get("hash_ids"))
    if isinstance(ids, str):
        raise UserError(f"{where}: hash_ids {ids}; {_ASK}")
    if not ids:
        raise UserError(f"{where}: hash_ids is empty; {_ASK}")
    time = fields.get("timestamp")
    try:
        # Only the order counts here, not the unit.
        return since_start_ns(None if isinstance(time, str) else time, NS_PER_S), ids
    except ValueError as error:
        raise UserError(f"{where}: timestamp {error}; {_ASK}") from None


class _Paths:
    """Numbers each path of ids, in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def path(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The path's own numbers, each naming a block with all before it."""
        found = []
        before = -1
        for block in ids:
            before = self._numbers.setdefault((before, block), len(self._numbers))
            found.append(before)
        return tuple(found)


def _check_path(ids: Sequence[int], parents: dict[int, tuple[int, int]], where: str, number: int) -> None:
    before = -1
    for block in ids:
        parent, line = parents.setdefault(block, (before, number))
        if parent != before:
            raise UserError(
                f"{where}: hash_ids: block {block} has another block before it than in line {line}; "
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
