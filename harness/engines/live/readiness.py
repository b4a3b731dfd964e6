"""Waiting for a server: it is ready when it has answered a completion, and a dead one is seen at once."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.engines.live import processes, server_log
from harness.engines.live.processes import ServerProcess
from harness.engines.live.server_errors import ServerFailed
from harness.errors import UserError

if TYPE_CHECKING:
    from harness.engines.live.server import Server

_LOOK_EVERY_S = 0.1
# An API server whose engine has ended says so and ends within this, or, as vLLM 0.32.0 does when that happens right
# after their handshake, waits for ever.
_ENGINE_GONE_S = 5.0
# Exit code of a command line that is not understood.
_USAGE = 2
_SAY_EVERY_S = 5.0
# The first completion may have to wait for kernels to be compiled.
_COMPLETION_TIMEOUT_S = 120.0
# Ids that every vocabulary has, and no text: a server without a tokenizer answers too.
_PROMPT = [3, 4, 5, 6]


def wait(server: Server, timeout_s: float, say: Callable[[str], None]) -> tuple[ServerProcess, ...]:
    """Block until the server has answered; returns its processes.

    Raises:
        UserError: vLLM refused a flag.
        ServerFailed: start_failed, start_timeout, or foreign_server: somebody else answers on the port.
    """
    began = time.monotonic()
    said = began
    engine = _EngineWatch()
    while True:
        if server.exit_reason() is not None:
            raise _start_failed(server)
        if gone := engine.gone(server):
            raise server.failure("start_failed", f"the server did not start: {gone}")
        waited = time.monotonic() - began
        if waited > timeout_s:
            raise server.failure("start_timeout", f"the server was not ready within {timeout_s:.0f} s")
        server.note_shared_memory()
        if _is_up(server):
            _check_ours(server)
            _complete(server, min(_COMPLETION_TIMEOUT_S, max(5.0, timeout_s - waited)))
            return processes.of_guard(server.guard.pid)
        if time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            say(f"waiting for vLLM, {waited:.0f} s: {server_log.status(server.log_path)}")
        time.sleep(_LOOK_EVERY_S)


class _EngineWatch:
    """Notices an engine's process that ended while its API server still waits for it."""

    _LOOK_EVERY_S = 1.0

    def __init__(self) -> None:
        self._seen: dict[int, ServerProcess] = {}
        self._look_at = self._gone_at = 0.0

    def gone(self, server: Server) -> str:
        """Which engine process is gone, once its API server has had time to say so itself; else ""."""
        now = time.monotonic()
        if now < self._look_at:
            return ""
        self._look_at = now + self._LOOK_EVERY_S
        self._seen |= {
            one.pid: one for one in processes.of_guard(server.guard.pid) if one.role.startswith("EngineCore")
        }
        ended = next((one for one in self._seen.values() if not one.is_alive()), None)
        if ended is None:
            self._gone_at = 0.0
            return ""
        self._gone_at = self._gone_at or now
        if now - self._gone_at < _ENGINE_GONE_S:
            return ""
        return f"its {ended.role} (pid {ended.pid}) ended, and the API server waits for it for ever"


def _is_up(server: Server) -> bool:
    try:
        return server.endpoint.call("GET", "/health", timeout_s=5)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def _check_ours(server: Server) -> None:
    pids = [process.pid for process in processes.descendants(server.guard.pid)]
    if processes.listens(pids, server.port):
        return
    owner = processes.listener(server.port) or "another process"
    raise ServerFailed(
        "foreign_server",
        f"port {server.port} is answered by {owner}, which is not the server that was started; "
        "nothing was measured: choose another port",
        server_log.tail(server.log_path),
    )


def _complete(server: Server, timeout_s: float) -> None:
    body = {"model": server.model_name, "prompt": _PROMPT, "max_tokens": 1, "temperature": 0}
    try:
        status, text = server.endpoint.call("POST", "/v1/completions", body, timeout_s)
    except (OSError, http.client.HTTPException) as error:
        if server.exit_reason() is not None:
            raise _start_failed(server) from None
        raise server.failure("start_failed", f"the server's first completion failed: {error}") from None
    if status != 200 or _tokens(text) != 1:
        raise server.failure(
            "start_failed", f"the server's first completion failed: {status} {' '.join(text.split())[:300]}"
        )


def _tokens(text: str) -> Any:
    try:
        return json.loads(text)["usage"]["completion_tokens"]
    except (ValueError, KeyError, TypeError):
        return None


def _start_failed(server: Server) -> Exception:
    refused = server_log.usage_error(server.log_path)
    if refused and server.returncode == _USAGE:
        return UserError(f"vLLM refuses its flags: {refused}; `vllm serve --help=all` lists them")
    return server.failure("start_failed", f"the server did not start: {server.exit_reason()}")
