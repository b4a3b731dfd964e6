"""How much of what preempted requests computed again no eviction policy could have avoided, under a run's own schedule.

usage: recompute_floor.py RUN/ARM [RUN/ARM ...]

While a preempted request waits, the other requests of its time hold blocks. When they held all but F, at most F of its
blocks could still be there, beside those that it shares with others (taken to be `--shared` tokens at most). The rest had
to be computed again, whatever was evicted. Another schedule, or a tier below the device's memory, has another floor.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pyarrow.parquet as pq

from harness.errors import UserError, told


def floor_of(seed: Path, shared_tokens: int) -> tuple[int, int]:
    """Tokens computed again, and those of them that had to be, of one run; UserError if it has no such records."""
    try:
        events, steps = (pq.read_table(seed / f"{name}.parquet") for name in ("events", "steps"))
        bounds = json.loads((seed / "manifest.json").read_text(encoding="utf-8"))["cache_bounds"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{seed}: no records of a virtual run with a prefix cache ({error})") from None
    blocks, block_tokens = int(bounds["blocks"]), int(bounds["block_tokens"])
    at_ns, used = steps["t_ns"].to_numpy(), steps["kv_usage"].to_numpy()
    again = floor = 0
    lost: dict[int, tuple[int, int]] = {}
    for event in events.select(["t_ns", "kind", "request", "value"]).to_pylist():
        if event["kind"] == "preempt":
            lost[event["request"]] = (event["t_ns"], int(event["value"]))
        elif event["kind"] == "resume" and event["request"] in lost:
            since_ns, tokens = lost.pop(event["request"])
            computed = max(0, tokens - int(event["value"]))
            again += computed
            wait = used[(at_ns >= since_ns) & (at_ns < event["t_ns"])]
            if len(wait):
                free = (1 - float(wait.max())) * blocks
                floor += max(0, min(computed, int(tokens - free * block_tokens - shared_tokens)))
    return again, floor


def main() -> None:
    """Print one line an arm."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arms", nargs="+", type=Path, metavar="RUN/ARM")
    parser.add_argument(
        "--shared", type=int, default=144, help="tokens of a prompt that others hold as well (144)"
    )
    args = parser.parse_args()
    with told("recompute_floor"):
        for arm in args.arms:
            seeds = sorted(arm.glob("seed-*"))
            if not seeds:
                raise UserError(
                    f"{arm} holds no seeds: name the folder of an arm in a run, as results/RUN/tuned"
                )
            again, floor = map(sum, zip(*(floor_of(seed, args.shared) for seed in seeds), strict=True))
            share = f" ({floor / again:.1%})" if again else ""
            print(
                f"{arm}: {again:,} tokens computed again, at least {floor:,}{share} of them whatever is evicted"
            )


if __name__ == "__main__":
    main()
