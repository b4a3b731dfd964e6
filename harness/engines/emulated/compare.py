"""The same trace on the virtual and on the emulated engine: how far apart they are, and in which part of a request's way.

A request is due, sent, received by the engine's process, first given tokens, and has its first token there; then the
client has it; then comes the rest. In the virtual engine the ways between client and engine take no time. What differs
on them is the cost of HTTP, of the API server and of the exchange between processes; what differs within the engine is
its loop's processor time, and chance: a request that comes 5 ms later may miss a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from harness.metrics.derive import chunks_of, request_figures

Floats = npt.NDArray[np.float64]
FIGURES = ("ttft_ms", "tpot_ms", "e2e_ms")
_TITLES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E"}


@dataclass(frozen=True, slots=True)
class Row:
    """Means of one figure, ms, over the requests that both engines served to their end."""

    name: str
    virtual_ms: float
    emulated_ms: float

    @property
    def difference_ms(self) -> float:
        """Emulated less virtual."""
        return self.emulated_ms - self.virtual_ms


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both engines side by side.

    Attributes:
        requests: that both served to their end.
        figures: mean TTFT, TPOT and E2E, as a report has them.
        ways: the parts that add up to TTFT and E2E; empty without the engine's own times.
    """

    requests: int
    figures: tuple[Row, ...]
    ways: tuple[Row, ...] = ()

    def figure(self, name: str) -> Row:
        """One of `FIGURES`."""
        return self.figures[FIGURES.index(name)]


def compare(
    virtual: Mapping[str, pa.Table], emulated: Mapping[str, pa.Table], engine: pa.Table | None = None
) -> Comparison:
    """Set two records of one workload side by side.

    Args:
        virtual, emulated: tables `requests` and `tokens` of `harness.schema`, requests in the same order.
        engine: the emulated engine's own times, a row a request (`telemetry.tables.ENGINE_REQUESTS`).

    Raises:
        ValueError: they are not of one workload, or share no request that was served.
    """
    tables = [record["requests"].to_pandas() for record in (virtual, emulated)]
    if list(tables[0]["request_id"]) != list(tables[1]["request_id"]):
        raise ValueError("the two records are of different workloads")
    both = np.logical_and.reduce([table["status"].to_numpy(object) == "ok" for table in tables])
    if not both.any():
        raise ValueError("no request was served by both engines")
    values = [
        request_figures(table, chunks_of(record["tokens"].to_pandas()))
        for table, record in zip(tables, (virtual, emulated), strict=True)
    ]
    figures = tuple(Row(_TITLES[name], *(_mean(v[name], both) for v in values)) for name in FIGURES)
    ways = () if engine is None else _ways(tables[0][both], tables[1][both], engine.to_pandas()[both])
    return Comparison(int(both.sum()), figures, ways)


def _ways(virtual: pd.DataFrame, emulated: pd.DataFrame, engine: pd.DataFrame) -> tuple[Row, ...]:
    def since(table: pd.DataFrame, begin: str, end: str, begins: pd.DataFrame | None = None) -> float:
        first = (table if begins is None else begins)[begin].to_numpy(np.float64)
        return float(np.mean(table[end].to_numpy(np.float64) - first)) / 1e6

    return (
        Row("due to sent: the client", 0.0, since(emulated, "intended_ns", "sent_ns")),
        Row(
            "sent to received: client, HTTP, API server, IPC",
            0.0,
            since(engine, "sent_ns", "received_ns", emulated),
        ),
        Row(
            "received to first scheduled: the step under way, queue",
            since(virtual, "intended_ns", "scheduled_ns"),
            since(engine, "received_ns", "scheduled_ns"),
        ),
        Row(
            "first scheduled to first token in the engine",
            since(virtual, "scheduled_ns", "first_token_ns"),
            since(engine, "scheduled_ns", "first_token_ns"),
        ),
        Row(
            "first token to the client: IPC, API server, HTTP",
            0.0,
            since(emulated, "first_token_ns", "first_token_ns", engine),
        ),
        Row(
            "first to last token in the engine",
            since(virtual, "first_token_ns", "last_token_ns"),
            since(engine, "first_token_ns", "end_ns"),
        ),
        Row("last token to the client, beyond the first's way", 0.0, _last_way(emulated, engine)),
    )


def _last_way(emulated: pd.DataFrame, engine: pd.DataFrame) -> float:
    """So that the parts add up to E2E: the last token's way less the first's."""
    last, first = (
        emulated[f"{name}_token_ns"].to_numpy(np.float64) - engine[ours].to_numpy(np.float64)
        for name, ours in (("last", "end_ns"), ("first", "first_token_ns"))
    )
    return float(np.mean(last - first)) / 1e6


def _mean(values: Floats, rows: npt.NDArray[np.bool_]) -> float:
    return float(np.nanmean(values[rows]))
