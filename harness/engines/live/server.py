"""A vLLM server of our own: started, found ready, checked, watched, and ended without a trace.

with launch(arm, model, log_path=..., receipts_dir=...) as server:
    ...  # drive server.base_url; server.check() raises when it may no longer be believed
server.ended  # how it went down
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from harness.arms import Arm
from harness.engines.live import command, ports, processes, readiness, receipt_check, server_log
from harness.engines.live.command import ServeSpec
from harness.engines.live.endpoint import Endpoint
from harness.engines.live.processes import ServerProcess
from harness.engines.live.server_errors import ServerFailed
from harness.errors import RunFailed

START_TIMEOUT_S = 600.0
GRACE_S = command.SHUTDOWN_TIMEOUT_S + 10.0
_GUARD_TIMEOUT_S = 20.0
_RESET_TRIES = 20

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a server went down.

    Attributes:
        seconds: from the wish to end it until none of its processes was left.
        why: `asked`, or `ended` where it went by itself before.
        returncode: of its first process; negative for a signal, None where it is not known.
        killed: pids that did not end in time and were killed.
        shared_memory: names in /dev/shm that it left, and that were removed then.
        left: pids that could not be ended at all.
    """

    seconds: float
    why: str
    returncode: int | None
    killed: tuple[int, ...] = ()
    shared_memory: tuple[str, ...] = ()
    left: tuple[int, ...] = ()

    @property
    def clean(self) -> bool:
        """It ended when asked, and nothing had to be killed or removed."""
        return self.why == "asked" and not (self.killed or self.shared_memory or self.left)

    def json(self) -> dict[str, Any]:
        """As a manifest holds it."""
        return {
            "seconds": round(self.seconds, 3),
            "why": self.why,
            "returncode": self.returncode,
            "killed": len(self.killed),
            "shared_memory_removed": len(self.shared_memory),
            "left": len(self.left),
            "clean": self.clean,
        }


