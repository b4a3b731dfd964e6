"""Who may call what. With an identity file, what is not allowed here is refused."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import UserError
from patches.front.tenants import NOBODY, Identity, KeyRing, digest_of, key_ring

# Bodies of these carry an identity to the engine; other ways of generating text would go around it.
STAMPED = frozenset({"/v1/completions", "/v1/chat/completions"})
# What vLLM itself guards with a key (`serve/middleware/authenticate.py`), and our own pages, which tell of all tenants.
_GUARDED = ("/v1", "/v2", "/inference", "/cohere", "/patchbench")
_READING = frozenset({"GET", "HEAD"})
_OPEN_POSTS = frozenset({"/ping"})
_LOOK_EVERY_S = 1.0
# Below vLLM's own logger, whose handler it uses.
_log = logging.getLogger("vllm.patchbench")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. `operator`: it shows vLLM's own key, which opens every endpoint but makes nobody a tenant."""

    identity: Identity
    operator: bool = False


OPERATOR = Caller(NOBODY, operator=True)


def verdict(method: str, path: str, caller: Caller | None) -> int:
    """HTTP status with which a call is refused, 0 for one that is let through.

    Without a key: what vLLM leaves open to read (health, metrics), and the health check. A tenant: the endpoints
    whose requests carry its identity, and the list of models. The operator: everything.
    """
    if method == "OPTIONS":
        return 0
    if method in _READING and not path.startswith(_GUARDED):
        return 0
    if method == "POST" and path in _OPEN_POSTS:
        return 0
    if caller is None:
        return 401
    if caller.operator:
        return 0
    reads_models = method in _READING and (path == "/v1/models" or path.startswith("/v1/models/"))
    return 0 if reads_models or (method == "POST" and path in STAMPED) else 403


class Access:
    """The identity file in a running server; a changed file is taken up within a second.

    A file that can no longer be read changes nothing: who is in stays in, and the reason is kept in `fault`.
    """

    def __init__(self, path: Path) -> None:
        """Read the file; UserError where it is wrong."""
        self._path = path
        self._seen = self._stat()
        self._ring = key_ring(path)
        self._operators = KeyRing(())
        self._look_s = time.monotonic() + _LOOK_EVERY_S
        self.fault = ""

    def admit_operators(self, keys: Iterable[str]) -> None:
        """Take these, vLLM's own keys, for the operator's."""
        self._operators = KeyRing((digest_of(key), NOBODY) for key in keys)

    def caller(self, key: str | None) -> Caller | None:
        """Who shows this key; None for nobody we know."""
        if key is None:
            return None
        now_s = time.monotonic()
        if now_s >= self._look_s:
            self._look_s = now_s + _LOOK_EVERY_S
            self._look()
        identity = self._ring.find(key)
        if identity is not None:
            return Caller(identity)
        return OPERATOR if self._operators.find(key) is not None else None

    def _look(self) -> None:
        try:
            seen = self._stat()
            if seen != self._seen:
                self._ring = key_ring(self._path)
                self._seen, self.fault = seen, ""
        except (OSError, UserError) as error:
            if str(error) != self.fault:
                self.fault = str(error)
                _log.warning("%s; the keys that were read before stay in force", error)

    def _stat(self) -> tuple[int, int, int]:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return (0, 0, 0)
        return (found.st_mtime_ns, found.st_ino, found.st_size)


def bearer(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The key that a request shows; None without one, or with more than one."""
    shown = [value for name, value in headers if name == b"authorization"]
    if len(shown) != 1:
        return None
    scheme, _, key = shown[0].decode("latin-1").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def route(scope: Any) -> str:
    """The path as the application's routes have it."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))
