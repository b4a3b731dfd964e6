"""Guards the middleware: who comes in, what reaches the application, and how refusals look from outside.

An application of a few lines stands for vLLM's; a real one is asked in tests/live/test_identity_live.py.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from patches.front.events import LINES_PER_EVENT, Events
from patches.seam import endings
from tests.front.driven import GOLD, OPERATOR, SILVER, Recorder, call, front, identity_file, part, start

REFUSED = endings.refused("queue_depth", 2.2)
TOKEN = b'data: {"id":"cmpl-1","choices":[{"text":"a"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def error_event(message: str, code: int = 503) -> bytes:
    """As vLLM writes one into a stream."""
    error = {"message": message, "type": "InternalServerError", "param": None, "code": code}
    return f"data: {json.dumps({'error': error})}\n\n".encode()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return identity_file(tmp_path)


# who comes in


def test_a_tenant_is_served_as_itself(file: Path) -> None:
    app = Recorder()
    answered = call(front(app, file), [b'{"prompt": [1]}'])
    assert answered.status == 200 and answered.body == b"{}"
    assert app.json["vllm_xargs"]["tenant"] == "gold-a" and app.json["priority"] == -1
    assert app.headers["content-length"] == str(len(app.bodies[0]))
    # vLLM's own check sees its own key, and nobody further in sees the tenant's.
    assert app.headers["authorization"] == f"Bearer {OPERATOR}"
    assert GOLD not in repr(app.scopes[0]["headers"])


@pytest.mark.parametrize("key", [None, "unknown", "gold-ke"])
def test_without_a_known_key_nothing_is_asked_of_the_engine(file: Path, key: str | None) -> None:
    app, events = Recorder(), Events()
    answered = call(front(app, file, events), key=key)
    assert answered.status == 401 and answered.headers["www-authenticate"] == "Bearer"
    assert answered.error["code"] == 401 and not app.scopes
    assert events.counts == {("no_key" if key is None else "unknown_key", ""): 1}


def test_an_endpoint_that_carries_no_identity_is_not_a_tenants(file: Path) -> None:
    app, events = Recorder(), Events()
    answered = call(front(app, file, events), path="/v1/responses")
    assert answered.status == 403 and not app.scopes
    assert events.counts == {("forbidden", "gold-a"): 1}
    assert call(front(app, file), path="/v1/responses", key=OPERATOR).status == 200


def test_reading_goes_through_untouched(file: Path) -> None:
    app = Recorder()
    assert call(front(app, file), [b""], key=None, method="GET", path="/health").status == 200
    assert "authorization" not in app.headers
    app = Recorder()
    assert call(front(app, file), [b""], method="GET", path="/v1/models").status == 200
    assert app.headers["authorization"] == f"Bearer {OPERATOR}" and app.bodies == [b""]


def test_a_websocket_is_the_operators_only(file: Path) -> None:
    app = Recorder()
    answered = call(front(app, file), kind="websocket", path="/v1/realtime")
    assert [message["type"] for message in answered.sent] == ["websocket.close"] and not app.scopes
    call(front(app, file), kind="websocket", path="/v1/realtime", key=OPERATOR)
    assert len(app.scopes) == 1


def test_the_lifespan_and_a_server_without_a_file_are_left_alone() -> None:
    app = Recorder()
    call(front(app, None), kind="lifespan")
    assert app.scopes[0]["type"] == "lifespan"
    app = Recorder()
    body = b'{"vllm_xargs": {"tier": "gold"}}'
    assert call(front(app, None), [body], key=None).status == 200
    assert app.bodies == [body]


# what a request may say


def test_a_claim_is_overruled_counted_and_written_without_the_key(file: Path, tmp_path: Path) -> None:
    events = Events(tmp_path / "events.jsonl")
    app = Recorder()
    body = b'{"vllm_xargs": {"tenant": "gold-a", "tier": "gold", "weight": 9}, "priority": -5}'
    headers = [(b"x-request-id", b"r-7"), (b"x-vllm-priority", b"-9")]
    call(front(app, file, events), [body], key=SILVER, headers=headers)
    assert app.json == {
        "vllm_xargs": {"tenant": "silver-b", "tier": "silver", "weight": 2.0},
        "priority": 0,
    }
    # vLLM would take it before the body's.
    assert "x-vllm-priority" not in app.headers
    fields = ("tenant", "tier", "weight", "priority")
    assert events.counts == {(f"claimed_{name}", "silver-b"): 1 for name in fields}
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert {line["event"] for line in lines} == {f"claimed_{name}" for name in fields}
    assert lines[0]["request_id"] == "r-7" and lines[0]["claims"]["tier"] == "gold"
    assert SILVER not in (tmp_path / "events.jsonl").read_text()


def test_a_header_that_asks_for_less_is_no_event_and_has_no_effect(file: Path) -> None:
    app, events = Recorder(), Events()
    for value in (b"5", b"-1", b"x"):
        call(front(app, file, events), headers=[(b"x-vllm-priority", value)])
    assert not events.counts and all(json.loads(body)["priority"] == -1 for body in app.bodies)


def test_the_operator_is_served_as_no_tenant(file: Path) -> None:
    app = Recorder()
    call(front(app, file), [b'{"vllm_xargs": {"tier": "gold"}}'], key=OPERATOR)
    assert app.json == {"vllm_xargs": {}, "priority": 0}


def test_without_a_priority_policy_none_is_sent(file: Path) -> None:
    app = Recorder()
    call(front(app, file, takes_priority=lambda _: False), [b'{"priority": 3}'])
    assert "priority" not in app.json


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_body_in_pieces(file: Path, size: int) -> None:
    body = json.dumps({"prompt": "é💡", "vllm_xargs": {"tier": "x"}}, ensure_ascii=False).encode()
    app = Recorder()
    call(front(app, file), [body[i : i + size] for i in range(0, len(body), size)])
    assert app.json["prompt"] == "é💡" and app.json["vllm_xargs"]["tier"] == "gold"


def test_bad_json_reaches_vllm_as_it_is(file: Path) -> None:
    app = Recorder()
    call(front(app, file), [b'{"prompt": '])
    assert app.bodies == [b'{"prompt": ']
    app = Recorder()
    deep = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert call(front(app, file), [deep]).status == 400 and not app.scopes


def test_a_body_beyond_the_limit(file: Path) -> None:
    for parts, headers in (
        ([b"x" * 60, b"x" * 60], []),
        ([b"{}"], [(b"content-length", b"101")]),
    ):
        app, events = Recorder(), Events()
        answered = call(front(app, file, events, max_body_bytes=100), parts, headers=headers)
        assert answered.status == 413 and not app.scopes
        assert events.counts == {("too_large", "gold-a"): 1}
    app = Recorder()
    assert call(front(app, file, max_body_bytes=100), [b" " * 98 + b"{}"]).status == 200


# a caller that leaves


def test_a_caller_that_leaves_in_the_middle_of_its_body(file: Path) -> None:
    app = Recorder()
    assert not call(front(app, file), [b"{", b"}"], leaves_after=1).sent
    assert not app.scopes


def test_a_caller_that_leaves_is_seen_by_vllm(file: Path) -> None:
    app = Recorder()
    call(front(app, file))
    assert app.left


def test_leaving_reaches_vllm_while_the_status_line_is_held(file: Path) -> None:
    """As Starlette's streaming answer does it: the answer is cancelled when `receive` tells of the departure."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(start(200))
        assert (await receive())["type"] == "http.disconnect"
        heard.append(True)

    heard: list[bool] = []
    answered = call(front(app, file))
    # Nobody is there to hear it, but an application that ends has said what it had to say.
    assert heard and answered.status == 200 and answered.body == b""


