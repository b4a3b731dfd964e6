"""A headless Chromium for one page: what it logged, what it asked the network for, and a picture.

Speaks the DevTools protocol over a loopback socket. Used by the tests of the report and by the
script that makes the picture in the README; nothing that writes reports needs it.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def find_chromium() -> str | None:
    """The path of a Chromium on PATH, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass(slots=True)
class Visit:
    """What happened while a page was open.

    Attributes:
        errors: console errors, uncaught exceptions and failed loads, a line each.
        requests: every URL that was asked for, the page itself included.
        value: result of the script that `visit` was given.
        png: picture of the window, or b"".
    """

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    value: Any = None
    png: bytes = b""


def visit(
    page: Path,
    *,
    script: str = "null",
    width: int = 1280,
    height: int = 900,
    dark: bool = False,
    scroll_to: str = "",
    picture: bool = False,
    timeout_s: float = 60.0,
) -> Visit:
    """Open a file and wait until it has settled.

    Args:
        script: a JavaScript expression (a promise is awaited), evaluated when the page has settled.
        scroll_to: id of the element to bring to the top first.

    Raises:
        FileNotFoundError: there is no Chromium on PATH.
        TimeoutError: it did not finish in `timeout_s`.
    """
    chromium = find_chromium()
    if chromium is None:
        raise FileNotFoundError("no chromium on PATH; on Debian: apt-get install chromium")
    return asyncio.run(
        asyncio.wait_for(_visit(chromium, page, script, (width, height), dark, scroll_to, picture), timeout_s)
    )


async def _visit(
    chromium: str, page: Path, script: str, size: tuple[int, int], dark: bool, scroll_to: str, picture: bool
) -> Visit:
    seen = Visit()
    async with _browser(chromium) as port, aiohttp.ClientSession() as http:
        async with http.get(f"http://127.0.0.1:{port}/json") as reply:
            target = next(t for t in await reply.json() if t["type"] == "page")
        async with http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            tab = _Tab(socket, seen)
            for domain in ("Page", "Runtime", "Log", "Network"):
                await tab.call(f"{domain}.enable")
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            await tab.call("Emulation.setEmulatedMedia", features=[scheme])
            await tab.call(
                "Emulation.setDeviceMetricsOverride",
                width=size[0], height=size[1], deviceScaleFactor=1, mobile=False,
            )  # fmt: skip
            await tab.call("Page.navigate", url=page.resolve().as_uri())
            await tab.until("Page.loadEventFired")
            if scroll_to:
                target_id = json.dumps(scroll_to)
                await tab.value(
                    "document.documentElement.style.scrollBehavior = 'auto';"
                    f"document.getElementById({target_id}).scrollIntoView()"
                )
            await tab.value(_SETTLED)
            seen.value = await tab.value(script)
            if picture:
                shot = await tab.call("Page.captureScreenshot", format="png")
                seen.png = base64.b64decode(shot["data"])
    return seen


# Figures are drawn when they come near the screen: two calm frames after the last change of the page.
_SETTLED = """new Promise((done) => {
  let calm = 0;
  const watcher = new MutationObserver(() => { calm = 0; });
  watcher.observe(document.body, { childList: true, subtree: true, attributes: true });
  const tick = () => { if (++calm > 12) { watcher.disconnect(); done(true); } else requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
})"""


class _Tab:
    """One page's DevTools socket: calls in, events into the visit."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, seen: Visit) -> None:
        self._socket = socket
        self._seen = seen
        self._ids = itertools.count(1)
        self._happened: set[str] = set()

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._next()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error'].get('message')}")
                return dict(message["result"])

    async def value(self, expression: str) -> Any:
        result = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"script failed: {result['exceptionDetails'].get('text')} {result['result']}")
        return result["result"].get("value")

    async def until(self, event: str) -> None:
        while event not in self._happened:
            await self._next()

    async def _next(self) -> dict[str, Any]:
        message: dict[str, Any] = await self._socket.receive_json()
        method, params = message.get("method", ""), message.get("params", {})
        self._happened.add(method)
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self._seen.errors.append(
                str(details.get("exception", {}).get("description") or details.get("text"))
            )
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert", "warning"):
            said = " ".join(str(a.get("value", a.get("description", ""))) for a in params["args"])
            self._seen.errors.append(f"console.{params['type']}: {said}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self._seen.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self._seen.requests.append(params["request"]["url"])
        return message


@asynccontextmanager
async def _browser(chromium: str) -> AsyncIterator[int]:
    """Start a browser with a profile of its own; yields its port, and ends that process and no other."""
    with tempfile.TemporaryDirectory(prefix="report-browser-", ignore_cleanup_errors=True) as home:
        process = await asyncio.create_subprocess_exec(
            chromium, *FLAGS, f"--user-data-dir={home}", "about:blank",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            yield await _port(process, Path(home) / "DevToolsActivePort")
        finally:
            # Its own session: the group holds this browser's helpers and nothing else.
            for how in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, how)
                    await asyncio.wait_for(process.wait(), 5)
                except ProcessLookupError:
                    break
                except TimeoutError:
                    continue


async def _port(process: asyncio.subprocess.Process, file: Path) -> int:
    while process.returncode is None:
        if file.exists() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        await asyncio.sleep(0.05)
    raise RuntimeError(f"chromium ended with code {process.returncode} before it opened its port")
