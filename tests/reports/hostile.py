"""Names that a careless page would run as code."""

from __future__ import annotations

from typing import Any

EVIL_TENANT = '<img src=x onerror="alert(1)">'
EVIL_PHASE = "</script><script>alert(2)</script>"
ARM = "qos+mlfq+slru"


def arm_of(summary: dict[str, Any], name: str = ARM) -> dict[str, Any]:
    """An arm's entry in a summary."""
    found: dict[str, Any] = next(arm for arm in summary["arms"] if arm["name"] == name)
    return found