def test_a_cancellation_passes(file: Path) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start(200))
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        call(front(app, file))


# refusals


def test_a_stream_passes_part_by_part(file: Path) -> None:
    app = Recorder(start(200), part(TOKEN), part(TOKEN), part(DONE), part(b"", more=False))
    answered = call(front(app, file))
    assert answered.status == 200 and answered.bodies == [TOKEN, TOKEN, DONE, b""]


def test_the_status_line_waits_for_the_first_part(file: Path) -> None:
    """And goes out with it, not later."""
    seen: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start(200))
        seen.append(len(outer))
        await send(part(TOKEN))
        seen.append(len(outer))

    outer: list[Any] = []

    async def send(message: Any) -> None:
        outer.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(front(app, None)(scope, receive, send))
    assert seen == [0, 2]


@pytest.mark.parametrize("identity", [True, False])
def test_a_refusal_before_the_first_byte_is_a_503(file: Path, identity: bool) -> None:
    events = Events()
    app = Recorder(start(200), part(error_event(REFUSED)), part(DONE), part(b"", more=False))
    answered = call(front(app, file if identity else None, events))
    assert answered.status == 503
    assert answered.headers["retry-after"] == "3" and answered.headers["content-type"] == "application/json"
    assert answered.headers["content-length"] == str(len(answered.body))
    assert answered.headers["x-request-id"] == "r1"
    assert answered.error == {
        "message": "refused: too many requests wait; try again in 3 s",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
        "reason": "queue_depth",
        "retry_after_s": 3,
    }
    # Nothing follows it.
    assert len(answered.sent) == 2 and answered.sent[-1]["more_body"] is False
    assert events.counts == {("queue_depth", "gold-a" if identity else ""): 1}


