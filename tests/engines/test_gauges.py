"""What patches' gauges say over time: only changes are kept, and a virtual run writes them beside its tables.

Does not guard what a patch's own gauge means (its own tests) nor how the report draws it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import harness
from harness.engines.flags import EngineFlags
from harness.engines.virtual.engine import VirtualEngine, VirtualRun
from harness.engines.virtual.gauges import GaugeLog
from harness.profiles import model_dir
from harness.records import load_arm, parquet_bytes, write_arm
from harness.schema import HELD
from patches.seam.receipt import Tallies
from tests.engines.traffic import LONG, SHORT, ConstantStep, request, workload
from tests.hand_records import papers
from tests.scheduling.clocked import installed

TRAFFIC = [
    *(request(i, 0.02 * i, prompt=2500, output=30, tenant=LONG) for i in range(5)),
    *(request(10 + i, 0.3 + 0.1 * i, prompt=60, output=10, tenant=SHORT) for i in range(20)),
]


def rows_of(log: GaugeLog) -> list[tuple[Any, ...]]:
    """What was noted, NaN as None."""
    return [tuple(row.values()) for row in log.table().to_pylist()]


def test_a_row_is_written_only_when_a_value_changes() -> None:
    tallies = Tallies(["a", "b"])
    said = {"x": 0.0, "y": 5.0}
    tallies["a"].gauges["x"] = lambda: said["x"]
    tallies["b"].gauges["y"] = lambda: said["y"]
    log = GaugeLog({name: tallies[name] for name in ("a", "b")})
    assert not log
    log.sample(10)
    log.sample(20)
    said["y"] = 6.0
    log.sample(30)
    said.update(x=1.0, y=5.0)
    tallies["a"].gauges["late"] = 7
    log.sample(40)
    assert rows_of(log) == [
        (10, "a", "x", 0.0),
        (10, "b", "y", 5.0),
        (30, "b", "y", 6.0),
        (40, "a", "x", 1.0),
        (40, "a", "late", 7.0),
        (40, "b", "y", 5.0),
    ]


def test_what_is_no_finite_number_is_one_null() -> None:
    tallies = Tallies(["a"])
    values = iter([1.0, math.nan, math.nan, math.inf, 2.0])
    tallies["a"].gauges["x"] = lambda: next(values)
    log = GaugeLog({"a": tallies["a"]})
    for t in range(5):
        log.sample(t)
    assert [(t, v) for t, _, _, v in rows_of(log)] == [(0, 1.0), (1, None), (4, 2.0)]


def test_a_reason_that_holds_nobody_any_more_is_0() -> None:
    tallies = Tallies(["a", "b"])
    held: dict[tuple[str, str], int] = {}
    log = GaugeLog({name: tallies[name] for name in ("a", "b")}, lambda: held)
    log.sample(0)
    held["b", "full"] = 2
    log.sample(1)
    log.sample(2)
    held["a", "late"] = 1
    del held["b", "full"]
    log.sample(3)
    assert rows_of(log) == [
        (1, "b", f"{HELD}full", 2.0),
        (3, "b", f"{HELD}full", 0.0),
        (3, "a", f"{HELD}late", 1.0),
    ]


def serve(enable: str) -> tuple[VirtualRun, dict[str, Any]]:
    """The traffic on a small engine, and the receipt's metrics."""
    flags = EngineFlags(max_model_len=4096, max_num_batched_tokens=512, max_num_seqs=4)
    with installed(enable) as installation:
        engine = VirtualEngine(model_dir("llama-3.1-8b"), flags, ConstantStep(), 400)
        try:
            run = engine.run(workload(TRAFFIC))
        finally:
            engine.shutdown()
        return run, installation.receipt()["metrics"]


@pytest.fixture(scope="module")
def both() -> tuple[VirtualRun, dict[str, Any]]:
    return serve("mlfq,wfq")


def at_steps(gauges: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """What each gauge said when each step had been scheduled; 0 before its first row."""
    wide = gauges.groupby(["t_ns", "gauge"])["value"].last().unstack().ffill()
    place = np.searchsorted(wide.index.to_numpy(), steps["t_ns"].to_numpy(), side="right") - 1
    return wide.iloc[place].fillna(0.0).set_index(steps.index)


def test_gauges_say_what_the_steps_and_the_receipt_say(both: tuple[VirtualRun, dict[str, Any]]) -> None:
    run, metrics = both
    gauges, steps = run.tables["gauges"].to_pandas(), run.tables["steps"].to_pandas()
    last = gauges[~gauges["gauge"].str.startswith(HELD)].groupby(["patch", "gauge"])["value"].last()
    assert dict(last.items()) == {
        (patch, name): value for patch, values in metrics.items() for name, value in values.items()
    }
    # Steps that were scheduled at one time are told apart by nothing: take the last of each.
    steps = steps.drop_duplicates("t_ns", keep="last")
    seen = at_steps(gauges, steps)
    held = seen[[name for name in seen if str(name).startswith(HELD)]].sum(axis=1)
    assert held.max() > 0
    assert held.tolist() == steps["held"].tolist()
    waiting = seen[[f"mlfq_waiting_level_{n}" for n in range(4)]].sum(axis=1)
    assert waiting.tolist() == (steps["waiting"] + steps["held"]).tolist()
    assert waiting.iloc[-1] == 0


def test_equal_runs_give_equal_bytes(both: tuple[VirtualRun, dict[str, Any]]) -> None:
    again, _ = serve("mlfq,wfq")
    assert parquet_bytes("gauges", again.tables["gauges"]) == parquet_bytes(
        "gauges", both[0].tables["gauges"]
    )


def test_they_are_read_back_and_a_stock_run_has_none(
    both: tuple[VirtualRun, dict[str, Any]], tmp_path: Path
) -> None:
    engine = VirtualEngine(model_dir("llama-3.1-8b"), EngineFlags(max_model_len=4096), ConstantStep(), 400)
    try:
        stock = engine.run(workload(TRAFFIC[:2]))
    finally:
        engine.shutdown()
    assert "gauges" not in stock.tables
    tenants = [{"name": one.name, "tier": one.tier} for one in (SHORT, LONG)]
    for arm, run in (("stock", stock), ("both", both[0])):
        manifest, receipt = papers(arm)
        manifest["workload"]["tenants"] = tenants
        write_arm(tmp_path / arm / "seed-0", run.tables, manifest, receipt)
    assert load_arm(tmp_path / "stock/seed-0").gauges is None
    assert not (tmp_path / "stock/seed-0/gauges.parquet").exists()
    assert harness.load(tmp_path / "stock/seed-0").gauges is None
    found = harness.load(tmp_path / "both/seed-0").gauges
    assert found is not None
    assert list(found.columns) == ["arm", "seed", "t_ns", "patch", "gauge", "value"]
    assert len(found) == both[0].tables["gauges"].num_rows
    assert set(found["arm"]) == {"both"}
