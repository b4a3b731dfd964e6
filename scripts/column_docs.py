"""Writes docs/COLUMNS.md, the dictionary of the record tables, from `harness/schema.py`; `--check` compares."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness.schema import EXTRA_TABLES, TABLES  # noqa: E402

TARGET = ROOT / "docs" / "COLUMNS.md"
_ABOUT = {
    "requests": "One row a request, in the order of the workload.",
    "tokens": "One row an output token received.",
    "steps": "One row an engine step, in the order of scheduling.",
    "events": "One row an event.",
    "gpu": "One row a GPU and sample; only where a live run found a GPU.",
    "gauges": "One row a change of a patch's gauge, looked at after each step was scheduled and at the end; only where "
    "patches that have gauges ran on the virtual engine.",
    "cache": "One row a count: what the prefix cache did in a window of time (five seconds at first; windows double where a run "
    "is very long). Counts of 0 are left out. Only where the patch `cachedash` ran.",
    "transfers": "One row a transfer of KV blocks below the GPU, in the order in which they were asked for; only where "
    "an arm of the virtual engine offloads.",
}
_HEAD = """# Columns of the records

Generated from `harness/schema.py` by `python scripts/column_docs.py`; do not edit. One directory,
`results/<run>/<arm>/seed-<n>/`, holds these tables as Parquet, beside `manifest.json` and `receipt.json`.
`harness.load(path)` reads an arm, a run or a results folder as DataFrames. All times are integer
nanoseconds on one monotonic clock that starts at 0 when the run does.
"""


def text() -> str:
    """The page."""
    parts = [_HEAD]
    for name, columns in (TABLES | EXTRA_TABLES).items():
        parts.append(
            f"\n## {name}\n\n{_ABOUT[name]}\n\n| column | type | unit | null | meaning |\n|---|---|---|---|---|\n"
        )
        for c in columns:
            parts.append(
                f"| `{c.name}` | {c.type} | {c.unit} | {'yes' if c.nullable else ''} | {c.meaning} |\n"
            )
    return "".join(parts)


def main() -> int:
    """Write the page, or with `--check` say whether it is stale (exit code 1)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the page is stale")
    if not parser.parse_args().check:
        TARGET.parent.mkdir(exist_ok=True)
        TARGET.write_text(text(), "utf-8")
        return 0
    if TARGET.is_file() and TARGET.read_text("utf-8") == text():
        return 0
    print("docs/COLUMNS.md is stale: run `python scripts/column_docs.py`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
