"""Which part of which trace a run replays, for whom: all that decides its requests but the seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.errors import UserError
from workloads.five_phase.randomness import scaled
from workloads.traces.lines import file_sha256
from workloads.traces.row import TraceRow
from workloads.traces.source import TraceSource, open_trace
from workloads.traces.tenant_map import TenantMap
from workloads.traces.window import Scan, Window, read_window

# 1 GiB of token ids.
MAX_PROMPT_TOKENS = 1 << 28


@dataclass(frozen=True, slots=True)
class TraceChoice:
    """A trace, its window and its tenants, as they stand in a run's plan.

    Attributes:
        path: where the file lies; no part of what decides the requests.
        sha256: of the file.
        max_tokens: requests longer than this (prompt and answer) are left out; None: none is.
    """

    path: Path
    format: str
    sha256: str
    window: Window = field(default_factory=Window)
    tenants: TenantMap = field(default_factory=TenantMap)
    max_tokens: int | None = None

    @property
    def stem(self) -> str:
        """The file's name without its endings, for a folder's name."""
        return (
            "".join(c if c.isalnum() or c in "-_" else "-" for c in self.path.name.split(".")[0])[:40]
            or "file"
        )

    def to_json(self) -> dict[str, Any]:
        """What decides the requests; the path is not in it."""
        return {
            "file": self.path.name,
            "format": self.format,
            "sha256": self.sha256,
            "from_s": self.window.from_s,
            "seconds": self.window.seconds,
            "limit": self.window.limit,
            "max_tokens": self.max_tokens,
            "tenant_map": self.tenants.file,
            "tenants": self.tenants.to_json(),
        }

    @staticmethod
    def from_json(raw: Mapping[str, Any], path: Path) -> TraceChoice:
        """The inverse of `to_json`."""
        return TraceChoice(
            path=path,
            format=raw["format"],
            sha256=raw["sha256"],
            window=Window(raw["from_s"], raw["seconds"], raw["limit"]),
            tenants=TenantMap.from_json(raw["tenants"], raw["tenant_map"]),
            max_tokens=raw["max_tokens"],
        )


def choose(
    path: Path,
    *,
    format_name: str | None = None,
    window: Window | None = None,
    tenants: TenantMap | None = None,
    max_tokens: int | None = None,
) -> TraceChoice:
    """A choice of this file as it is now.

    Raises:
        UserError: if it cannot be read or is not recognised.
    """
    source = open_trace(path, format_name)
    return TraceChoice(
        path=path,
        format=source.reader.name,
        sha256=file_sha256(path),
        window=window or Window(),
        tenants=tenants or TenantMap(),
        max_tokens=max_tokens,
    )


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows of a choice, in order of time (ties as in the file), lengths scaled.

    Attributes:
        origin_ns: arrival of a request at the window's begin.
        length_ns: length of the window; where the trace ends in it, up to the second after its last request.
        too_long: rows left out for their length.
    """

    source: TraceSource
    rows: tuple[TraceRow, ...]
    scan: Scan
    origin_ns: int
    length_ns: int
    too_long: int

    @property
    def prompt_tokens(self) -> int:
        """Of all rows together."""
        return sum(row.input_tokens for row in self.rows)


class _Rows:
    """Keeps the window's rows, and gives up before they take too much memory."""

    def __init__(self, choice: TraceChoice, length_scale: float) -> None:
        self._choice, self._scale = choice, length_scale
        self.rows: list[TraceRow] = []
        self.too_long = 0
        self._tokens = 0

    def add(self, row: TraceRow) -> None:
        if self._scale != 1.0:
            row = replace(
                row,
                input_tokens=scaled(row.input_tokens, self._scale),
                output_tokens=scaled(row.output_tokens, self._scale),
            )
        longest = self._choice.max_tokens
        if longest is not None and row.total_tokens > longest:
            self.too_long += 1
            return
        self._tokens += row.input_tokens
        if self._tokens > MAX_PROMPT_TOKENS:
            raise UserError(
                f"{self._choice.path}: the window holds more than {MAX_PROMPT_TOKENS >> 20:,} million tokens of prompts "
                f"({MAX_PROMPT_TOKENS >> 28} GiB); choose a shorter one with --trace-seconds"
            )
        self.rows.append(row)


@lru_cache(maxsize=2)
def select(choice: TraceChoice, length_scale: float = 1.0) -> Selection:
    """Read the rows of a choice; seeds share one reading.

    Raises:
        UserError: if the file has changed, a row of it is none, or the window is empty or too large.
    """
    if file_sha256(choice.path) != choice.sha256:
        raise UserError(f"{choice.path}: the trace has changed since this run was planned; start a new run")
    source = open_trace(choice.path, choice.format)
    taken, scan = read_window(source, choice.window, lambda: _Rows(choice, length_scale))
    rows = sorted(taken.rows, key=lambda row: row.arrival_ns)
    if not rows:
        raise UserError(
            f"{choice.path}: all {taken.too_long} requests of the window are longer than {choice.max_tokens:,} tokens; "
            "choose another window, or a profile that takes longer ones"
        )
    origin_ns = scan.first_ns + choice.window.start_ns
    rest_ns = scan.last_ns - origin_ns
    length_ns = -(-(rest_ns + 1) // 1_000_000_000) * 1_000_000_000
    if choice.window.end_ns is not None:
        length_ns = min(length_ns, choice.window.end_ns - choice.window.start_ns)
    return Selection(source, tuple(rows), scan, origin_ns, length_ns, taken.too_long)
