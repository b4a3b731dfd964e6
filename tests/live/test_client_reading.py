"""What one stream means: tokens, times, endings. Bytes are fed by hand; the network is tested elsewhere."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engines.live.client.reading import Reading

ERROR = {"error": {"message": "device lost", "type": "InternalServerError", "param": None, "code": 500}}


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def text(*, ids: list[int] | None = None, said: int | None = None, **choice: Any) -> bytes:
    chunk: dict[str, Any] = {"id": "cmpl-x", "choices": [{"index": 0, "text": "a", **choice}]}
    if ids is not None:
        chunk["choices"][0]["token_ids"] = ids
    if said is not None:
        chunk["usage"] = {"prompt_tokens": 7, "completion_tokens": said}
    return event(chunk)


def delta(**values: Any) -> bytes:
    return event({"id": "c", "choices": [{"index": 0, "delta": values}]})


DONE = event(b"[DONE]")


def read(*reads: tuple[int, bytes], keep: bool = False) -> Reading:
    reading = Reading(keep)
    for now_ns, data in reads:
        reading.feed(now_ns, data)
    reading.end()
    return reading


def test_tokens_by_their_ids() -> None:
    got = read(
        (5, text(ids=[3, 4], prompt_token_ids=[1] * 9)), (8, text(ids=[5], text="")), (9, DONE), keep=True
    )
    assert (got.status, got.exact, got.output_tokens, got.prompt_tokens) == ("ok", True, 3, 9)
    assert (list(got.chunk_ns), list(got.chunk_tokens), list(got.token_ids)) == ([5, 8], [2, 1], [3, 4, 5])
    assert (got.server_id, got.done_ns) == ("cmpl-x", 9)


def test_tokens_by_the_running_count() -> None:
    got = read((5, text(said=1)), (8, text(said=4) + text(said=4, text="")), (9, text(said=7)), (9, DONE))
    assert (got.exact, list(got.chunk_ns), list(got.chunk_tokens)) == (True, [5, 8, 9], [1, 3, 3])
    assert (got.prompt_tokens, got.output_tokens_said) == (7, 7)


def test_events_without_a_count_are_one_token_and_say_so() -> None:
    got = read((5, text()), (6, text(text="")), (7, text() + DONE))
    assert (got.exact, got.output_tokens, list(got.chunk_ns)) == (False, 2, [5, 7])


def test_events_of_one_read_are_one_chunk() -> None:
    got = read((5, text(ids=[1]) + text(ids=[2]) + text(ids=[3])), (6, DONE))
    assert (list(got.chunk_ns), list(got.chunk_tokens)) == ([5], [3])


def test_role_and_empty_events_are_no_token() -> None:
    got = read(
        (1, delta(role="assistant", content="")), (2, delta(content="a")), (3, delta(content="b")), (3, DONE)
    )
    assert (list(got.chunk_ns), got.first_output_ns) == ([2, 3], 2)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_a_token_but_no_output(name: str) -> None:
    got = read((1, delta(**{name: "hm"})), (2, delta(content="a")), (2, DONE))
    assert (got.chunk_ns[0], got.first_output_ns) == (1, 2)
    none = read((1, delta(**{name: "hm"})), (2, DONE))
    assert (none.chunk_ns[0], none.first_output_ns) == (1, None)


def test_last_usage() -> None:
    usage = {"prompt_tokens": 20, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 16}}
    got = read((1, text(ids=[1, 2])), (2, event({"id": "c", "choices": [], "usage": usage}) + DONE))
    assert (got.prompt_tokens, got.cached_tokens, got.output_tokens, got.output_tokens_said) == (20, 16, 2, 2)


def test_error_object_after_tokens_is_a_failure_whatever_follows() -> None:
    got = read(*((i, text(ids=[i])) for i in range(3)), (4, event(ERROR)), (5, DONE))
    assert (got.status, got.reason, got.output_tokens) == ("failed", "device lost", 3)


@pytest.mark.parametrize(
    ("code", "tokens", "status"),
    [(408, 1, "expired"), (408, 0, "expired"), (503, 0, "rejected"), (503, 1, "failed"), (400, 0, "failed")],
)
def test_error_object_by_its_code(code: int, tokens: int, status: str) -> None:
    error = event({"error": {"message": "no", "type": "x", "code": code}})
    assert read((1, text(ids=[1]) * tokens + error + DONE)).status == status


def test_error_that_is_a_bare_text() -> None:
    got = read((1, event({"error": "Unauthorized\n\x1b[31m"})))
    assert (got.status, got.reason) == ("failed", "Unauthorized [31m")


def test_server_side_endings() -> None:
    assert read((1, text(ids=[1], finish_reason="error") + DONE)).status == "failed"
    gone = read((1, text(ids=[], finish_reason="abort", stop_reason="deadline")), (2, DONE))
    assert (gone.status, gone.reason) == ("expired", "deadline")
    assert read((1, text(ids=[], finish_reason="abort")), (2, DONE)).status == "failed"


def test_endings_that_are_none() -> None:
    assert "without [DONE]" in read((1, text(ids=[1]))).reason
    assert "without [DONE]" in read((1, text(ids=[1]) + b"data: [DONE]\n")).reason
    assert "without [DONE]" in read().reason
    late = read((1, text(ids=[1]) + DONE), (2, text(ids=[2])))
    assert (late.status, late.output_tokens) == ("failed", 1)
    assert "after [DONE]" in late.reason
    assert read((1, text(ids=[1]) + DONE), (2, b": bye\n\n"), (3, DONE)).status == "ok"


@pytest.mark.parametrize(
    "bad", [b"{", b"no json", b"[1]", b'{"choices": 3}', b'{"choices": [{"token_ids": "x"}]}']
)
def test_events_that_cannot_be_read(bad: bytes) -> None:
    got = read((1, text(ids=[1])), (2, text(ids=[2]) + event(bad)), (3, DONE))
    assert (got.status, got.output_tokens) == ("failed", 2)
    assert "cannot be read" in got.reason
    assert "\n" not in got.reason


_EVENTS = st.lists(
    st.sampled_from(
        [
            *(text(ids=[1]), text(ids=[1, 2], text="é💡"), text(), text(said=9)),
            *(delta(role="assistant"), delta(reasoning="r"), b": ping\n\n", DONE),
            *(event(ERROR), event(b"{"), event({"error": {"code": 503, "message": "busy"}})),
        ]
    ),
    max_size=8,
).map(b"".join)


@given(_EVENTS, st.data())
def test_any_cut_gives_the_same_outcome(stream: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    whole = read((1, stream), keep=True)
    parts = read(*((1, stream[a:b]) for a, b in pairwise([0, *cuts, len(stream)])), keep=True)
    for name in ("status", "reason", "output_tokens", "exact", "first_output_ns", "prompt_tokens", "done_ns"):
        assert getattr(parts, name) == getattr(whole, name), name
    assert parts.token_ids == whole.token_ids
    assert sum(parts.chunk_tokens) == whole.output_tokens
