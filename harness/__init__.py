"""Plans, engines, records and metrics. `harness.load(path)` reads records as DataFrames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.records import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    # Read on first use: pandas and pyarrow take half a second that most commands do not need.
    if name == "load":
        from harness.records import load

        return load
    raise AttributeError(f"module 'harness' has no attribute {name!r}")