@dataclass(slots=True)
class Server:
    """A running server. Made by `serve` or `launch`, which also end it.

    Attributes:
        model_name: name under which the model is served.
        processes: vLLM's processes when it was found ready.
        start_s: seconds from its start until its first completion.
        command: its command line; the key is not on it.
        ended: how it went down; None while it runs.
    """

    spec: ServeSpec
    port: int
    log_path: Path
    receipts_dir: Path
    command: tuple[str, ...]
    guard: subprocess.Popen[str] = field(repr=False)
    temporary: Path = field(repr=False)
    processes: tuple[ServerProcess, ...] = ()
    start_s: float = 0.0
    ended: Ended | None = None
    _shared: set[str] = field(default_factory=set, repr=False)
    _report: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def base_url(self) -> str:
        """Where it is reached from this machine, without /v1."""
        return ports.url(self.spec.host, self.port)

    @property
    def model_name(self) -> str:
        """Name under which the model is served."""
        return command.model_name(self.spec.model)

    @property
    def api_key(self) -> str:
        """What a request must show; "" if nothing."""
        return self.spec.api_key

    @property
    def endpoint(self) -> Endpoint:
        """For single questions."""
        return Endpoint(self.base_url, self.spec.api_key)

    @property
    def pids(self) -> tuple[int, ...]:
        """Pids of vLLM's processes, the API server's first."""
        return tuple(one.pid for one in self.processes)

    def alive(self) -> bool:
        """Whether all its processes run that ran when it was found ready."""
        return self.exit_reason() is None

    def exit_reason(self) -> str | None:
        """Why it may no longer be believed, or None. Cheap; looks at processes only."""
        if self.ended is not None:
            return "it was shut down"
        if self.guard.poll() is not None:
            return how_it_ended(self._guard_report())
        for one in self.processes:
            if not one.is_alive():
                return f"its {one.role} (pid {one.pid}) ended"
        return None

    @property
    def returncode(self) -> int | None:
        """What its first process returned; None while it runs, or where nobody saw it end."""
        code = self._guard_report().get("returncode") if self.guard.poll() is not None else None
        return code if isinstance(code, int) else None

    def check(self) -> None:
        """Raise ServerFailed, with the last log lines, if it crashed or was restarted."""
        reason = self.exit_reason()
        if reason is None:
            return
        roles = {one.role for one in self.processes if not one.is_alive()}
        now = processes.of_guard(self.guard.pid) if self.guard.poll() is None else ()
        again = [one for one in now if one.role in roles and one not in self.processes]
        if again:
            raise self.failure("server_restart", f"the server restarted: {reason}, and runs anew")
        raise self.failure("server_crashed", f"the server crashed: {reason}")

    def failure(self, code: Any, what: str) -> ServerFailed:
        """The error that says what happened, the first-hand error of the log, its last lines and its place."""
        lines = server_log.tail(self.log_path)
        why = server_log.cause(self.log_path)
        text = f"{what}{f': {why}' if why else ''}; log {self.log_path}"
        told = [line for line in lines if not line.startswith(" ") and "resource_tracker" not in line]
        if told:
            text += f", its last lines: {' / '.join(told[-3:])}"
        return ServerFailed(code, text, lines)

    def receipts(self) -> dict[int, dict[str, Any]]:
        """The patches' receipts by pid; complete once the server has ended."""
        return receipt_check.read(self.receipts_dir)

    def reset_prefix_cache(self) -> None:
        """Empty the KV cache, as between two arms; waits a moment for the last requests to let go of theirs.

        Raises:
            ServerFailed: `cache_not_reset` if it says it did not.
        """
        said = ""
        for _ in range(_RESET_TRIES):
            try:
                status, said = self.endpoint.call("POST", "/reset_prefix_cache", timeout_s=30)
            except OSError as error:
                self.check()
                status, said = 0, str(error)
            if status == 200 and "false" not in said.lower():
                return
            time.sleep(0.1)
        self.check()
        raise ServerFailed("cache_not_reset", f"the server's prefix cache could not be emptied: {said[:200]}")

    def resolved_config(self) -> dict[str, Any]:
        """What vLLM made of its flags, by section. The first call takes seconds of its processor time."""
        status, text = self.endpoint.call("GET", "/server_info?config_format=json", timeout_s=30)
        if status != 200:
            raise RunFailed(f"the server does not tell its configuration: {status} {text[:200]}")
        found: dict[str, Any] = json.loads(text)["vllm_config"]
        return found

    def facts(self) -> dict[str, Any]:
        """What a manifest should hold of it."""
        return {
            "command": list(self.command),
            "start_s": round(self.start_s, 3),
            "compute_cores": server_log.compute_cores(self.log_path),
            "roles": [one.role for one in self.processes],
            "ended": self.ended.json() if self.ended else None,
        }

    def note_shared_memory(self) -> None:
        """Remember what its processes share now, to look for it after they ended."""
        self._shared |= processes.shared_memory(p.pid for p in processes.descendants(self.guard.pid))

    def shutdown(self) -> Ended:
        """End it and all that belongs to it; calling it again changes nothing."""
        if self.ended is not None:
            return self.ended
        begun = time.monotonic()
        if self.guard.poll() is None:
            self.note_shared_memory()
            self.guard.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.guard.wait(GRACE_S + _GUARD_TIMEOUT_S)
        killed = _kill_session(self.guard)
        report = self._guard_report()
        removed = []
        for name in sorted(self._shared):
            path = processes.SHM / name
            if path.exists():
                path.unlink(missing_ok=True)
                removed.append(name)
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.ended = Ended(
            seconds=time.monotonic() - begun,
            why=report.get("why", "ended"),
            returncode=report.get("returncode"),
            killed=(*report.get("killed", ()), *killed),
            shared_memory=tuple(removed),
            left=tuple(processes.in_session(self.guard.pid)),
        )
        return self.ended

    def _guard_report(self) -> dict[str, Any]:
        if self._report is None:
            assert self.guard.stdout is not None
            text = self.guard.stdout.read()
            self.guard.stdout.close()
            try:
                self._report = json.loads(text)
            except ValueError:
                # Killed before it could say anything.
                self._report = {"why": "ended", "guard": self.guard.returncode}
        assert self._report is not None
        return self._report


def how_it_ended(report: Mapping[str, Any]) -> str:
    """A guard's report as words."""
    if "guard" in report:
        return "its guard was killed"
    code = report.get("returncode")
    if isinstance(code, int) and code < 0:
        with contextlib.suppress(ValueError):
            return f"it was ended by {signal.Signals(-code).name}"
    return f"it ended by itself (exit code {code})"


def new_key() -> str:
    """A key for one run."""
    return f"pb-{secrets.token_hex(16)}"


