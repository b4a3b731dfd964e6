"""What the KV patches were to show, and what a run shows: one row a target, from the run's own records.

    bench run --profile tight --arms scripts/kv.toml --phase all --seeds 5 --out results/kv-tight
    python scripts/kv_targets.py results/kv-tight --cache conversation.json synthetic.json --perf perf-20k.json

Arms are found by the patches they enable. An interval is a 95% block bootstrap of that one figure, paired against the
baseline and not corrected for how many there are (those of the report are). Milliseconds of a target are those of a
data-centre GPU; they are multiplied by the profile's SLO factor. `--cache` takes what `bench cache --json` wrote for a
trace (2,500, 5,000 and 10,000 blocks, policies lru and slru, scan mix 0 and 1), `--perf` what `bench perf --json` wrote.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness.atomic import write_json  # noqa: E402
from harness.errors import UserError, told  # noqa: E402
from scripts.kv_rows.cold import cold  # noqa: E402
from scripts.kv_rows.hits import bounds, hit_rate, order, traces  # noqa: E402
from scripts.kv_rows.memory import preemption, tiers  # noqa: E402
from scripts.kv_rows.rest import completions, cost, together  # noqa: E402
from scripts.kv_rows.run import Row, Run  # noqa: E402
from scripts.kv_rows.switch import switch  # noqa: E402


def rows(run: Run, cache: Sequence[Path] = (), perf: Sequence[Path] = ()) -> list[Row]:
    """All targets, in the order of LANDING_PLAN.md."""
    out = [
        *hit_rate(run),
        *traces(cache),
        *preemption(run),
        *switch(run),
        *completions(run),
        *cold(run),
        *tiers(run),
        *order(run),
        *cost(perf),
    ]
    return [*out, *together(run), *bounds(run)]


def main() -> None:
    """Print the targets of one run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a run with arms of scripts/kv.toml")
    parser.add_argument("--cache", type=Path, nargs="*", default=[], help="files of bench cache --json")
    parser.add_argument("--perf", type=Path, nargs="*", default=[], help="files of bench perf --json")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    with told("kv_targets"):
        if not (args.run / "plan.json").is_file():
            raise UserError(f"{args.run} is no run's folder: `bench run` makes one")
        run = Run(args.run)
        if not any(run.record.arms.values()):
            raise UserError(f"{args.run} holds no finished arm yet: run the same `bench run` command again")
        found = rows(run, args.cache, args.perf)
    table = Table(title=f"{args.run.name}: targets against tuned, SLO factor {run.slo_factor:g}")
    for column in ("what", "asked", "found", "95% interval", ""):
        table.add_column(column, overflow="fold")
    for row in found:
        word = "" if row.met is None else "met" if row.met else "NOT met"
        table.add_row(row.what, row.asked, row.found, row.interval, word)
    console = Console(width=160)
    console.print(table)
    if run.untold:
        console.print(f"bounds that are not to be told: {run.untold}", highlight=False, markup=False)
    judged = [row for row in found if row.met is not None]
    print(f"{sum(bool(row.met) for row in judged)} of {len(judged)} met")
    if args.json:
        with told("kv_targets"):
            write_json(args.json, [vars(row) for row in found])


if __name__ == "__main__":
    main()
