"""A server that streams what it is told to, in a process of its own, on a loopback port that was free.

`with MockServer({"*": Scenario(...), "request-7": Scenario(...)}) as mock:` gives `mock.url`; a request takes the
scenario of its X-Request-Id, else that of "*". `mock.seen()` says what arrived, and who was cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from aiohttp import web

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Scenario:
    """How one request is answered; times in seconds."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    content_type: str = "text/event-stream"
    body: str = ""  # in place of a stream
    headers_s: float = 0.0  # until the status line
    role_s: float | None = None  # an event with a role and no token, this long after the headers
    first_s: float = 0.0  # until the first token, after what came before
    interval_s: float = 0.0
    per_chunk: tuple[int, ...] = (1,)  # tokens in each event; the last number repeats
    tokens: int | None = None  # None: as many as were asked for
    reasoning: int = 0  # so many of them are reasoning
    chat: bool = False  # deltas in place of text
    counting: str = "ids"  # ids, usage or none
    text: str = " tokén"
    line_end: str = "\n"
    prefix: str = ""  # before the first event, as a mark or a comment
    split: int = 0  # bytes a write; 0: an event a write
    error_after: int | None = None  # an error object after so many tokens, and the end
    error: str = '{"error": {"message": "device lost", "type": "InternalServerError", "code": 500}}'
    stall_after: int | None = None  # nothing more after so many tokens
    drop_after: int | None = None  # the connection is reset after so many tokens
    finish: str = "length"
    stop_reason: str | None = None
    done: bool = True
    after_done: str = ""
    hang_after_done: bool = False
    said: int | None = None  # completion_tokens of the last usage, if other than true
    cached: int | None = None


