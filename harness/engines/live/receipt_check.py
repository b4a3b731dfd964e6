"""Whether each of a server's processes runs under the plan that it was to run under."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.engines.live.processes import API_SERVER, ServerProcess
from patches.seam.plan import PatchPlan

# A process that is forked rather than spawned has its parent's patches, and says so at its first step; one
# without a scheduler takes none, so that nothing can be asked of it.
_ALWAYS = (API_SERVER, "EngineCore")


def read(folder: Path) -> dict[int, dict[str, Any]]:
    """Receipts by pid."""
    found = {}
    for path in sorted(folder.glob("receipt-*.json")):
        receipt = json.loads(path.read_text(encoding="utf-8"))
        found[int(receipt["pid"])] = receipt
    return found


def faults(
    plan: PatchPlan | None,
    processes: Iterable[ServerProcess],
    receipts: Mapping[int, Mapping[str, Any]],
    *,
    spawned: bool,
) -> list[str]:
    """What speaks against believing that the plan, and nothing else, is in force; empty if nothing does.

    Args:
        spawned: all processes were started anew, none forked; then each must have a receipt.
    """
    listed = tuple(processes)
    if plan is None or not plan.patches:
        return [f"pid {pid} left a receipt though no patch is enabled" for pid in sorted(receipts)]
    found = [
        f"{one.role} (pid {one.pid}) left no receipt"
        for one in listed
        if one.pid not in receipts and (spawned or one.role in _ALWAYS)
    ]
    roles = {one.role for one in listed}
    found += [f"there is no process {role}" for role in _ALWAYS if role not in roles]
    names = {one.pid: f"{one.role} (pid {one.pid})" for one in listed}
    for pid, receipt in sorted(receipts.items()):
        who = names.get(pid, f"pid {pid}")
        if receipt.get("error"):
            found.append(f"{who}: {receipt['error']}")
        elif receipt["plan_sha256"] != plan.sha256():
            found.append(f"{who} runs under another plan, {receipt['plan_sha256'][:12]}")
        elif missing := [name for name in plan.names if name not in receipt["hooks"]]:
            found.append(f"{who} lacks {', '.join(missing)}")
    return found
