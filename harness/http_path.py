"""What HTTP, the API server and the exchange between processes cost: an emulated run beside the virtual one of its plan.

The virtual twin is an ordinary run folder, `RUN/virtual/`. Where both engines served a request, their means are set
side by side in `RUN/http-path.json`, an entry for each arm and seed, which the report shows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from harness import run as runs
from harness.atomic import write_json
from harness.engines.emulated.compare import Comparison, compare
from harness.engines.live.task import ENGINE_TIMES
from harness.papers import Json
from harness.plan import RunPlan
from harness.records import HTTP_PATH, is_complete
from harness.sensitivity import settle

TWIN = "virtual"


def measure(plan: RunPlan, run_dir: Path, command: list[str], console: Console) -> None:
    """Replay on the virtual engine what the emulated one has served, and write the comparison.

    Raises:
        RunFailed: an arm failed on the virtual engine.
    """
    assert plan.live is not None
    # The baseline's second server is the first one once more to an engine that does not vary.
    arms = tuple(arm for arm in plan.arms if arm.name != plan.live.again)
    twin, folder = replace(plan, live=None, arms=arms), run_dir / TWIN
    done = [(arm, seed) for arm, seed in twin.tasks if is_complete(run_dir / arm / f"seed-{seed}")]
    if not done:
        return
    settle(twin, folder)
    runs.execute(twin, folder, runs.default_jobs(), command, console)
    entries = [
        {"arm": arm, "seed": seed, **entry(one)}
        for arm, seed in done
        if (one := _compared(folder, run_dir, f"{arm}/seed-{seed}")) is not None
    ]
    write_json(run_dir / HTTP_PATH, {"schema": 1, "entries": entries})


def entry(found: Comparison) -> Json:
    """A comparison as it is kept: milliseconds, means over the requests that both served."""
    return {
        "requests": found.requests,
        "figures": [_row(row.name, row.virtual_ms, row.emulated_ms) for row in found.figures],
        "ways": [_row(row.name, row.virtual_ms, row.emulated_ms) for row in found.ways],
    }


def _row(name: str, virtual_ms: float, emulated_ms: float) -> Json:
    return {"name": name, "virtual_ms": round(virtual_ms, 4), "emulated_ms": round(emulated_ms, 4)}


def _compared(virtual: Path, emulated: Path, where: str) -> Comparison | None:
    def tables(run: Path) -> dict[str, pa.Table]:
        return {name: pq.read_table(run / where / f"{name}.parquet") for name in ("requests", "tokens")}

    try:
        return compare(
            tables(virtual), tables(emulated), pq.read_table(emulated / where / f"{ENGINE_TIMES}.parquet")
        )
    except ValueError:
        # No request was served by both.
        return None