class MockServer:
    """The server's process, from the outside."""

    def __init__(self, scenarios: Mapping[str, Scenario] | None = None) -> None:
        self._scenarios = {name: asdict(s) for name, s in (scenarios or {"*": Scenario()}).items()}
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    @property
    def pid(self) -> int:
        """Of the server's process."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> MockServer:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.live.mock_server"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(self._scenarios).encode() + b"\n")
        self._process.stdin.flush()
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        # it ends with its standard input
        self._process.communicate(timeout=10)

    def seen(self) -> dict[str, Any]:
        """By request id: body, headers, tokens written, whether the client left; times on CLOCK_MONOTONIC."""
        with urllib.request.urlopen(f"{self.url}/seen", timeout=10) as answer:
            value: dict[str, Any] = json.load(answer)
        return value


class _Server:
    def __init__(self, scenarios: dict[str, Any]) -> None:
        self._scenarios = msgspec.convert(scenarios, dict[str, Scenario])
        self.seen: dict[str, Any] = {}

    async def completions(self, request: web.Request) -> web.StreamResponse:
        arrived_ns = time.monotonic_ns()
        body = await request.json()
        name = request.headers.get("X-Request-Id", f"unnamed-{len(self.seen)}")
        scenario = self._scenarios.get(name) or self._scenarios["*"]
        note = {
            "arrived_ns": arrived_ns,
            "headers": dict(request.headers),
            "body": {**body, "prompt": len(body.get("prompt", ()))},
            "times": int(self.seen.get(name, {}).get("times", 0)) + 1,
            "tokens": 0,
            "left": False,
        }
        self.seen[name] = note
        try:
            await asyncio.sleep(scenario.headers_s)
            headers = dict(scenario.headers)
            if scenario.body or scenario.status != 200:
                return web.Response(
                    status=scenario.status,
                    text=scenario.body,
                    headers=headers,
                    content_type="application/json",
                )
            response = web.StreamResponse(headers={**headers, "Content-Type": scenario.content_type})
            await response.prepare(request)
            await _Answer(scenario, request, response, body, name, note).stream()
            note["ended_ns"] = time.monotonic_ns()
            return response
        except (asyncio.CancelledError, ConnectionError):
            note["left"] = True
            note["left_ns"] = time.monotonic_ns()
            raise

    async def tell(self, _: web.Request) -> web.Response:
        return web.json_response(self.seen)


class _Answer:
    """One stream, written as vLLM writes it."""

    def __init__(
        self,
        scenario: Scenario,
        request: web.Request,
        response: web.StreamResponse,
        body: dict[str, Any],
        name: str,
        note: dict[str, Any],
    ) -> None:
        self._s, self._request, self._response, self._note = scenario, request, response, note
        self._id = f"cmpl-{name}"
        self._prompt = body.get("prompt", [])
        self._wanted = scenario.tokens if scenario.tokens is not None else int(body.get("max_tokens", 16))
        self._said_prompt = False

    async def stream(self) -> None:
        s, sent = self._s, 0
        if s.prefix:
            await self._write(s.prefix.encode("utf-8"))
        if s.role_s is not None:
            await asyncio.sleep(s.role_s)
            await self._event(self._chunk({"delta": {"role": "assistant", "content": ""}}, 0))
        due = time.monotonic() + s.first_s
        number = 0
        while sent < self._wanted:
            if sent in (s.error_after, s.stall_after, s.drop_after):
                break
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due += s.interval_s
            count = min(s.per_chunk[min(number, len(s.per_chunk) - 1)], self._wanted - sent)
            number += 1
            last = sent + count == self._wanted
            await self._event(self._tokens(sent, count, last))
            sent += count
            self._note["tokens"] = sent
        if sent == s.stall_after:
            await asyncio.sleep(3600)
        if sent == s.drop_after:
            assert self._request.transport is not None
            self._request.transport.abort()
            raise ConnectionResetError
        if sent == s.error_after:
            await self._write(f"data: {s.error}{s.line_end * 2}".encode())
        else:
            await self._event(self._usage(sent))
        if s.done:
            await self._write(f"data: [DONE]{s.line_end * 2}{s.after_done}".encode())
        if s.hang_after_done:
            await asyncio.sleep(3600)
        await self._response.write_eof()

    def _tokens(self, begin: int, count: int, last: bool) -> dict[str, Any]:
        s = self._s
        text = s.text * count
        if s.chat:
            choice: dict[str, Any] = {"delta": {"reasoning" if begin < s.reasoning else "content": text}}
        else:
            choice = {"text": text, "logprobs": None}
        if s.counting == "ids":
            choice["token_ids"] = list(range(begin, begin + count))
            if not self._said_prompt:
                choice["prompt_token_ids"] = self._prompt
                self._said_prompt = True
        choice["finish_reason"] = s.finish if last else None
        choice["stop_reason"] = s.stop_reason if last else None
        return self._chunk(choice, begin + count)

    def _chunk(self, choice: dict[str, Any], so_far: int) -> dict[str, Any]:
        event = {
            "id": self._id,
            "object": "text_completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, **choice}],
        }
        if self._s.counting == "usage":
            event["usage"] = {"prompt_tokens": len(self._prompt), "completion_tokens": so_far}
        return event

    def _usage(self, sent: int) -> dict[str, Any]:
        said = sent if self._s.said is None else self._s.said
        usage: dict[str, Any] = {"prompt_tokens": len(self._prompt), "completion_tokens": said}
        if self._s.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self._s.cached}
        return {"id": self._id, "object": "text_completion", "choices": [], "usage": usage}

    async def _event(self, value: dict[str, Any]) -> None:
        text = json.dumps(value, ensure_ascii=False)
        await self._write(f"data: {text}{self._s.line_end * 2}".encode())

    async def _write(self, data: bytes) -> None:
        step = self._s.split or len(data)
        for begin in range(0, len(data), step):
            await self._response.write(data[begin : begin + step])
            if self._s.split:
                # a turn of the loop, so that the pieces leave one by one
                await asyncio.sleep(0.0005)


async def serve(server: Any, routes: list[web.RouteDef]) -> None:
    """Listen on a free loopback port, print it, and end with standard input."""
    app = web.Application(client_max_size=64 << 20)
    app.add_routes(routes)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    port = runner.addresses[0][1]
    os.write(1, f"{port}\n".encode())
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, over.set)
    await over.wait()
    with contextlib.suppress(Exception):
        await runner.cleanup()


async def _main() -> None:
    with open(0, "rb", buffering=0, closefd=False) as control:
        server = _Server(json.loads(control.readline()))
    await serve(server, [web.post("/v1/completions", server.completions), web.get("/seen", server.tell)])


if __name__ == "__main__":
    asyncio.run(_main())
