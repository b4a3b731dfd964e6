"""Refuses requests of tenant `refused` on arrival, and lets those of tenant `expired` expire after two passes."""

from __future__ import annotations

from typing import Any

from patches.seam.endings import DEADLINE_EXPIRED, refused
from patches.seam.patch import Hooks
from tests.seam.toys import toy


def build(knobs: Any, context: Any) -> Hooks:
    """Names each request once."""
    named: list[tuple[str, str]] = []
    passes: dict[str, int] = {}

    def on_add(request: Any, now: float) -> None:
        tenant = context.request_info(request).tenant
        if tenant == "refused":
            named.append((request.request_id, refused("queue_depth", 2.5)))
        elif tenant == "expired":
            passes[request.request_id] = 0

    def expire(now: float) -> list[tuple[str, str]]:
        out = named[:]
        named.clear()
        for request_id in list(passes):
            passes[request_id] += 1
            if passes[request_id] > 2:
                del passes[request_id]
                out.append((request_id, DEADLINE_EXPIRED))
        return out

    return Hooks(on_add=on_add, expire=expire)


PATCH = toy("ending", build, "on_add", "expire")
