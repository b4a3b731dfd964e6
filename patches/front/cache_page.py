"""What `cachedash` counts in the engine, for readers of the API server: a page of JSON, and Prometheus metrics.

The engine is another process. It is asked over vLLM's own utility channel, and answers between two steps; an answer is kept
for a second, however many ask.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from patches.front.answer import Message, Send

Receive = Callable[[], Awaitable[Message]]
App = Callable[[Any, Receive, Send], Awaitable[None]]
#: Asks the engines of a server, by the scope of a request: what is asked -> an answer of each.
Ask = Callable[[Any, str], Awaitable[list[str]]]

PATCH = "cachedash"
PAGE, METRICS, UPSTREAM_METRICS = "/patchbench/cache", "/patchbench/metrics", "/metrics"
_KEPT_S = 1.0
_TIMEOUT_S = 5.0
_PREFIX = "patchbench_cache"
# By measure: what it is, and the names of the labels beside `tenant`.
_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "requests": ("First admissions of requests", ()),
    "asked_blocks": ("Prompt blocks looked for at first admissions", ()),
    "found_blocks": ("Prompt blocks found, by tier", ("tier",)),
    "missed_blocks": (
        "Prompt blocks not found, by cause, and by whose request had evicted them",
        ("cause", "by"),
    ),
    "evicted_blocks": (
        "Cached blocks evicted, by whether they had ever been found, and by whose request",
        ("fate", "by"),
    ),
    "dead_protected_blocks": (
        "Blocks found before and then kept to no use long after LRU would have let them go",
        (),
    ),
    "recomputed_tokens": ("Tokens computed again, by what they were lost by", ("reason",)),
    "preemptions": ("Preemptions of running requests", ()),
}


async def ask_engines(scope: Any, asked: str) -> list[str]:
    """The default `Ask`: every engine of the server's client."""
    from patches.seam.wrappers import REPORT_METHOD

    core = scope["app"].state.engine_client.engine_core
    answers: list[str] = await core.call_utility_all_async(REPORT_METHOD, PATCH, asked)
    return answers


class CachePage:
    """Middleware: serves `/patchbench/cache` and `/patchbench/metrics`, and adds to what `/metrics` says.

    Args:
        open_metrics: whether `/metrics`, which anybody may read, gets what is told of tenants.
    """

    def __init__(self, app: App, *, open_metrics: bool, ask: Ask = ask_engines) -> None:
        self._app, self._open, self._ask = app, open_metrics, ask
        self._answer: dict[str, Any] = {}
        self._until_s = 0.0
        self._one_asks = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        path = "" if scope["type"] != "http" else str(scope["path"]).removeprefix(scope.get("root_path", ""))
        if path not in (PAGE, METRICS, UPSTREAM_METRICS) or scope["method"] != "GET":
            await self._app(scope, receive, send)
        elif path == UPSTREAM_METRICS:
            await self._app(
                scope, receive, _Appended(send, lambda: self._text(scope)) if self._open else send
            )
        else:
            await self._serve(scope, path, send)

    async def _serve(self, scope: Any, path: str, send: Send) -> None:
        kind = b"application/json" if path == PAGE else b"text/plain; version=0.0.4; charset=utf-8"
        status = 200
        try:
            if path == METRICS:
                body = metrics_text(await self._now(scope))
            elif scope.get("query_string") == b"table":
                body = json.dumps(await self._asked(scope, "table")).encode()
            else:
                body = json.dumps(await self._now(scope)).encode()
        except Exception as error:
            # The engine is gone or stuck; vLLM says so elsewhere.
            status, kind = 503, b"application/json"
            text = f"the engine does not answer: {type(error).__name__}"
            body = json.dumps(
                {"error": {"message": text, "type": "ServiceUnavailable", "code": 503}}
            ).encode()
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _text(self, scope: Any) -> bytes:
        try:
            return metrics_text(await self._now(scope))
        except Exception:
            # vLLM's own metrics are worth more than ours.
            return b""

    async def _now(self, scope: Any) -> dict[str, Any]:
        async with self._one_asks:
            if time.monotonic() >= self._until_s:
                self._answer = await self._asked(scope, "")
                self._until_s = time.monotonic() + _KEPT_S
            return self._answer

    async def _asked(self, scope: Any, what: str) -> dict[str, Any]:
        answers = await asyncio.wait_for(self._ask(scope, what), _TIMEOUT_S)
        return together([json.loads(answer) for answer in answers if answer])