@contextmanager
def launch(
    arm: Arm,
    model_dir: Path | str,
    *,
    log_path: Path,
    receipts_dir: Path,
    port: int = 0,
    host: str = ports.LOOPBACK,
    api_key: str | None = None,
    identity: Path | None = None,
    engine_extra: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    kv_cache_bytes: int = command.KV_CACHE_BYTES,
    module: str = command.VLLM_MODULE,
    start_timeout_s: float = START_TIMEOUT_S,
    say: Say | None = None,
) -> Iterator[Server]:
    """A server for one arm of a run: its flags, its patches, a key of its own, control endpoints on.

    Args:
        log_path: takes all that vLLM prints. receipts_dir: takes a receipt from each patched process.
        api_key: None for a new one. identity, engine_extra, env, kv_cache_bytes, module: see `ServeSpec`.
        say: told, every few seconds, how the start goes.

    Raises:
        UserError: a taken port, a model that is not there, a flag that vLLM does not know.
        ServerFailed: it did not start, or not under the arm's plan.
    """
    spec = ServeSpec(
        model=str(model_dir),
        plan=arm.plan,
        flags=arm.flags,
        extra=tuple(engine_extra),
        host=host,
        port=port,
        api_key=new_key() if api_key is None else api_key,
        identity=identity,
        env=dict(env or {}),
        kv_cache_bytes=kv_cache_bytes,
        module=module,
    )
    with serve(
        spec, log_path=log_path, receipts_dir=receipts_dir, start_timeout_s=start_timeout_s, say=say
    ) as server:
        yield server


@contextmanager
def serve(
    spec: ServeSpec,
    *,
    log_path: Path,
    receipts_dir: Path,
    start_timeout_s: float = START_TIMEOUT_S,
    say: Say | None = None,
) -> Iterator[Server]:
    """Start a server, yield it when a completion came back and every patch is in force, and end it."""
    server = _start(spec, log_path, receipts_dir)
    try:
        began = time.monotonic()
        server.processes = readiness.wait(server, start_timeout_s, say or (lambda _: None))
        server.start_s = time.monotonic() - began
        _check_receipts(server)
        yield server
    finally:
        server.shutdown()


def _start(spec: ServeSpec, log_path: Path, receipts_dir: Path) -> Server:
    port = ports.choose(spec.host, spec.port)
    words = command.words(spec, port)
    receipts_dir.mkdir(parents=True, exist_ok=True)
    for old in receipts_dir.glob("receipt-*.json"):
        old.unlink()
    log_path.parent.mkdir(parents=True, exist_ok=True)
    # Paths of sockets are limited to about 100 bytes, which a run's folder may exceed.
    temporary = Path(tempfile.mkdtemp(prefix="pb-"))
    guard_words = [sys.executable, "-P", "-m", "harness.engines.live.serve_process", str(os.getpid())]
    try:
        with log_path.open("wb") as log:
            guard = _popen([*guard_words, str(GRACE_S), *words], spec, receipts_dir, temporary, log)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Server(replace(spec, port=port), port, log_path, receipts_dir, tuple(words), guard, temporary)


def _popen(
    words: list[str], spec: ServeSpec, receipts_dir: Path, temporary: Path, log: IO[bytes]
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        env=command.environment(spec, receipts_dir, temporary),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        # Ctrl-C on the terminal is ours to hear; what belongs to the server is known by its session.
        start_new_session=True,
    )


def _check_receipts(server: Server) -> None:
    plan = server.spec.plan
    spawned = command.is_cpu_build() or server.spec.env.get("VLLM_WORKER_MULTIPROC_METHOD") == "spawn"
    found = receipt_check.faults(plan, server.processes, server.receipts(), spawned=spawned)
    if found:
        raise ServerFailed(
            "patch_not_loaded",
            f"the server does not run the patches it should: {'; '.join(found)}; nothing was measured; "
            f"log {server.log_path}",
            server_log.tail(server.log_path),
        )


def _kill_session(guard: subprocess.Popen[str]) -> tuple[int, ...]:
    """What a guard left behind, because it was killed itself; nothing otherwise."""
    left = processes.in_session(guard.pid)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while processes.in_session(guard.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    with contextlib.suppress(subprocess.TimeoutExpired):
        guard.wait(1)
    return tuple(left)
