"""Uses most seams at once and writes down what it was told."""

from __future__ import annotations

from typing import Any

from patches.seam.patch import Hooks
from tests.seam.toys import toy

LOG: dict[str, list[Any]] = {}
CONTEXTS: list[Any] = []
#: Request ids to preempt before the next pass, and to expire after the next update.
PREEMPT: set[str] = set()
EXPIRE: set[str] = set()
CAP: dict[str, int] = {}


def clear() -> None:
    """Forget everything."""
    for store in (LOG, CONTEXTS, PREEMPT, EXPIRE, CAP):
        store.clear()


def build(knobs: Any, context: Any) -> Hooks:
    """Hooks that log; some act on the module's sets."""
    CONTEXTS.append(context)

    def log(what: str, value: Any) -> None:
        LOG.setdefault(what, []).append(value)

    def before(now: float) -> None:
        log("before", now)
        for request in list(context.scheduler.running):
            if request.request_id in PREEMPT and context.preempt(request):
                PREEMPT.discard(request.request_id)

    def expire(now: float) -> list[tuple[str, str]]:
        due = [(rid, "too late") for rid in sorted(EXPIRE)]
        EXPIRE.clear()
        return due

    def cap(request: Any, computed: int, new: int, now: float) -> int:
        log("cap", (request.request_id, new))
        return CAP.get(request.request_id, new)

    return Hooks(
        token_cap=cap,
        victim_hint=lambda request: 1.0 if request.request_id.startswith("victim") else 0.0,
        before_schedule=before,
        after_schedule=lambda out, now: log("after_schedule", out.total_num_scheduled_tokens),
        after_update=lambda out, outputs, now: log("after_update", sorted(out.num_scheduled_tokens)),
        on_add=lambda request, now: log("add", request.request_id),
        on_finish=lambda request, now: log("finish", (request.request_id, str(request.status))),
        on_preempt=lambda request, now: log("preempt", request.request_id),
        on_touch=lambda blocks: log("touch", len(blocks)),
        on_evict=lambda blocks, names: log("evict", [block.block_id for block in blocks]),
        expire=expire,
    )


PATCH = toy(
    "everything",
    build,
    "token_cap",
    "victim_hint",
    "before_schedule",
    "after_schedule",
    "after_update",
    "on_add",
    "on_finish",
    "on_preempt",
    "on_touch",
    "on_evict",
    "expire",
)
