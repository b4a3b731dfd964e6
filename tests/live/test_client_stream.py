"""Requests over real HTTP on loopback against a server that behaves as told: outcomes, cancellation, limits."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from harness.engines.live.client.observed import Observed
from harness.engines.live.client.open_loop import Replayed, run_loop
from harness.engines.live.client.sends import sends_of
from harness.engines.live.client.target import Options, Target, make_target, seconds_of
from harness.errors import UserError
from tests.live.mock_server import MockServer, Scenario
from tests.live.small_workload import ask, soon_ns, workload
from workloads.request import PlannedRequest

BUSY = (
    '{"error": {"message": "The engine is busy", "type": "ServiceUnavailable", "param": null, "code": 503}}'
)
SCENARIOS = {
    "*": Scenario(),
    "plain": Scenario(first_s=0.05, interval_s=0.02, cached=16),
    "split": Scenario(split=7, text="é💡", counting="usage"),
    "crlf": Scenario(line_end="\r\n", prefix="\ufeff: hello\r\n\r\n", split=11),
    "cr": Scenario(line_end="\r"),
    "uncounted": Scenario(counting="none"),
    "chunks": Scenario(per_chunk=(1, 3, 3), interval_s=0.03, first_s=0.1),
    "role": Scenario(chat=True, role_s=0.05, first_s=0.1, interval_s=0.02),
    "reasoning": Scenario(chat=True, reasoning=2, interval_s=0.2),
    "all-reasoning": Scenario(chat=True, reasoning=99),
    "error": Scenario(error_after=3),
    "expired-in-stream": Scenario(error_after=0, error='{"error": {"message": "deadline", "code": 408}}'),
    "busy": Scenario(status=503, body=BUSY, headers=(("Retry-After", "7"),)),
    "many": Scenario(status=429, body='{"detail": "slow down"}'),
    "late": Scenario(status=408, body='{"error": {"message": "expired in the queue", "code": 408}}'),
    "bad": Scenario(status=400, body='{"error": {"message": "max_tokens\\n is too large", "code": 400}}'),
    "unauthorised": Scenario(status=401, body='{"error": "Unauthorized"}'),
    "huge": Scenario(status=500, body="x" * 3_000_000),
    "moved": Scenario(status=307, headers=(("Location", "/elsewhere"),)),
    "json": Scenario(body='{"choices": []}'),
    "dropped": Scenario(drop_after=2),
    "cut": Scenario(done=False),
    "more": Scenario(after_done='data: {"choices": [{"text": "x", "token_ids": [1]}]}\n\n'),
    "hang": Scenario(hang_after_done=True),
    "stall": Scenario(stall_after=2),
    "silent": Scenario(stall_after=0),
    "slow-headers": Scenario(headers_s=3600),
    "long": Scenario(interval_s=0.05),
    "miscount": Scenario(said=5),
}
PATIENCE = Options(first_token_timeout_s=1.5, total_timeout_s=2.5, keep_token_ids=True, send_priority=True)


def go(target: Target, *requests: PlannedRequest, options: Options = PATIENCE) -> dict[str, Observed]:
    """Drive them in this process."""
    replayed = replay(target, *requests, options=options)
    return {one.request_id: one for one in replayed.observed}


def replay(target: Target, *requests: PlannedRequest, options: Options = PATIENCE) -> Replayed:
    sends = sends_of(workload(*requests))
    return run_loop(sends, target, options, soon_ns(0.02))


class Driven:
    """One run over every scenario, so that their waits overlap."""

    def __init__(self) -> None:
        special = {"chunks": ask("chunks", tokens=7), "long": ask("long", tokens=500, cancel_ms=1000)}
        special["silent"] = ask("silent", cancel_ms=1100)
        special["slow-headers"] = ask("slow-headers", cancel_ms=900)
        names = [name for name in SCENARIOS if name not in special and name != "*"]
        with MockServer(SCENARIOS) as mock:
            target = make_target(mock.url + "/v1/", "m", "secret-key")
            self.observed = go(
                target, *special.values(), *map(ask, names), ask("no-cancel-reached", cancel_ms=9e6)
            )
            self.seen: dict[str, Any] = mock.seen()


@pytest.fixture(scope="module")
def driven() -> Driven:
    return Driven()


def test_a_plain_request(driven: Driven) -> None:
    one, seen = driven.observed["plain"], driven.seen["plain"]
    assert (one.status, one.reason, one.http_status) == ("ok", "", 200)
    assert (one.prompt_tokens_counted, one.cached_tokens, one.output_tokens, one.output_tokens_said) == (
        20,
        16,
        3,
        3,
    )
    assert one.token_ids is not None
    assert one.token_ids.tolist() == [0, 1, 2]
    assert (one.finish_reason, one.server_request_id, one.tokens_exact) == ("length", "cmpl-plain", True)
    times = [one.intended_ns, one.sent_ns, one.headers_ns, one.first_token_ns, one.last_token_ns, one.end_ns]
    assert times == sorted(t for t in times if t is not None)
    assert one.chunk_tokens.sum() == 3
    body = seen["body"]
    assert {k: body[k] for k in ("model", "prompt", "max_tokens", "ignore_eos", "stream", "priority")} == {
        "model": "m",
        "prompt": 20,
        "max_tokens": 3,
        "ignore_eos": True,
        "stream": True,
        "priority": -1,
    }
    assert body["vllm_xargs"] == {"tenant": "gold-a", "tier": "gold", "weight": 4, "slo_ttft_ms": 1000.0}
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": False}
    assert seen["headers"]["Authorization"] == "Bearer secret-key"


@pytest.mark.parametrize("name", ["split", "crlf", "cr", "no-cancel-reached"])
def test_streams_however_written(driven: Driven, name: str) -> None:
    one = driven.observed[name]
    assert (one.status, one.output_tokens, one.tokens_exact, one.prompt_tokens_counted) == ("ok", 3, True, 20)


def test_tokens_without_a_count_are_marked(driven: Driven) -> None:
    assert (driven.observed["uncounted"].output_tokens, driven.observed["uncounted"].tokens_exact) == (
        3,
        False,
    )
    assert (driven.observed["miscount"].output_tokens, driven.observed["miscount"].output_tokens_said) == (
        3,
        5,
    )


def test_tokens_per_chunk(driven: Driven) -> None:
    assert driven.observed["chunks"].chunk_tokens.sum() == 7
    assert driven.observed["chunks"].chunk_tokens[0] == 1


def test_a_role_is_no_first_token(driven: Driven) -> None:
    """Role after 50 ms, content another 100 ms later: the first token is the content."""
    one = driven.observed["role"]
    assert one.first_token_ns is not None
    assert one.sent_ns is not None
    assert one.first_token_ns - one.sent_ns >= 150_000_000
    assert one.first_output_token_ns == one.first_token_ns


def test_reasoning(driven: Driven) -> None:
    one = driven.observed["reasoning"]
    assert one.first_token_ns is not None
    assert one.first_output_token_ns is not None
    assert one.first_output_token_ns - one.first_token_ns >= 200_000_000
    spent = driven.observed["all-reasoning"]
    assert (spent.status, spent.output_tokens, spent.first_output_token_ns) == ("ok", 3, None)


@pytest.mark.parametrize(
    ("name", "status", "http", "reason"),
    [
        ("error", "ok", 200, ""),
        ("expired-in-stream", "expired", 200, "deadline"),
        ("busy", "rejected", 503, "The engine is busy"),
        ("many", "rejected", 429, "slow down"),
        ("late", "expired", 408, "expired in the queue"),
        ("bad", "failed", 400, "HTTP 400: max_tokens is too large"),
        ("unauthorised", "failed", 401, "HTTP 401: Unauthorized"),
        ("moved", "failed", 307, "HTTP 307: Temporary Redirect"),
        ("json", "failed", 200, "the answer is application/json, no event stream"),
        ("dropped", "failed", 200, "the connection broke off in the middle of the answer"),
        ("cut", "failed", 200, "the stream ended without [DONE]"),
        ("more", "failed", 200, "the server sent data after [DONE]"),
        ("hang", "ok", 200, ""),
        ("stall", "failed", 200, "not ended within 2.5 s"),
    ],
)
def test_endings(driven: Driven, name: str, status: str, http: int, reason: str) -> None:
    if name == "error":  # three tokens, an error object, [DONE]
        status, reason = "failed", "device lost"
    one = driven.observed[name]
    assert (one.status, one.http_status, one.reason) == (status, http, reason)
    assert driven.seen[name]["times"] == 1, "nothing is sent again"


def test_refusals_say_when_to_come_back(driven: Driven) -> None:
    assert (driven.observed["busy"].retry_after_s, driven.observed["many"].retry_after_s) == (7.0, None)
    assert seconds_of("Wed, 21 Oct 2015 07:28:30 GMT", "Wed, 21 Oct 2015 07:28:00 GMT") == 30.0
    assert [
        seconds_of(v, None) for v in ("1.5", "-1", "inf", "nan", "soon", "Wed, 21 Oct 2015 07:28:30 GMT")
    ] == [*(1.5, None, None, None, None, None)]


def test_error_bodies_are_cut(driven: Driven) -> None:
    assert driven.observed["huge"].reason.startswith("HTTP 500: xxx")
    assert len(driven.observed["huge"].reason) < 400


def test_tokens_before_a_failure_are_kept(driven: Driven) -> None:
    assert driven.observed["error"].output_tokens == 3
    assert driven.observed["dropped"].output_tokens == 2
    assert driven.observed["stall"].output_tokens == 2


def test_cancellation_is_seen_by_the_server(driven: Driven) -> None:
    one, seen = driven.observed["long"], driven.seen["long"]
    assert one.status == "cancelled"
    assert 0 < one.output_tokens < 500
    assert one.end_ns is not None
    # The event loop may wake up to its clock's resolution, a millisecond, before it is due.
    assert one.end_ns >= 999_000_000
    assert seen["left"]
    assert seen["tokens"] < 500


@pytest.mark.parametrize(("name", "http"), [("slow-headers", None), ("silent", 200)])
def test_cancellation_before_the_first_token(driven: Driven, name: str, http: int | None) -> None:
    one = driven.observed[name]
    assert (one.status, one.http_status, one.output_tokens, one.first_token_ns) == (
        "cancelled",
        http,
        0,
        None,
    )
    assert driven.seen[name]["left"]


def test_no_token_in_time() -> None:
    with MockServer({"*": Scenario(stall_after=0), "mute": Scenario(headers_s=3600)}) as mock:
        found = go(make_target(mock.url, "m"), ask("silent"), ask("mute"))
    assert {one.reason for one in found.values()} == {"no token within 1.5 s"}
    assert {one.status for one in found.values()} == {"failed"}


def test_nobody_listens() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        one = go(make_target(f"http://127.0.0.1:{holder.getsockname()[1]}", "m"), ask("a"))["a"]
    assert (one.status, one.http_status) == ("failed", None)
    assert one.reason.startswith("no connection: ")
    assert one.sent_ns is not None


def test_peer_that_speaks_no_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        import threading

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(1 << 16)
                peer.sendall(b"SSH-2.0-strange\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        one = go(make_target(f"http://127.0.0.1:{server.getsockname()[1]}", "m"), ask("a"))["a"]
        thread.join()
    assert one.status == "failed"
    assert one.reason
    assert "\n" not in one.reason


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:99999", "http://a:b", "http://a/?q=1"]
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(UserError, match="base_url"):
        make_target(url, "m")
    with pytest.raises(UserError, match="model ''"):
        make_target("http://127.0.0.1:1", "")


def test_keys_that_cannot_be_sent() -> None:
    with pytest.raises(UserError, match="API key"):
        make_target("http://127.0.0.1:1", "m", "a\r\nX-Evil: 1")
    assert "secret" not in repr(make_target("http://127.0.0.1:1", "m", "secret"))
    with pytest.raises(UserError, match="X-Request-Id"):
        sends_of(workload(ask("a\nb")))
    with pytest.raises(ValueError, match="decides"):
        Options(extra_body={"prompt": [1]})
