"""One request over HTTP: sent once, never again, read to its end, its cancellation or a limit of patience."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import numpy as np
from yarl import URL

from harness.engines.live.client.chunk import body_message, one_line
from harness.engines.live.client.observed import Observed
from harness.engines.live.client.reading import EXPIRED, REFUSALS, Reading
from harness.engines.live.client.sends import Send
from harness.engines.live.client.target import Options, Target, seconds_of

# An error body says what it has to say in its first lines.
_MAX_ERROR_BYTES = 64 << 10
# After [DONE] only the end of the body is due; a server that does not send it loses the connection, no more.
_END_GRACE_S = 1.0

CANCELLED = "the client closed the stream"


class Stream:
    """Runs one request and keeps what was seen of it.

    `run` never raises for what the server or the network did; the outcome is in `observed`.
    """

    __slots__ = (
        "_end_ns",
        "_epoch_ns",
        "_headers_ns",
        "_http_status",
        "_limits",
        "_reading",
        "_retry_after_s",
        "_send",
        "_sent_ns",
        "_stopped",
        "_task",
    )

    def __init__(self, send: Send, epoch_ns: int, keep_ids: bool) -> None:
        self._send = send
        self._epoch_ns = epoch_ns
        self._reading = Reading(keep_ids)
        self._task: asyncio.Task[None] | None = None
        self._limits: list[asyncio.TimerHandle] = []
        self._stopped: tuple[str, str] | None = None
        self._sent_ns: int | None = None
        self._headers_ns: int | None = None
        self._end_ns: int | None = None
        self._http_status: int | None = None
        self._retry_after_s: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens received so far."""
        return self._reading.output_tokens

    async def run(
        self, session: aiohttp.ClientSession, target: Target, url: URL, body: bytes, o: Options
    ) -> None:
        """Send the request and read its answer."""
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._sent_ns = sent_ns = self._now()
        self._limits = [
            loop.call_later(o.first_token_timeout_s, self._no_token_yet, o.first_token_timeout_s),
            loop.call_later(
                o.total_timeout_s, self._stop, "failed", f"not ended within {o.total_timeout_s:g} s"
            ),
        ]
        if self._send.cancel_ns is not None:
            rest_s = (self._send.cancel_ns - sent_ns) / 1e9
            self._limits.append(loop.call_later(max(0.0, rest_s), self._stop, "cancelled", CANCELLED))
        try:
            await self._exchange(session, target, url, body)
        except asyncio.CancelledError:
            if self._stopped is None:
                raise
            self._end(*self._stopped)
        except aiohttp.ConnectionTimeoutError:
            self._end("failed", f"no connection within {o.connect_timeout_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._end("failed", _spoken(error))
        finally:
            for limit in self._limits:
                limit.cancel()
            if self._end_ns is None:
                self._end_ns = self._now()

    @property
    def observed(self) -> Observed:
        """What was seen; complete once `run` has returned."""
        r = self._reading
        chunk_ns = np.array(r.chunk_ns, dtype=np.int64)
        return Observed(
            request_id=self._send.request_id,
            intended_ns=self._send.intended_ns,
            sent_ns=self._sent_ns,
            headers_ns=self._headers_ns,
            first_token_ns=int(chunk_ns[0]) if len(chunk_ns) else None,
            first_output_token_ns=r.first_output_ns,
            last_token_ns=int(chunk_ns[-1]) if len(chunk_ns) else None,
            end_ns=self._end_ns,
            status=r.status or "failed",
            http_status=self._http_status,
            reason=r.reason if r.status else "the run ended before the answer did",
            retry_after_s=self._retry_after_s,
            prompt_tokens_counted=r.prompt_tokens,
            cached_tokens=r.cached_tokens,
            output_tokens=r.output_tokens,
            output_tokens_said=r.output_tokens_said,
            tokens_exact=r.exact,
            finish_reason=r.finish_reason,
            server_request_id=r.server_id,
            chunk_ns=chunk_ns,
            chunk_tokens=np.array(r.chunk_tokens, dtype=np.int32),
            token_ids=np.array(r.token_ids, dtype=np.int32) if r.keeps_ids else None,
        )

    async def _exchange(self, session: aiohttp.ClientSession, target: Target, url: URL, body: bytes) -> None:
        headers = {"X-Request-Id": self._send.request_id, "Content-Type": "application/json"}
        if key := target.key_of(self._send.identity.get("tenant")):
            headers["Authorization"] = f"Bearer {key}"
        response = await session.post(url, data=body, headers=headers, allow_redirects=False)
        try:
            self._headers_ns = self._now()
            self._http_status = response.status
            if response.status != 200:
                await self._refused(response)
            elif response.content_type != "text/event-stream":
                self._end("failed", f"the answer is {one_line(response.content_type, 60)}, no event stream")
            else:
                await self._read(response)
        finally:
            # Also drops the connection unless the body was read to its end: so the server sees a cancellation.
            response.close()

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        reading, epoch_ns, clock = self._reading, self._epoch_ns, time.monotonic_ns
        feed, read = reading.feed, response.content.readany
        while data := await read():
            feed(clock() - epoch_ns, data)
            if reading.status:
                break
        if reading.status == "ok":
            self._end_ns = reading.done_ns
            # The tail of the body frees the connection for the next request.
            self._limits.append(asyncio.get_running_loop().call_later(_END_GRACE_S, self._stop, "", ""))
            while data := await read():
                feed(clock() - epoch_ns, data)
            if reading.status != "ok":
                self._end_ns = self._now()
        else:
            reading.end()
            self._end_ns = self._now()

    async def _refused(self, response: aiohttp.ClientResponse) -> None:
        body = bytearray()
        while len(body) < _MAX_ERROR_BYTES and (data := await response.content.readany()):
            body += data
        said = body_message(bytes(body[:_MAX_ERROR_BYTES])) or one_line(response.reason or "")
        if response.status in REFUSALS:
            headers = response.headers
            self._retry_after_s = seconds_of(headers.get("Retry-After"), headers.get("Date"))
            self._end("rejected", said)
        elif response.status == EXPIRED:
            self._end("expired", said)
        else:
            self._end("failed", f"HTTP {response.status}: {said}" if said else f"HTTP {response.status}")

    def _no_token_yet(self, limit_s: float) -> None:
        if not self._reading.output_tokens:
            self._stop("failed", f"no token within {limit_s:g} s")

    def _stop(self, status: str, reason: str) -> None:
        """End the exchange from outside: the connection is closed as the task unwinds."""
        if self._stopped is None and self._task is not None and not self._task.done():
            self._stopped = (status, reason)
            self._task.cancel()

    def _end(self, status: str, reason: str) -> None:
        """Settle the outcome, unless the stream had already told it."""
        if not self._reading.status:
            self._reading.status, self._reading.reason = status, reason
        if self._end_ns is None:
            self._end_ns = self._now()

    def _now(self) -> int:
        return time.monotonic_ns() - self._epoch_ns


def _spoken(error: BaseException) -> str:
    """An error of the network in a few words."""
    if isinstance(error, aiohttp.ClientConnectorError):
        why = error.os_error.strerror or str(error.os_error) or type(error.os_error).__name__
        return f"no connection: {one_line(why, 120).lower()}"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the server closed the connection before it answered"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection broke off in the middle of the answer"
    if isinstance(error, ConnectionResetError) or (isinstance(error, OSError) and error.errno == 104):
        return "the server reset the connection"
    return one_line(f"{type(error).__name__}: {error}", 160)
