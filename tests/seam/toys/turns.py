"""Tenants take turns: a tenant's rank is the number of its requests that were picked."""

from __future__ import annotations

from typing import Any

from patches.seam.patch import Hooks
from tests.seam.toys import toy


def build(knobs: Any, context: Any) -> Hooks:
    """Counts picks by tenant."""
    picks: dict[str, float] = {}

    def add(request: Any, by: float) -> None:
        tenant = context.request_info(request).tenant
        picks[tenant] = picks.get(tenant, 0.0) + by

    def put_back(request: Any, now: float) -> None:
        add(request, -1.0)
        context.rerank(context.request_info(request).tenant)

    return Hooks(
        tenant_rank=lambda tenant, now: picks.get(tenant, 0.0),
        on_pick=lambda request, now: add(request, 1.0),
        on_put_back=put_back,
    )


PATCH = toy("turns", build, "tenant_rank", "on_pick", "on_put_back")