def test_an_expiry_before_the_first_byte_is_a_408() -> None:
    app = Recorder(start(200), part(error_event(endings.DEADLINE_EXPIRED, 408)), part(DONE, more=False))
    answered = call(front(app, None))
    assert answered.status == 408 and "retry-after" not in answered.headers
    assert answered.error["reason"] == "deadline_expired" and answered.error["code"] == 408


def test_a_refusal_after_the_first_byte_is_an_error_event() -> None:
    events = Events()
    app = Recorder(start(200), part(TOKEN), part(error_event(REFUSED)), part(DONE), part(b"", more=False))
    answered = call(front(app, None, events))
    assert answered.status == 200 and answered.bodies[0] == TOKEN and answered.bodies[2] == DONE
    told = json.loads(answered.bodies[1].removeprefix(b"data: "))["error"]
    assert answered.bodies[1].endswith(b"\n\n")
    assert (told["code"], told["reason"], told["retry_after_s"]) == (503, "queue_depth", 3)
    assert events.counts == {("queue_depth", ""): 1}


def test_a_keep_alive_comment_is_a_first_byte() -> None:
    app = Recorder(start(200), part(b": keep-alive\n\n"), part(error_event(REFUSED)), part(DONE, more=False))
    answered = call(front(app, None))
    assert answered.status == 200 and b'"reason": "queue_depth"' in answered.bodies[1]


def test_an_answer_that_is_no_stream() -> None:
    body = json.dumps({"error": {"message": REFUSED, "type": "x", "param": None, "code": 503}}).encode()
    app = Recorder(start(503, b"application/json"), part(body[:9]), part(body[9:], more=False))
    answered = call(front(app, None))
    assert answered.status == 503 and answered.headers["retry-after"] == "3"
    assert answered.error["reason"] == "queue_depth"


@pytest.mark.parametrize(
    "body", [b'{"error": {"message": "busy", "code": 503}}', b"", b"no json", b"x" * 100_000]
)
def test_an_error_that_is_not_ours_is_left_as_it_is(body: bytes) -> None:
    app = Recorder(start(503, b"application/json"), part(body), part(b"", more=False))
    answered = call(front(app, None))
    assert answered.status == 503 and answered.body == body and "retry-after" not in answered.headers


def test_an_error_of_vllm_in_a_stream() -> None:
    """Its own refusal becomes a status where nothing was sent; any other error stays an event."""
    busy = error_event("The engine is busy")
    answered = call(front(Recorder(start(200), part(busy), part(DONE, more=False)), None))
    assert answered.status == 503 and answered.error["message"] == "The engine is busy"
    for other in (error_event("device lost", 500), b'data: {"error": "x"}\n\n', b'data: {"error"\n\n'):
        answered = call(front(Recorder(start(200), part(other), part(DONE, more=False)), None))
        assert answered.status == 200 and answered.bodies == [other, DONE]
    late = call(front(Recorder(start(200), part(TOKEN), part(busy), part(DONE, more=False)), None))
    assert late.bodies == [TOKEN, busy, DONE]


def test_an_empty_stream_and_one_that_fails_before_it_begins() -> None:
    answered = call(front(Recorder(start(200), part(b"", more=False)), None))
    assert answered.status == 200 and answered.body == b""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start(200))
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        call(front(app, None))


# the record


def test_the_file_of_events_is_bounded_by_kind(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.jsonl")
    for _ in range(LINES_PER_EVENT + 5):
        events.add("unknown_key")
    events.add("claimed_tier", "gold-a")
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert len(lines) == LINES_PER_EVENT + 1
    assert "no more" in lines[-2]["last"] and lines[-1]["event"] == "claimed_tier"
    assert events.counts["unknown_key", ""] == LINES_PER_EVENT + 5


def test_a_file_that_cannot_be_written_does_not_matter(tmp_path: Path) -> None:
    events = Events(tmp_path / "none" / "events.jsonl")
    events.add("unknown_key")
    events.add("unknown_key")
    assert events.counts["unknown_key", ""] == 2
