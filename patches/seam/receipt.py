"""Proof that a patch fired: counters per patch and hook, mechanism metrics, written as one JSON file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SCHEMA = 1


class PatchTally:
    """Counters of one patch in one process. Adding costs one dictionary update."""

    __slots__ = ("by_hook", "gauges", "tables")

    def __init__(self) -> None:
        self.by_hook: dict[str, int] = {}
        self.gauges: dict[str, float | Callable[[], float]] = {}
        # By name of a record table: its columns when the run has ended.
        self.tables: dict[str, Callable[[], dict[str, list[Any]]]] = {}

    def add(self, hook: str, n: int = 1) -> None:
        """Count `n` more hits of one hook."""
        by_hook = self.by_hook
        by_hook[hook] = by_hook.get(hook, 0) + n

    @property
    def hits(self) -> int:
        """All hits, over all hooks."""
        return sum(self.by_hook.values())

    def metrics(self) -> dict[str, float | None]:
        """The gauges' values now, by name; None for one that is not a finite number."""
        values = {
            name: float(value() if callable(value) else value) for name, value in sorted(self.gauges.items())
        }
        return {name: value if math.isfinite(value) else None for name, value in values.items()}


class Tallies:
    """The counters of all patches of a plan; shared by the engines of one process."""

    def __init__(self, names: Iterable[str]) -> None:
        self._by_patch = {name: PatchTally() for name in names}

    def __getitem__(self, name: str) -> PatchTally:
        return self._by_patch[name]

    def reset(self) -> None:
        """Forget all counts and gauges (a new run in the same process)."""
        for tally in self._by_patch.values():
            tally.by_hook.clear()
            tally.gauges.clear()
            tally.tables.clear()

    def never_fired(self) -> tuple[str, ...]:
        """Names of patches without a single hit."""
        return tuple(name for name, tally in self._by_patch.items() if not tally.hits)

    def receipt(self, plan_sha256: str, error: str = "") -> dict[str, Any]:
        """The receipt as JSON-able data; `pid` is all that may differ between two equal runs."""
        out: dict[str, Any] = {
            "schema": SCHEMA,
            "pid": os.getpid(),
            "plan_sha256": plan_sha256,
            "hooks": {
                name: {"hits": tally.hits, "by_hook": dict(sorted(tally.by_hook.items()))}
                for name, tally in self._by_patch.items()
            },
            "metrics": {name: tally.metrics() for name, tally in self._by_patch.items()},
        }
        if error:
            out["error"] = error
        return out


def write_receipt(path: Path, receipt: dict[str, Any]) -> None:
    """Write a receipt so that a reader sees the old one, the new one or none, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(receipt, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(part, path)
