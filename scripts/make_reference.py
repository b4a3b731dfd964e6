"""Makes results/reference/summary.json out of a run: the figures that gates look at, small enough to commit.

usage: make_reference.py results/nightly

Kept are each arm's identity, digests, hooks, and its figures over all and by phase. Left out are the
finer scopes and the comparisons, which a comparison makes anew.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from harness.atomic import write_json
from reports.summary import current_summary

_ROOT = Path(__file__).resolve().parent.parent
_FINER = ("by_tenant", "by_tenant_phase")


def reference(summary: dict[str, Any]) -> dict[str, Any]:
    """The summary without its finer scopes and its comparisons."""
    arms = []
    for arm in summary["arms"]:
        kept = {key: ({} if key in _FINER else value) for key, value in arm.items()}
        kept["by_scope"] = {
            scope: figures
            for scope, figures in arm["by_scope"].items()
            if scope.startswith("tier:") and "/" not in scope
        }
        arms.append(kept)
    return {**summary, "arms": arms, "comparisons": []}


def main() -> None:
    """Read the run given on the command line and write the reference."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a finished run")
    run = parser.parse_args().run
    path = _ROOT / "results" / "reference" / "summary.json"
    write_json(path, reference(dict(current_summary(run))))
    print(path.relative_to(_ROOT))


if __name__ == "__main__":
    main()
