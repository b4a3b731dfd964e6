"""The guard of a server: a small process that starts vLLM, and ends all of it whatever happens.

    python -P -m harness.engines.live.serve_process PARENT_PID GRACE_S COMMAND...

It leads a session of its own, and processes below it whose parent dies become its children, so that none
can escape. It ends the server when it is told to (SIGTERM), when the process that started it is gone, or
when the server's first process ends. vLLM's output goes to the guard's standard error; on its standard
output the guard says at the end, as one line of JSON, how it went.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time

from harness.engines.live.processes import descendants

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_WATCHED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
_LOOK_EVERY_S = 0.25
_AFTER_CRASH_S = 3.0
_AFTER_KILL_S = 10.0


class Guard:
    """One server and the processes below it."""

    def __init__(self, command: list[str]) -> None:
        # Blocked from before there is anything to end, so that no signal is missed.
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

        def in_child() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)

        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), preexec_fn=in_child
        )
        self.pid = self._process.pid
        self.returncode: int | None = None

    def watch(self, parent: int) -> str:
        """Wait until there is a reason to end: `asked`, `orphaned` (the parent is gone) or `ended`."""
        while True:
            got = signal.sigtimedwait(_WATCHED, _LOOK_EVERY_S)
            self._reap()
            if got is not None and got.si_signo in (signal.SIGTERM, signal.SIGINT):
                return "asked"
            if self.returncode is not None:
                return "ended"
            if os.getppid() != parent:
                return "orphaned"

    def end(self, grace_s: float) -> list[int]:
        """End all that is left, by SIGTERM to the server and after `grace_s` by SIGKILL; pids of the killed."""
        if self.returncode is None:
            _send([self.pid], signal.SIGTERM)
        else:
            _send(self._left(), signal.SIGTERM)
        if self._wait_for_none(grace_s):
            return []
        killed = self._left()
        _send(killed, signal.SIGKILL)
        self._wait_for_none(_AFTER_KILL_S)
        return killed

    def _wait_for_none(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._left():
            if time.monotonic() > deadline:
                return False
            signal.sigtimedwait({signal.SIGCHLD}, 0.05)
        return True

    def _left(self) -> list[int]:
        self._reap()
        return [process.pid for process in descendants(os.getpid())]

    def _reap(self) -> None:
        """Take note of children that ended, adopted ones too."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.pid:
                    self.returncode = self._process.returncode = os.waitstatus_to_exitcode(status)


def main(arguments: list[str]) -> int:
    """Run a command under guard until it is to end."""
    parent, grace_s, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    guard = Guard(command)
    why = guard.watch(parent)
    crashed = guard.returncode
    killed = guard.end(_AFTER_CRASH_S if why == "ended" else grace_s)
    report = {"why": why, "returncode": crashed if why == "ended" else guard.returncode, "killed": killed}
    with contextlib.suppress(OSError):
        print(json.dumps(report), flush=True)
    return 0


def _send(pids: list[int], signum: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
