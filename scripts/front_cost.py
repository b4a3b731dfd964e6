"""What the front of an API server costs: processor time per request and per streamed part, beside the bare application.

    python scripts/front_cost.py

The application answers at once, so that only the front's own time is left; one event loop, no network.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.tenant_keys import add_key
from patches.front.access import Access
from patches.front.middleware import Front

_REQUESTS = 2_000
_TENANTS = 50
_PARTS = 200
_EVENT = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" token"}]}\n\n'


class App:
    """Reads the body and streams a number of parts."""

    def __init__(self, parts: int) -> None:
        self._parts = parts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        await receive()
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream")],
            }
        )
        for _ in range(self._parts):
            await send({"type": "http.response.body", "body": _EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(message: Any) -> None:
    return None


def request_us(app: Any, body: bytes, key: str) -> float:
    """Mean processor time of a request, microseconds."""
    headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
    headers += [(f"x-header-{i}".encode(), b"value") for i in range(6)]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "root_path": ""}

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def drive() -> float:
        begun = time.process_time()
        for _ in range(_REQUESTS):
            await app(scope, receive, _send)
        return time.process_time() - begun

    return asyncio.run(drive()) / _REQUESTS * 1e6


def main() -> None:
    """Print a table."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "identity.toml"
        key = ""
        for i in range(_TENANTS):
            key = add_key(file, f"tenant-{i}", {"tier": "gold", "weight": 4.0, "slo_ttft_ms": 200.0})
        access = Access(file)
        print(
            f"{'prompt, token ids':<20}{'body, bytes':>12}{'identity, us a request':>24}{'refusals only':>16}"
        )
        for tokens in (20, 500, 2_000, 8_000):
            body = json.dumps(
                {"model": "m", "prompt": [12_345] * tokens, "stream": True, "priority": 1}
            ).encode()
            bare = request_us(App(1), body, key)
            full = request_us(Front(App(1), access), body, key) - bare
            half = request_us(Front(App(1)), body, key) - bare
            print(f"{tokens:<20}{len(body):>12}{full:>24.1f}{half:>16.1f}")
        body = b'{"prompt": [1]}'
        more = [request_us(Front(App(n)), body, key) - request_us(App(n), body, key) for n in (1, _PARTS)]
        print(f"a streamed part: {(more[1] - more[0]) / (_PARTS - 1):.2f} us")


if __name__ == "__main__":
    main()
