"""Drives an ASGI application by hand: what it is sent, when its caller leaves, and what it answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patches.front.access import Access
from patches.front.events import Events
from patches.front.middleware import Front
from patches.front.tenants import digest_of

GOLD, SILVER, OPERATOR = "gold-key", "silver-key", "operator-key"
FILE = f"""
[gold-a]
tier = "gold"
weight = 4
priority = -1
slo_ttft_ms = 200.0
keys = ["{digest_of(GOLD)}"]

[silver-b]
tier = "silver"
weight = 2.0
keys = ["{digest_of(SILVER)}"]
"""
PATH = "/v1/completions"


def identity_file(folder: Path, text: str = FILE) -> Path:
    """An identity file with two tenants."""
    path = folder / "identity.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


@dataclass
class Answered:
    """What came back, message by message."""

    sent: list[dict[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> int:
        """Of the only start that was sent."""
        (start,) = [message for message in self.sent if message["type"] == "http.response.start"]
        return int(start["status"])

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer, none of them twice."""
        (start,) = [message for message in self.sent if message["type"] == "http.response.start"]
        pairs = [(name.decode(), value.decode()) for name, value in start["headers"]]
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    @property
    def bodies(self) -> list[bytes]:
        """Parts of the body."""
        return [m.get("body", b"") for m in self.sent if m["type"] == "http.response.body"]

    @property
    def body(self) -> bytes:
        """The whole of it."""
        return b"".join(self.bodies)

    @property
    def error(self) -> dict[str, Any]:
        """The error object of the body."""
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


class Recorder:
    """An application that keeps what it was asked and answers as told."""

    def __init__(self, *answer: dict[str, Any], on_body: Callable[[], None] | None = None) -> None:
        self.answer = answer or (start(200, b"application/json"), part(b"{}", more=False))
        self.scopes: list[Any] = []
        self.bodies: list[bytes] = []
        self.left = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Read the body, answer, and then look once more whether the caller left."""
        self.scopes.append(scope)
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            assert message["type"] == "http.request"
            body += message["body"]
            more = message["more_body"]
        self.bodies.append(body)
        for message in self.answer:
            await send(message)
        self.left = (await receive())["type"] == "http.disconnect"

    @property
    def json(self) -> Any:
        """The only body it got."""
        (body,) = self.bodies
        return json.loads(body)

    @property
    def headers(self) -> dict[str, str]:
        """Of the only request it got."""
        (scope,) = self.scopes
        return {name.decode(): value.decode() for name, value in scope["headers"]}


def start(status: int, kind: bytes = b"text/event-stream; charset=utf-8") -> dict[str, Any]:
    """The first message of an answer."""
    headers = [(b"content-type", kind), (b"x-request-id", b"r1")]
    return {"type": "http.response.start", "status": status, "headers": headers}


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    """Some of an answer's body."""
    return {"type": "http.response.body", "body": body, "more_body": more}


def call(
    app: Any,
    parts: Sequence[bytes] = (b"{}",),
    *,
    key: str | None = GOLD,
    method: str = "POST",
    path: str = PATH,
    headers: Sequence[tuple[bytes, bytes]] = (),
    kind: str = "http",
    leaves_after: int | None = None,
) -> Answered:
    """Ask once.

    Args:
        parts: of the body. leaves_after: the caller is gone after so many of them.
    """
    answered = Answered()
    shown = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": kind, "path": path, "root_path": "", "headers": [*shown, *headers], "client": ("::1", 1)}
    if kind == "http":
        scope["method"] = method
    incoming = [
        {"type": "http.request", "body": body, "more_body": i < len(parts) - 1}
        for i, body in enumerate(parts)
    ][:leaves_after]
    if kind == "websocket":
        incoming = [{"type": "websocket.connect"}]

    async def receive() -> dict[str, Any]:
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        answered.sent.append(dict(message))

    asyncio.run(app(scope, receive, send))
    return answered


def front(app: Any, file: Path | None, events: Events | None = None, **values: Any) -> Front:
    """The front before an application, with an operator's key."""
    access = None if file is None else Access(file)
    return Front(app, access, events, operator_keys=lambda _: [OPERATOR], **values)
