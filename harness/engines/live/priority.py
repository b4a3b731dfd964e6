"""The client comes first: on a machine whose cores it shares with the server, it must not wait for one to be free.

It takes a few per cent of a core, and what it does late would be counted as the server's latency. Where the system
does not let it be scheduled in real time, its nice value is lowered, and where that is not allowed either, the server's
processes come after others instead; to each other they stay equal.

Linux weighs processes by their nice value within their session only, where it groups sessions (sched(7), "The
autogroup feature"), so that the session's own value is set too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_RISE, _LOWER = -10, 10


def client_first(client: Iterable[int], server: Iterable[int]) -> str:
    """Let the client's processes come before the server's; returns what was done, for the manifest."""
    pids = tuple(client)
    if all(_realtime(pid) for pid in pids):
        return "client in real time"
    if all(_weigh(pid, _RISE) for pid in pids):
        return "client raised"
    return "server lowered" if all(_weigh(pid, _LOWER) for pid in server) else "none"


def _realtime(pid: int) -> bool:
    """Let a process run whenever it is ready; False where that is not allowed."""
    try:
        for thread in _threads(pid):
            os.sched_setscheduler(thread, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError:
        return False
    return True


def _weigh(pid: int, nice: int) -> bool:
    """Set the nice value of a process, of all its threads and of its session; False where that is not allowed."""
    try:
        for thread in _threads(pid):
            os.setpriority(os.PRIO_PROCESS, thread, nice)
    except OSError:
        return False
    # A system that does not group sessions has no such file.
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(f"{nice}\n", encoding="ascii")
    return True


def _threads(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        yield int(thread.name)
