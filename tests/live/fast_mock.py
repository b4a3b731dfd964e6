"""The mock server of `scripts/client_throughput.py`: many streams of prepared events for little processor time.

    python -m tests.live.fast_mock TOKEN_RATE TOKENS

It prints its port and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import uvloop
from aiohttp import web

from tests.live.mock_server import serve

MODEL = "mock"
FIRST_TOKEN_S = 0.05
PROMPT_TOKENS = 32


class FastMock:
    """Streams prepared events with one timer a stream; nothing is built while it runs."""

    def __init__(self, token_rate: float, tokens: int) -> None:
        self._interval_s = 1.0 / token_rate
        self._tokens = tokens
        self._first_ns = 0
        self._last_ns = 0
        self._events = 0

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answer with `max_tokens` events of one token."""
        arrived_ns = time.monotonic_ns()
        body = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        transport = request.transport
        assert transport is not None
        loop = asyncio.get_running_loop()
        total = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        # what a tool asks for to see whether anybody is there is not counted
        counts = total == self._tokens
        if counts:
            self._first_ns = self._first_ns or arrived_ns
        ids = bool(body.get("return_token_ids"))
        ended = loop.create_future()
        event, last = _event(ids, None), _event(ids, "length")
        begun = loop.time() + FIRST_TOKEN_S

        def over() -> None:
            if not ended.done():
                ended.set_result(None)

        def send(number: int) -> None:
            if transport.is_closing():
                over()
                return
            self._events += counts
            transport.write(last if number == total - 1 else event)
            if number + 1 < total:
                loop.call_at(begun + (number + 1) * self._interval_s, send, number + 1)
            else:
                over()

        loop.call_at(begun, send, 0)
        await ended
        usage = {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": total,
            "total_tokens": PROMPT_TOKENS + total,
        }
        tail = json.dumps(
            {
                "id": "cmpl-x",
                "object": "text_completion",
                "created": 1,
                "model": MODEL,
                "choices": [],
                "usage": usage,
            }
        )
        await response.write(f"data: {tail}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        if counts:
            self._last_ns = time.monotonic_ns()
        return response

    async def models(self, _: web.Request) -> web.Response:
        """Tools ask for it before they begin."""
        return web.json_response(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "x"}]}
        )

    async def health(self, _: web.Request) -> web.Response:
        """Likewise."""
        return web.Response()

    async def take(self, _: web.Request) -> web.Response:
        """Events since the last question, and when the first request and the last end were."""
        value = {
            "events": self._events,
            "first_ns": self._first_ns,
            "last_ns": self._last_ns,
            "cpu_s": time.process_time(),
        }
        self._events = self._first_ns = self._last_ns = 0
        return web.json_response(value)


def _event(ids: bool, finish: str | None) -> bytes:
    """One event as one HTTP chunk, in the form of vLLM's."""
    choice: dict[str, Any] = {
        "index": 0,
        "text": " token",
        "logprobs": None,
        "finish_reason": finish,
        "stop_reason": None,
    }
    if ids:
        choice["token_ids"] = [4567]
    value = {
        "id": "cmpl-0123456789abcdef",
        "object": "text_completion",
        "created": 1,
        "model": MODEL,
        "choices": [choice],
    }
    data = f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def run_mock(token_rate: float, tokens: int) -> None:
    """The server's process."""
    mock = FastMock(token_rate, tokens)
    routes = [
        web.post("/v1/completions", mock.completions),
        *(web.get("/v1/models", mock.models), web.get("/health", mock.health), web.get("/take", mock.take)),
    ]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(mock, routes))


if __name__ == "__main__":
    run_mock(float(sys.argv[1]), int(sys.argv[2]))
