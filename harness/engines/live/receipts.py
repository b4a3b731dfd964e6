"""One receipt for the record, out of those that each process of a server left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patches.seam.plan import PatchPlan

EMPTY: dict[str, Any] = {"schema": 1, "plan_sha256": None, "hooks": {}, "metrics": {}}


def merged(plan: PatchPlan | None, by_pid: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Hits summed over the processes; a mechanism's figures from the process in which its patch fired most.

    Hits of the warm-up are among them.
    """
    if plan is None or not plan.patches:
        return dict(EMPTY)
    hooks: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    for name in plan.names:
        parts = [receipt["hooks"].get(name, {}) for receipt in by_pid.values()]
        by_hook: dict[str, int] = {}
        for part in parts:
            for hook, hits in part.get("by_hook", {}).items():
                by_hook[hook] = by_hook.get(hook, 0) + int(hits)
        hooks[name] = {"hits": sum(by_hook.values()), "by_hook": dict(sorted(by_hook.items()))}
        most = max(by_pid.values(), key=lambda one: one["hooks"].get(name, {}).get("hits", 0), default={})
        metrics[name] = dict(most.get("metrics", {}).get(name, {}))
    # What ran, not what was meant to: a reader compares it with the plan.
    ran = {receipt["plan_sha256"] for receipt in by_pid.values()}
    return {
        "schema": 1,
        "plan_sha256": ran.pop() if len(ran) == 1 else None,
        "hooks": hooks,
        "metrics": metrics,
        "processes": len(by_pid),
    }
