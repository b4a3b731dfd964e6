"""Facts about a server's processes: which there are, what each does, what they listen on and share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

SHM = Path("/dev/shm")
API_SERVER = "APIServer"
_TITLE = "VLLM::"


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """One process of vLLM. Pid and start time together never name another one.

    Attributes:
        role: APIServer, EngineCore, Worker, or what else vLLM calls it, without a rank.
        started_s: its start, in seconds of the system's clock.
    """

    pid: int
    role: str
    started_s: float

    def is_alive(self) -> bool:
        """Whether it still runs; one that nobody has waited for yet does not."""
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.started_s and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def of_guard(guard_pid: int) -> tuple[ServerProcess, ...]:
    """vLLM's processes under a guard, the API server first; helpers of Python's are left out."""
    found = []
    for process in descendants(guard_pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            title = next(iter(process.cmdline()), "")
            if process.ppid() == guard_pid:
                role = API_SERVER
            elif title.startswith(_TITLE):
                role = title.removeprefix(_TITLE).split("_")[0].split(" ")[0]
            else:
                continue
            found.append(ServerProcess(process.pid, role, process.create_time()))
    return tuple(sorted(found, key=lambda one: (one.role != API_SERVER, one.pid)))


def descendants(pid: int) -> list[psutil.Process]:
    """All living processes below one, to any depth."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in below if _lives(process)]


def in_session(session: int) -> list[int]:
    """Pids of living processes of one session, whoever their parent is by now."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.getsid(pid) == session and _lives(psutil.Process(pid)):
                found.append(pid)
    return found


def listens(pids: Iterable[int], port: int) -> bool:
    """Whether one of these processes is it that listens on a TCP port."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            for connection in psutil.Process(pid).net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return True
    return False


def listener(port: int) -> str:
    """Who listens on a TCP port, as `name (pid 12)`; "" where that cannot be seen."""
    with contextlib.suppress(psutil.AccessDenied):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                with contextlib.suppress(psutil.NoSuchProcess):
                    return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Names below /dev/shm that these processes have mapped or open, those deleted already left out."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                place = line.split(maxsplit=5)
                if len(place) == 6 and place[5].startswith(f"{SHM}/") and not place[5].endswith(" (deleted)"):
                    found.add(place[5].removeprefix(f"{SHM}/"))
    return found


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
