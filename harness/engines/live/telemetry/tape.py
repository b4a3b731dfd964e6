"""A file that grows by whole records and survives the death of its writer.

It is mapped into memory: a record costs no system call, so the engine's thread never gives up the interpreter lock
for it, nothing waits in a buffer, and what was written is in the page cache whatever signal ends the process. Space is
reserved before it is mapped, for a full disk would else end the engine with SIGBUS.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from struct import Struct
from typing import Any

from harness.engines.live.telemetry.layout import CHUNK, COMMITTED, COMMITTED_AT, HEADER, MAGIC

_FIRST_BYTES = 1 << 20
_GROW_BYTES = 4 << 20


class Tape:
    """Written by one thread of one process."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Create the file, which must not exist; OSError where that is impossible."""
        text = json.dumps(header, sort_keys=True).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._size = _FIRST_BYTES
        os.posix_fallocate(self._file, 0, self._size)
        self._map = mmap.mmap(self._file, self._size)
        self._end = HEADER.size + len(text)
        self._map[HEADER.size : self._end] = text
        HEADER.pack_into(self._map, 0, MAGIC, self._end, len(text))

    def write(self, body: Struct, kind: int, *values: Any) -> None:
        """Append a record of fixed length: its kind, and the values of `body` after kind and length."""
        end = self._end + body.size
        if end > self._size:
            self._grow(end)
        body.pack_into(self._map, self._end, kind, body.size, *values)
        self._commit(end)

    def write_text(self, body: Struct, kind: int, text: bytes, *values: Any) -> None:
        """Append a record that ends with a text."""
        start = self._end + body.size
        end = start + len(text)
        if end > self._size:
            self._grow(end)
        body.pack_into(self._map, self._end, kind, end - self._end, *values)
        self._map[start:end] = text
        self._commit(end)

    def write_chunks(self, body: Struct, kind: int, chunks: list[tuple[int, int]], *values: Any) -> None:
        """Append a record that ends with pairs of numbers, whose count is its last value."""
        at = self._end + body.size
        end = at + len(chunks) * CHUNK.size
        if end > self._size:
            self._grow(end)
        body.pack_into(self._map, self._end, kind, end - self._end, *values, len(chunks))
        for new, before in chunks:
            CHUNK.pack_into(self._map, at, new, before)
            at += CHUNK.size
        self._commit(end)

    def close(self) -> None:
        """Cut the file to what was written; a tape that nobody closes is read just as well."""
        self._map.close()
        os.truncate(self._file, self._end)
        os.close(self._file)

    def _commit(self, end: int) -> None:
        self._end = end
        COMMITTED.pack_into(self._map, COMMITTED_AT, end)

    def _grow(self, end: int) -> None:
        size = max(end, self._size) + _GROW_BYTES
        os.posix_fallocate(self._file, self._size, size - self._size)
        self._map.resize(size)
        self._size = size
