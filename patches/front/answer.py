"""The way back: holds an answer's first line until it is known whether it is one of success."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from patches.front import refusals
from patches.front.pace import Pace
from patches.front.refusals import ERROR_EVENT, Refusal

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

_MAX_ERROR_BYTES = 64 << 10
_REPLACED = frozenset({b"content-type", b"content-length", b"retry-after", b"transfer-encoding"})


class Answer:
    """Stands in for `send`. vLLM says 200 to a streaming request before the engine has seen it.

    The status line of a stream, and an error's, waits for the first part of the body: a request that was ended by then
    gets a status that says so. Later parts pass at once; an error among them is written out in full. With a `pace`,
    a refusal of vLLM's own says when to come again.
    """

    __slots__ = ("_body", "_on_refusal", "_over", "_pace", "_passing", "_send", "_start", "_streams")

    def __init__(
        self, send: Send, on_refusal: Callable[[Refusal, bool], None], pace: Pace | None = None
    ) -> None:
        """`on_refusal(refusal, begun)` hears of each request that a patch ended; `begun`: after the first byte."""
        self._send = send
        self._on_refusal = on_refusal
        self._pace = pace
        self._start: Message | None = None
        self._streams = False
        self._body = b""
        self._passing = False
        self._over = False

    async def __call__(self, message: Message) -> None:
        """Send one message of the application's."""
        if self._passing:
            if message["type"] == "http.response.body" and message.get("body", b"").startswith(ERROR_EVENT):
                message = self._in_stream(message)
            await self._send(message)
        elif self._over:
            return
        elif message["type"] == "http.response.start":
            await self._begin(message)
        elif self._start is not None and message["type"] == "http.response.body":
            await self._first(message)
        else:
            await self.flush()
            await self._send(message)

    async def flush(self) -> None:
        """Send what is held; the application has ended, or will say no more that matters."""
        if self._start is not None:
            start, self._start, self._passing = self._start, None, True
            await self._send(start)
            if self._body:
                await self._send({"type": "http.response.body", "body": self._body, "more_body": True})
                self._body = b""

    async def _begin(self, message: Message) -> None:
        self._streams = message["status"] == 200 and any(
            name == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in message.get("headers", ())
        )
        if self._streams or message["status"] in refusals.BEFORE_FIRST_BYTE:
            self._start = message
        else:
            if self._pace is not None and message["status"] == 200:
                self._pace.served()
            self._passing = True
            await self._send(message)

    async def _first(self, message: Message) -> None:
        chunk, more = message.get("body", b""), message.get("more_body", False)
        if self._streams:
            if not chunk and more:
                return
            refusal = refusals.of_event(chunk)
        else:
            self._body += chunk
            if more and len(self._body) <= _MAX_ERROR_BYTES:
                return
            refusal = None if more else refusals.of_body(self._body)
            message = {"type": "http.response.body", "body": self._body, "more_body": more}
            self._body = b""
        if (
            self._pace is not None
            and refusal is not None
            and refusal.ending is None
            and refusal.status == 503
        ):
            refusal = refusal.later(self._pace.refused())
        if refusal is None or (
            refusal.retry_after_s is None and refusal.ending is None and not self._streams
        ):
            if self._pace is not None and self._streams:
                self._pace.served()
            await self.flush()
            await self._send(message)
        else:
            await self._refuse(refusal)

    async def _refuse(self, refusal: Refusal) -> None:
        assert self._start is not None
        kept = [(name, value) for name, value in self._start.get("headers", ()) if name not in _REPLACED]
        self._start, self._over = None, True
        if refusal.ending is not None:
            self._on_refusal(refusal, False)
        headers = [*kept, *refusal.headers]
        await self._send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": refusal.body, "more_body": False})

    def _in_stream(self, message: Message) -> Message:
        refusal = refusals.of_event(message["body"])
        if refusal is None or refusal.ending is None:
            return message
        self._on_refusal(refusal, True)
        return {**message, "body": refusal.event}
