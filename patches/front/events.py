"""What the front refused or overruled: a counter that /metrics shows, and a file of lines if one is wanted.

No key is ever written, nor a part of one.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Of each kind of event, so that a flood of one leaves room for the others.
LINES_PER_EVENT = 2_000


class Events:
    """Counts events; writes the first ones of each kind as JSON lines, a process's own share."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: file to append to; None: only the counter."""
        self._path = path
        self._lines: dict[str, int] = {}
        self.counts: dict[tuple[str, str], int] = {}

    def add(self, event: str, tenant: str = "", detail: Mapping[str, Any] | None = None) -> None:
        """Record one.

        Args:
            event: what happened, of a small set of words. tenant: whose request it was, "" if nobody's.
            detail: more for the file, JSON-able.
        """
        self.counts[event, tenant] = self.counts.get((event, tenant), 0) + 1
        _counter().labels(event=event, tenant=tenant).inc()
        if self._path is None:
            return
        written = self._lines.get(event, 0)
        if written < LINES_PER_EVENT:
            self._lines[event] = written + 1
            more = {"last": "no more of this kind is written"} if written + 1 == LINES_PER_EVENT else {}
            line = {
                "unix_s": round(time.time(), 3),
                "event": event,
                "tenant": tenant,
                **(detail or {}),
                **more,
            }
            self._append(json.dumps(line) + "\n")

    def _append(self, line: str) -> None:
        # One write a line, so that processes that share the file do not mix theirs.
        try:
            handle = os.open(str(self._path), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError:
            # A full disk or a lost folder must not take the server's requests with it; the counter goes on.
            self._path = None
            return
        try:
            os.write(handle, line.encode())
        except OSError:
            self._path = None
        finally:
            os.close(handle)


@functools.cache
def _counter() -> Any:
    from prometheus_client import Counter

    return Counter(
        "patchbench_front_events", "Requests that were refused or overruled before vLLM", ["event", "tenant"]
    )
