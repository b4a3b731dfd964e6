"""What the others cost each tenant: its times in every arm over those when it ran alone (`harness.interference`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
from rich import box
from rich.table import Table
from rich.text import Text

from harness.errors import UserError
from harness.interference import ARM, FOLDER
from harness.papers import Json
from harness.records import PLAN, arm_dir, is_complete, read_plan
from reports.view import Arm, RunView
from reports.wording import MISSING

_COLUMNS = ("request_id", "tenant", "measured", "status", "intended_ns", "first_token_ns", "last_token_ns")


@dataclass(frozen=True, slots=True)
class Figure:
    """Mean of a time over the `n` requests that were served both ways, ms; None without any."""

    n: int
    beside_ms: float | None
    alone_ms: float | None

    @property
    def times(self) -> float | None:
        """How many times as long beside the others."""
        if self.beside_ms is None or not self.alone_ms:
            return None
        return self.beside_ms / self.alone_ms

    @property
    def text(self) -> str:
        """The factor in words."""
        found = self.times
        if found is None:
            return MISSING
        return f"{found:.2f}×" if found < 10 else f"{found:,.1f}×" if found < 100 else f"{found:,.0f}×"

    @property
    def means(self) -> str:
        """Both means in words."""
        if self.beside_ms is None or self.alone_ms is None:
            return "no request was served both ways"
        return f"{self.beside_ms:,.0f} ms instead of {self.alone_ms:,.0f} ms"


@dataclass(frozen=True, slots=True)
class Slowdown:
    """One tenant in one arm against itself alone. `offered` counts its requests in the seeds that were run alone."""

    tenant: str
    arm: str
    offered: int
    ttft: Figure
    e2e: Figure


@dataclass(frozen=True, slots=True)
class Interference:
    """All tenants that were run alone, by arm."""

    arms: tuple[str, ...]
    struck: tuple[bool, ...]
    seeds: tuple[int, ...]
    rows: tuple[tuple[str, tuple[Slowdown, ...]], ...]


def interference(view: RunView, arms: Sequence[Arm] | None = None) -> Interference | None:
    """The slowdowns; None where no tenant of this run was run alone.

    Raises:
        UserError: a record is damaged.
    """
    alone = _alone(view)
    if not alone:
        return None
    wanted = view.arms if arms is None else arms
    seeds = sorted({seed for tables in alone.values() for seed in tables})
    beside = {(arm.name, seed): _beside(view, arm.name, seed) for arm in wanted for seed in seeds}
    order = [str(tenant["name"]) for tenant in view.tenants if str(tenant["name"]) in alone]
    rows = tuple(
        (name, tuple(_slowdown(name, arm.name, alone[name], beside) for arm in wanted)) for name in order
    )
    return Interference(
        tuple(arm.name for arm in wanted), tuple(not arm.valid for arm in wanted), tuple(seeds), rows
    )


def as_json(view: RunView) -> list[Json]:
    """Every slowdown as JSON-able data, with the factors."""
    found = interference(view)
    listed = [] if found is None else [one for _, row in found.rows for one in row]
    return [
        {
            **asdict(one),
            "ttft": {**asdict(one.ttft), "times": one.ttft.times},
            "e2e": {**asdict(one.e2e), "times": one.e2e.times},
        }
        for one in listed
    ]


def terminal_table(view: RunView) -> Table | Text:
    """The factors as a person reads them."""
    found = interference(view)
    if found is None:
        return Text("no tenant was run alone")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="times as long as alone: mean TTFT / mean E2E")
    table.add_column("tenant")
    for arm in found.arms:
        table.add_column(Text(arm), justify="right")
    for tenant, row in found.rows:
        cells = [
            Text(f"{one.ttft.text} / {one.e2e.text}", style="strike dim" if struck else "")
            for one, struck in zip(row, found.struck, strict=True)
        ]
        table.add_row(Text(tenant), *cells)
    return table


Tables = Mapping[int, pd.DataFrame]


def _alone(view: RunView) -> dict[str, Tables]:
    """By tenant and seed, what it got alone on this run's traffic and profile."""
    out: dict[str, Tables] = {}
    for path in sorted(view.path.glob(f"{FOLDER}/*/{PLAN}")):
        plan = read_plan(path.parent)
        workload = dict(plan.get("workload", {}))
        tenant = str(workload.pop("only_tenant", ""))
        same = all(plan.get(key) == view.plan.get(key) for key in ("profile", "assumptions"))
        if not tenant or workload != view.plan.get("workload", {}) or not same:
            continue
        places = {int(seed): arm_dir(path.parent, ARM, seed) for seed in plan["seeds"]}
        tables = {seed: _read(place) for seed, place in places.items() if is_complete(place)}
        if tables:
            out[tenant] = tables
    return out


def _read(place: Path) -> pd.DataFrame:
    path = place / "requests.parquet"
    try:
        return _timed(pq.read_table(path, columns=list(_COLUMNS)).to_pandas())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({str(error).splitlines()[0]}); delete {place} and run `bench interference` again"
        ) from error


def _beside(view: RunView, arm: str, seed: int) -> pd.DataFrame | None:
    table = view.table(arm, seed, "requests", _COLUMNS)
    return None if table is None else _timed(table)


def _timed(requests: pd.DataFrame) -> pd.DataFrame:
    """TTFT and E2E of measured requests, ms, by id; NaN where a request has none."""
    kept = requests[requests["measured"]]
    since = {name: (kept[f"{name}_token_ns"] - kept["intended_ns"]) / 1e6 for name in ("first", "last")}
    return pd.DataFrame(
        {
            "tenant": kept["tenant"],
            "ttft": since["first"].where(kept["status"].isin(["ok", "cancelled"])),
            "e2e": since["last"].where(kept["status"] == "ok"),
        }
    ).set_index(kept["request_id"])


def _slowdown(
    tenant: str, arm: str, alone: Tables, beside: Mapping[tuple[str, int], pd.DataFrame | None]
) -> Slowdown:
    joined, offered = [], 0
    for seed, table in alone.items():
        other = beside.get((arm, seed))
        if other is not None:
            offered += len(table)
            own = other[other["tenant"] == tenant].add_suffix("_beside")
            joined.append(table.join(own, how="inner"))
    both = pd.concat(joined) if joined else None
    return Slowdown(tenant, arm, offered, _figure(both, "ttft"), _figure(both, "e2e"))


def _figure(both: pd.DataFrame | None, name: str) -> Figure:
    pairs: Any = None if both is None else both[[name, f"{name}_beside"]].dropna()
    if pairs is None or pairs.empty:
        return Figure(0, None, None)
    return Figure(len(pairs), float(pairs[f"{name}_beside"].mean()), float(pairs[name].mean()))
