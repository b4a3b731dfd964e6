"""How fast this machine copies memory and writes to its disk: what a fitted profile says of its links."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from harness.profiles.thin import rounded

_BYTES = 64 << 20
_TRIES = 5


def measured_links() -> dict[str, Any]:
    """A profile's `[transfers]` for a CPU, where the device's memory and the host's are the same. Takes about a second.

    Reads from the disk come out of the page cache here, so they are taken to be as fast as flushed writes.
    """
    source, target = np.ones(_BYTES, np.uint8), np.zeros(_BYTES, np.uint8)
    copied = _rate(lambda: np.copyto(target, source))
    written = _rate(lambda: _write(source))
    size = f"{_BYTES >> 20} MiB, the median of {_TRIES}"
    return {
        "d2h_bytes_per_s": copied,
        "h2d_bytes_per_s": copied,
        "launch_us": 0.0,
        "disk_read_bytes_per_s": written,
        "disk_write_bytes_per_s": written,
        "disk_access_us": 0.0,
        "comment": f"measured where bench calibrate ran: one thread copying memory, and a file written and flushed ({size}); "
        "reading is taken to be as fast as writing",
    }


def _rate(act: Callable[[], object]) -> float:
    def once() -> float:
        began = time.perf_counter()
        act()
        return _BYTES / (time.perf_counter() - began)

    return rounded(statistics.median(once() for _ in range(_TRIES)))


def _write(data: np.ndarray[Any, Any]) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(data.data)
        file.flush()
        os.fsync(file.fileno())
