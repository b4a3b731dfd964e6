"""The sampler's process: `python -m harness.engines.live.gpu --out gpu.parquet --epoch-ns N`.

It says on standard output, as one line of JSON each, first `ready` (with the GPUs) or `absent` (with the reason, and
that is all), and at the end `done`. It ends in good order when its standard input is closed, on SIGTERM, or
when its parent is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.engines.live.gpu.facts import Absent
from harness.engines.live.gpu.loop import sample
from harness.engines.live.gpu.nvml import open_gpus
from harness.engines.live.gpu.samples import GPUS_KEY
from harness.engines.live.gpu.writer import Writer

# How long after its parent is gone a sampler notices that, at most.
_LOOK_NS = 1_000_000_000


class Stop:
    """Waits for the next tick, or for the reason to end."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # A signal must wake the select, which Python resumes after a handler.
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        # Ctrl-C is the parent's to answer.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait(self, until_ns: int) -> bool:
        """Sleep until a time of the monotonic clock; true where sampling is to end."""
        while True:
            left = min(max(until_ns - time.monotonic_ns(), 0), _LOOK_NS)
            found, _, _ = select.select([0, self._woken], [], [], left / 1e9)
            if self._woken in found:
                return True
            if 0 in found and not os.read(0, 4096):
                return True
            # a process forked from the parent may hold the other end of standard input open
            if os.getppid() != self._parent:
                return True
            if time.monotonic_ns() >= until_ns:
                return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Sample until told to stop; 0 also where there is no GPU."""
    parser = argparse.ArgumentParser(description="Samples GPUs through NVML into a Parquet file.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epoch-ns", type=int, required=True)
    parser.add_argument("--period-ns", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--first", type=int)
    given = parser.parse_args(arguments)

    stop = Stop(given.parent)
    opened = open_gpus(
        os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"), given.first
    )
    if isinstance(opened, Absent):
        _say("absent", opened.json())
        return 0
    gpus = [gpu.json() for gpu in opened.gpus]
    try:
        writer = Writer(given.out, {GPUS_KEY: json.dumps(gpus).encode(), b"driver": opened.driver.encode()})
        conduct = sample(
            opened.devices,
            writer,
            clock=time.monotonic_ns,
            wait=stop.wait,
            period_ns=given.period_ns,
            epoch_ns=given.epoch_ns,
            ready=lambda: _say("ready", {"gpus": gpus, "driver": opened.driver}),
        )
        writer.finish()
    except OSError as error:
        print(f"{given.out.name} could not be written: {error.strerror or error}", file=sys.stderr)
        return 1
    nulls = [
        {"uuid": device.facts.uuid, "field": name, "said": said, "samples": count}
        for device in opened.devices
        for (name, said), count in sorted(device.nulls.items())
    ]
    _say("done", {**conduct.json(), "nulls": nulls})
    return 0


def _say(what: str, value: dict[str, Any]) -> None:
    # nobody may be left to read it
    with contextlib.suppress(BrokenPipeError):
        os.write(1, (json.dumps({"said": what, **value}) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
