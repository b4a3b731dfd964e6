"""The ASGI application before vLLM's: lets in who shows a key, writes the caller's identity, answers for refusals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from patches.front.access import STAMPED, Access, Caller, bearer, route, verdict
from patches.front.answer import Answer, Message, Send
from patches.front.events import Events
from patches.front.pace import Pace
from patches.front.refusals import Refusal, plain_error
from patches.front.stamp import NotReadableError, stamp

Receive = Callable[[], Awaitable[Message]]
App = Callable[[Any, Receive, Send], Awaitable[None]]

# A prompt of a million token ids takes some 7 MiB, a few large pictures some tens.
MAX_BODY_BYTES = 64 << 20
# vLLM takes a request's priority from this header before it looks into the body.
_PRIORITY_HEADER = b"x-vllm-priority"
_KEY = frozenset({b"authorization"})
_REWRITTEN = _KEY | frozenset({b"content-length", b"transfer-encoding", _PRIORITY_HEADER})
_KINDS = {
    400: ("BadRequestError", "the request cannot be read"),
    401: ("AuthenticationError", "show a key of this server: Authorization: Bearer KEY"),
    403: ("PermissionDeniedError", "this key opens /v1/completions, /v1/chat/completions and /v1/models"),
    413: ("RequestTooLargeError", f"a request may have {MAX_BODY_BYTES} bytes"),
}


class _TooLargeError(Exception):
    """A body beyond the limit."""


class Front:
    """Middleware for `Starlette.add_middleware`, to be the outermost one.

    Args:
        app: what comes after it. access: who may come in; None lets everybody in as before.
        takes_priority: asked per request whether the server orders by priority.
        operator_keys: asked once, with the scope of the first request: vLLM's own keys.
        paced: whether vLLM's own refusals (503) say when to come again, by the pace of what is answered.
    """

    def __init__(
        self,
        app: App,
        access: Access | None = None,
        events: Events | None = None,
        *,
        takes_priority: Callable[[Any], bool] = lambda _: True,
        operator_keys: Callable[[Any], Iterable[str]] = lambda _: (),
        max_body_bytes: int = MAX_BODY_BYTES,
        paced: bool = False,
    ) -> None:
        self._app = app
        self._access = access
        self._events = events or Events()
        self._takes_priority = takes_priority
        self._operator_keys = operator_keys
        self._own_keys: list[str] | None = None
        self._max_body_bytes = max_body_bytes
        self._pace = Pace() if paced else None

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        kind = scope["type"]
        if kind not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        caller: Caller | None = None
        if self._access is not None:
            caller = self._caller(scope)
            status = verdict(scope.get("method", "WEBSOCKET"), route(scope), caller)
            if status:
                await self._turn_away(scope, receive, send, status, caller)
                return
            if kind == "http" and scope["method"] == "POST" and route(scope) in STAMPED:
                assert caller is not None
                admitted = await self._stamped(scope, receive, send, caller)
                if admitted is None:
                    return
                scope, receive = admitted
            elif caller is not None:
                scope = {**scope, "headers": self._headers(scope, _KEY)}
        if kind == "websocket" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        tenant = "" if caller is None else caller.identity.tenant
        answer = Answer(send, lambda refusal, begun: self._refused(refusal, begun, tenant), self._pace)
        await self._app(scope, receive, answer)
        await answer.flush()

    # who

    def _caller(self, scope: Any) -> Caller | None:
        assert self._access is not None
        if self._own_keys is None:
            self._own_keys = [key for key in self._operator_keys(scope) if key]
            self._access.admit_operators(self._own_keys)
        return self._access.caller(bearer(scope["headers"]))

    async def _turn_away(
        self, scope: Any, receive: Receive, send: Send, status: int, caller: Caller | None
    ) -> None:
        if status == 401:
            event = (
                "unknown_key" if any(name == b"authorization" for name, _ in scope["headers"]) else "no_key"
            )
        else:
            event = "forbidden"
        self._note(event, scope, caller)
        if scope["type"] == "websocket":
            # Before it was accepted, this refuses the handshake.
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
        else:
            await _refuse(send, status)

    # the request

    async def _stamped(
        self, scope: Any, receive: Receive, send: Send, caller: Caller
    ) -> tuple[Any, Receive] | None:
        """The request with its caller's identity; None where it has been answered already, or is gone."""
        try:
            body = await self._read(scope, receive)
        except _TooLargeError:
            self._note("too_large", scope, caller)
            await _refuse(send, 413)
            return None
        if body is None:
            return None
        identity = caller.identity
        try:
            body, claims = stamp(body, identity, priority=self._takes_priority(scope))
        except NotReadableError as error:
            await _refuse(send, 400, str(error))
            return None
        asked = _header(scope, _PRIORITY_HEADER)
        if asked is not None and not _no_better(asked, identity.priority):
            claims["priority"] = asked[:64]
        for field in claims:
            self._note(f"claimed_{field}", scope, caller, {"claims": claims})
        headers = [*self._headers(scope, _REWRITTEN), (b"content-length", b"%d" % len(body))]
        return {**scope, "headers": headers}, _replayed(body, receive)

    async def _read(self, scope: Any, receive: Receive) -> bytes | None:
        """The whole body; None where the caller left."""
        said = _header(scope, b"content-length") or ""
        if said.isdigit() and len(said) < 20 and int(said) > self._max_body_bytes:
            raise _TooLargeError
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body_bytes:
                raise _TooLargeError
            if not message.get("more_body", False):
                return b"".join(parts)

    def _headers(self, scope: Any, dropped: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
        """The caller's headers less `dropped`; with vLLM's own key in place of the caller's where vLLM wants one."""
        headers = [(name, value) for name, value in scope["headers"] if name not in dropped]
        if self._own_keys:
            headers.append((b"authorization", b"Bearer " + self._own_keys[0].encode()))
        return headers

    # the record

    def _refused(self, refusal: Refusal, begun: bool, tenant: str) -> None:
        assert refusal.ending is not None
        self._events.add(refusal.ending.code, tenant, {"status": refusal.status, "begun": begun})

    def _note(self, event: str, scope: Any, caller: Caller | None, detail: Any = None) -> None:
        about = {
            "path": str(scope["path"])[:128],
            "client": (scope.get("client") or ("",))[0],
            "request_id": (_header(scope, b"x-request-id") or "")[:128],
        }
        self._events.add(event, "" if caller is None else caller.identity.tenant, about | (detail or {}))


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives this body, and then what the caller does: above all, that it left."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _refuse(send: Send, status: int, message: str = "") -> None:
    kind, text = _KINDS[status]
    body = plain_error(status, kind, message or text)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _header(scope: Any, wanted: bytes) -> str | None:
    """The first header of this name."""
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), None)


def _no_better(asked: str, own: int) -> bool:
    try:
        return int(asked) >= own
    except ValueError:
        # vLLM ignores what is no number.
        return True
