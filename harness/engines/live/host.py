"""What a manifest says of the machine that a live run was on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def cpu_title() -> str:
    """The processor as it calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def facts() -> dict[str, Any]:
    """Processor, cores, memory, kernel, and how busy it is right now."""
    one, five, fifteen = os.getloadavg()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu_title(),
        "cores": cores(),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "load_before": [round(one, 2), round(five, 2), round(fifteen, 2)],
    }
