"""The figures of a trace, gathered while it streams by; see `bench trace`."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from workloads.traces.content import prefix_keys
from workloads.traces.row import TraceRow
from workloads.traces.values import NS_PER_S

PEAK_S = 60
_PENDING = 1 << 22


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens: percentiles are nearest rank."""

    total: int
    mean: float
    p50: int
    p90: int
    p99: int
    max: int

    @classmethod
    def of(cls, values: npt.NDArray[np.int64]) -> Lengths:
        """Of at least one length."""
        ordered = np.sort(values)
        p50, p90, p99 = (int(ordered[max(0, -(-len(ordered) * p // 100) - 1)]) for p in (50, 90, 99))
        total = int(ordered.sum())
        return cls(total, round(total / len(ordered), 1), p50, p90, p99, int(ordered[-1]))


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """What `bench trace` says of the rows of a window.

    Attributes:
        span_s: from the first request to the last.
        mean_rps: requests per second over the span; None for a span of nothing.
        peak_rps: the most requests in any 60 s, per second; None where the span is shorter.
        burstiness: standard deviation of the times between requests over their mean; 1 for Poisson arrivals.
        sessions: conversations; None where the trace names none.
        blocks, shared_blocks: named blocks of prompts, and those whose prompt has begun so before; None without ids.
        too_long: requests of more tokens than asked about.
    """

    requests: int
    span_s: float
    mean_rps: float | None
    peak_rps: float | None
    burstiness: float | None
    input: Lengths
    output: Lengths
    sessions: int | None
    blocks: int | None
    shared_blocks: int | None
    too_long: int | None
    tenants: Mapping[str, int]

    @property
    def shared_share(self) -> float | None:
        """The hit rate of a cache without limits, in blocks of the trace."""
        return None if not self.blocks else (self.shared_blocks or 0) / self.blocks

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("input", "output"):
            value = plain.pop(name)
            plain[f"{name}_tokens"] = {part: getattr(value, part) for part in value.__dataclass_fields__}
        share = self.shared_share
        return plain | {
            "tenants": dict(self.tenants),
            "prefix_sharing": None if share is None else round(share, 6),
        }


class Gatherer:
    """Takes rows one by one; a row costs 24 bytes, a session its name, a prefix not seen before 8 bytes.

    Args:
        tenant_of: names the row's tenant.
        max_tokens: requests of more tokens are counted; None: none is.
    """

    def __init__(self, tenant_of: Any, max_tokens: int | None) -> None:
        self._tenant_of, self._max_tokens = tenant_of, max_tokens
        self._at, self._input, self._output = array("q"), array("q"), array("q")
        self._sessions: set[str] = set()
        self._blocks = 0
        self._prefixes = _Distinct()
        self._too_long = 0
        self._tenants: dict[str, int] = {}

    def add(self, row: TraceRow) -> None:
        """One row."""
        self._at.append(row.arrival_ns)
        self._input.append(row.input_tokens)
        self._output.append(row.output_tokens)
        if row.session:
            self._sessions.add(row.session)
        if row.block_ids:
            self._blocks += len(row.block_ids)
            self._prefixes.add(prefix_keys(row.block_ids))
        if self._max_tokens is not None and row.total_tokens > self._max_tokens:
            self._too_long += 1
        name = self._tenant_of(row)
        self._tenants[name] = self._tenants.get(name, 0) + 1

    def figures(self) -> TraceFigures:
        """The figures of all rows so far, at least one."""
        at_ns = np.sort(np.frombuffer(self._at, dtype=np.int64))
        span_s = float(at_ns[-1] - at_ns[0]) / NS_PER_S
        return TraceFigures(
            requests=len(at_ns),
            span_s=span_s,
            mean_rps=round(len(at_ns) / span_s, 4) if span_s else None,
            peak_rps=_peak_rps(at_ns) if span_s >= PEAK_S else None,
            burstiness=_burstiness(at_ns),
            input=Lengths.of(np.frombuffer(self._input, dtype=np.int64)),
            output=Lengths.of(np.frombuffer(self._output, dtype=np.int64)),
            sessions=len(self._sessions) or None,
            blocks=self._blocks or None,
            shared_blocks=self._blocks - self._prefixes.count() if self._blocks else None,
            too_long=None if self._max_tokens is None else self._too_long,
            tenants=self._tenants,
        )


class _Distinct:
    """Counts different 64-bit keys in 8 bytes each."""

    def __init__(self) -> None:
        self._known: npt.NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self._pending = array("Q")

    def add(self, keys: npt.NDArray[np.uint64]) -> None:
        self._pending.frombytes(keys.tobytes())
        if len(self._pending) > _PENDING:
            self._merge()

    def count(self) -> int:
        self._merge()
        return len(self._known)

    def _merge(self) -> None:
        self._known = np.union1d(self._known, np.frombuffer(self._pending, dtype=np.uint64))
        self._pending = array("Q")


def _peak_rps(at_ns: npt.NDArray[np.int64]) -> float:
    until = np.searchsorted(at_ns, at_ns + PEAK_S * NS_PER_S, side="left")
    return round(int((until - np.arange(len(at_ns))).max()) / PEAK_S, 4)


def _burstiness(at_ns: npt.NDArray[np.int64]) -> float | None:
    gaps = np.diff(at_ns).astype(np.float64)
    mean = float(gaps.mean()) if len(gaps) else 0.0
    return round(float(gaps.std()) / mean, 3) if mean else None
