"""Reading a server's log: its last lines, and the one that says why it ended."""

from __future__ import annotations

import os
import re
from pathlib import Path

_TAIL_BYTES = 128 * 1024
_HEAD_BYTES = 1024 * 1024
_CORES = re.compile(r"local_rank=\d+, core ids=\[([\d, ]+)\]")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# `(EngineCore pid=12) ERROR 01-02 03:04:05 [core.py:100] `: who, level and place, each where there is one.
_PREFIX = re.compile(
    r"^(\(\S+ pid=\d+\) ?)?((DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:.]+ \[\S+\] ?)?"
)
_CAUSE = re.compile(r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)\b: ?\S|.{0,80}\berror: )")
# Errors that only pass on what another process has met.
_SECOND_HAND = re.compile(
    r"[Rr]oot cause|stack trace|EngineDead|SystemExit|KeyboardInterrupt|CancelledError|BrokenPipe"
)
_LINE = 300


def tail(path: Path, lines: int = 12) -> tuple[str, ...]:
    """The last lines that are not blank, without colours; none if there is no log."""
    return tuple(_lines(path)[-lines:])


def cause(path: Path) -> str:
    """The line that most likely says why the server ended: its last first-hand error; "" if there is none."""
    bare = [_PREFIX.sub("", line) for line in _lines(path)]
    for at in range(len(bare) - 1, -1, -1):
        line = bare[at]
        if _CAUSE.match(line) and not _SECOND_HAND.search(line):
            # pydantic says what is wrong on the lines that follow, indented.
            more = [text.strip() for text in bare[at + 1 : at + 3] if text.startswith("  ")]
            return " ".join([line, *more])[:_LINE]
    return ""


def usage_error(path: Path) -> str:
    """What vLLM's own command line refused; "" if it refused nothing."""
    for line in reversed(_lines(path)):
        found = re.match(r"^\S+(?: serve)?: error: (.+)$", line)
        if found:
            return found[1][:_LINE]
    return ""


def status(path: Path) -> str:
    """The last line, as short as a line of progress should be."""
    lines = _lines(path)
    return _PREFIX.sub("", lines[-1])[:100] if lines else "nothing in its log yet"


def compute_cores(path: Path) -> int | None:
    """How many cores the model is computed on, over all ranks, as vLLM's CPU platform says at its start; None if it says nothing."""
    try:
        with path.open("rb") as file:
            start = file.read(_HEAD_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return None
    found = _CORES.findall(start)
    return sum(len(cores.split(",")) for cores in found) if found else None


def _lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return [line.rstrip() for line in _COLOUR.sub("", text).splitlines() if line.strip()]