class _Appended:
    """A `send` that adds text behind a whole plain answer."""

    def __init__(self, send: Send, text: Callable[[], Awaitable[bytes]]) -> None:
        self._send, self._text = send, text
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _plain(message):
            self._start = message
        elif self._start is None or message["type"] != "http.response.body":
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                body = self._body + await self._text()
                headers = [
                    (name, value)
                    for name, value in self._start["headers"]
                    if name.lower() != b"content-length"
                ]
                headers.append((b"content-length", b"%d" % len(body)))
                await self._send({**self._start, "headers": headers})
                await self._send({"type": "http.response.body", "body": body, "more_body": False})
                self._start = None


def _plain(start: Message) -> bool:
    """Whether text may follow: not compressed, and of the format that has no end mark."""
    headers = {name.lower(): value for name, value in start["headers"]}
    kind = headers.get(b"content-type", b"")
    return start["status"] == 200 and kind.startswith(b"text/plain") and b"content-encoding" not in headers


def together(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One answer for several engines: counts are added, blocks too; the rest is the first one's.

    Raises:
        ValueError: no engine has the patch.
    """
    if not answers:
        raise ValueError(f"no engine of this server has the patch {PATCH}")
    first = dict(answers[0])
    if len(answers) > 1:
        sums: dict[tuple[str, ...], int] = {}
        for answer in answers:
            for *names, value in answer["sums"]:
                sums[tuple(names)] = sums.get(tuple(names), 0) + value
        first["sums"] = [[*names, value] for names, value in sums.items()]
        first["prefixes"] = [row for answer in answers for row in answer["prefixes"]]
        first["pool_blocks"] = sum(answer["pool_blocks"] for answer in answers)
        first["usage"] = sum(a["usage"] * a["pool_blocks"] for a in answers) / max(1, first["pool_blocks"])
    return first


def metrics_text(answer: dict[str, Any]) -> bytes:
    """An answer in Prometheus' text format; labels are escaped, whatever a tenant is called."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(answer))
    return generate_latest(registry)


class _Collector:
    """The metrics of one answer."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._answer = answer

    def collect(self) -> Iterator[Metric]:
        """One family a measure."""
        for name, text in (
            ("pool_blocks", "KV blocks of the pool"),
            ("usage", "Share of them that is referenced"),
        ):
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", text, value=float(self._answer[name]))
        for measure, (text, more) in _COUNTERS.items():
            family = CounterMetricFamily(f"{_PREFIX}_{measure}", text, labels=("tenant", *more))
            for what, tenant, kind, by, value in self._answer["sums"]:
                if what == measure:
                    family.add_metric((tenant, kind, by)[: 1 + len(more)], value)
            yield family
        yield self._reuse()

    def _reuse(self) -> Metric:
        family = HistogramMetricFamily(
            f"{_PREFIX}_reuse_distance_blocks",
            "Other blocks asked for between two requests for one block, from a sample of blocks",
            labels=("tenant",),
        )
        by_tenant: dict[str, dict[int, int]] = {}
        for what, tenant, kind, _, value in self._answer["sums"]:
            if what == "reuse_blocks":
                by_tenant.setdefault(tenant, {})[int(kind)] = value
        for tenant, counts in by_tenant.items():
            upto, buckets = 0, []
            for end in sorted(counts):
                upto += counts[end]
                buckets.append((str(float(end)), float(upto)))
            buckets.append(("+Inf", float(upto)))
            family.add_metric((tenant,), buckets, sum_value=None)
        return family
