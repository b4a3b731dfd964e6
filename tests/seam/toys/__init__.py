"""Small patches for the adapter's tests, enabled by import path like any patch from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches.seam.patch import Hooks, Knobs, Patch
from patches.seam.seams import SEAMS


def toy(name: str, build: Callable[[Any, Any], Hooks], *seams: str, rank: int = 5, **more: Any) -> Patch:
    """A Patch with filler texts; `rank` is its rank on every ranked seam."""
    fields: dict[str, Any] = {
        "number": "",
        "area": "scheduling",
        "summary": f"toy {name}",
        "knobs": Knobs,
        "why": "for tests",
        "how": "simply",
        "baseline": "none",
        "mechanism": "none",
        "removable_when": "never",
        "ranks": {seam: rank for seam in seams if seam in SEAMS and SEAMS[seam].ranked},
    }
    return Patch(name=name, build=build, seams=seams, **(fields | more))
