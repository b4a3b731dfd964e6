"""The process that drives one share of a workload: `python -m harness.engines.live.client.worker FOLDER NUMBER`.

It reads a line with the API keys, says `ready`, reads a line with the run's start, drives, writes what it saw and says
`done`. When its standard input ends, so does it: a parent that was killed leaves no client behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from harness.engines.live.client.files import Folder, read_sends, write_loop, write_observed
from harness.engines.live.client.open_loop import Progress, run_loop
from harness.engines.live.client.target import Options, Target

JOB = "job.json"
STOPPED = 3


class Job(msgspec.Struct):
    """What all workers of a run share; the API keys come by another way, so that no file holds them."""

    target: msgspec.Raw
    options: msgspec.Raw


class End(msgspec.Struct):
    """What a worker says of itself at the end."""

    cpu_s: float
    wall_s: float
    queued_s: float | None
    pauses_ns: list[int]


def main(folder: Path, number: int) -> int:
    """Drive one share; the exit code."""
    files = Folder(folder, number)
    job = msgspec.json.decode((folder / JOB).read_bytes(), type=Job)
    with open(0, "rb", buffering=0, closefd=False) as control:
        keys = msgspec.json.decode(control.readline(), type=dict[str, Any])
        target = Target.model_validate_json(bytes(job.target)).model_copy(update=keys)
        options = Options.model_validate_json(bytes(job.options))
        sends = read_sends(files.sends)
        _allow_many_connections()
        # what has been loaded need not be looked at again when the start is near
        gc.collect()
        gc.freeze()
        _say("ready")
        line = control.readline()
    if not line.endswith(b"\n"):
        return STOPPED
    try:
        replayed = run_loop(sends, target, options, int(line), _tell, _attach)
    except asyncio.CancelledError:
        return STOPPED
    write_observed(files.observed, replayed.observed)
    write_loop(files.loop, replayed.loop)
    end = End(replayed.cpu_s, replayed.wall_s, replayed.queued_s, replayed.loop.pauses_ns.tolist())
    files.end.write_bytes(msgspec.json.encode(end))
    _say("done")
    return 0


def _attach(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    """Anything on standard input, its end above all, stops the replay."""

    def heard() -> None:
        loop.remove_reader(0)
        stop()

    loop.add_reader(0, heard)


def _tell(progress: Progress) -> None:
    _say(f"progress {progress.sent} {progress.ended} {progress.tokens}")


def _say(line: str) -> None:
    # a parent that is gone is noticed on standard input
    with contextlib.suppress(BrokenPipeError):
        os.write(1, line.encode() + b"\n")


def _allow_many_connections() -> None:
    """Each open stream is a file; the soft limit is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        wanted = 1 << 20 if hard == resource.RLIM_INFINITY else hard
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            return


if __name__ == "__main__":
    # In a block of its own: what is at module level would run again in anything that imports this module.
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
