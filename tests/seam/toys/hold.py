"""Holds requests of tenant `held` until as many steps have passed as it is told; None holds for ever."""

from __future__ import annotations

from typing import Any

from patches.seam.patch import Hooks
from tests.seam.toys import toy

OPEN_AFTER_STEPS: dict[str, int | None] = {"steps": 5}
ASKED: list[str] = []


def build(knobs: Any, context: Any) -> Hooks:
    """A gate that counts steps."""
    seen = {"steps": 0}

    def before(now: float) -> None:
        seen["steps"] += 1

    def gate(request: Any, now: float) -> str | None:
        ASKED.append(request.request_id)
        limit = OPEN_AFTER_STEPS["steps"]
        closed = limit is None or seen["steps"] <= limit
        return "held" if closed and context.request_info(request).tenant == "held" else None

    return Hooks(waiting_gate=gate, before_schedule=before)


PATCH = toy("hold", build, "waiting_gate", "before_schedule")
