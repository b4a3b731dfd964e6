"""Two made-up arms compared in memory: the same traffic, and what one of them does to it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness.metrics.evaluate import evaluate
from harness.metrics.pool import pool_of, windows_of
from harness.metrics.scope import scopes_of
from harness.papers import Json
from harness.records import ArmRecord
from harness.stats.blocks import BlockGrid
from harness.stats.bootstrap import Weights
from reports.comparisons import compare_arms
from tests.synthetic import TENANTS, Effect, make_papers, make_tables


def comparisons(
    effect: Effect,
    noise: str,
    *,
    seeds: int = 3,
    n: int = 800,
    phase_s: float = 24.0,
    base: Effect = Effect(),
) -> list[Json]:
    """All comparisons of an arm with `effect` against a stock with `base`, each with its own noise."""
    arms: list[Any] = []
    for name, what in (("stock", base), ("plain", effect)):
        records = tuple(_record(name, seed, n, phase_s, what, noise) for seed in range(seeds))
        windows = windows_of(records[0])
        tiers = list(dict.fromkeys(t[1] for t in TENANTS))
        scopes = scopes_of([w.number for w in windows], tiers, [t[0] for t in TENANTS])
        weights = Weights.of(BlockGrid(windows, seeds), 200)
        arms.append(
            SimpleNamespace(
                name=name,
                records=records,
                estimates=evaluate(pool_of(records), weights, scopes),
                valid=True,
                idle=False,
            )
        )
    return compare_arms(arms)


def _record(name: str, seed: int, n: int, phase_s: float, effect: Effect, noise: str) -> ArmRecord:
    tables = make_tables(name, seed, n, phase_s, effect, noise)
    manifest, receipt = make_papers(name, seed, n, phase_s, effect)
    frames = {key: table.to_pandas() for key, table in tables.items()}
    return ArmRecord(Path(name), name, seed, manifest=manifest, receipt=receipt, **frames)
