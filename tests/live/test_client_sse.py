"""Server-sent events from bytes: the events do not depend on how the network cut the stream."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engines.live.client.sse import EventSplitter, EventTooLong


def events(*reads: bytes) -> list[bytes]:
    splitter = EventSplitter()
    return [event for read in reads for event in splitter.feed(read)]


def test_several_events_in_one_read() -> None:
    assert events(b"data: a\n\ndata: b\n\ndata: c\n\nda") == [b"a", b"b", b"c"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_line_ends(end: bytes) -> None:
    lines = [
        b": a comment",
        b"event: message",
        b"data: one",
        b"",
        b"data: two",
        b"data:three",
        b"id: 7",
        b"",
        b"",
    ]
    assert events(end.join(lines)) == [b"one", b"two\nthree"]


def test_line_ends_may_be_mixed_and_cut() -> None:
    assert events(b"data: a\r", b"\n\r", b"\ndata: b\n", b"\r\n", b"data: c\r", b"\r", b"\ndata: d\n\n") == [
        *(b"a", b"b", b"c", b"d")
    ]


def test_byte_order_mark_only_at_the_start() -> None:
    mark = b"\xef\xbb\xbf"
    assert events(mark + b"data: a\n\n" + mark + b"data: b\n\n") == [b"a"]
    assert events(mark[:1], mark[1:2], mark[2:] + b"data: a\n\n") == [b"a"]
    assert events(mark[:2], b"data: a\n\n") == []


def test_fields_by_the_letter() -> None:
    assert events(b"data\n\n") == [b""]
    assert events(b"data:\n\n") == [b""]
    assert events(b"data:  two spaces\n\n") == [b" two spaces"]
    assert events(b"database: x\n\n: data: y\n\nretry: 5\n\n\n\n") == []
    assert events(b"data: a: b\n\n") == [b"a: b"]


def test_an_event_without_its_blank_line_is_none() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n\ndata: b\n") == [b"a"]
    assert splitter.unfinished


def test_a_character_that_two_reads_share() -> None:
    text = "data: né 💡\n\n".encode()
    for cut in range(len(text)):
        assert events(text[:cut], text[cut:]) == ["né 💡".encode()]


def test_endless_event_is_refused() -> None:
    splitter = EventSplitter(limit=1000)
    assert splitter.feed(b"data: " + b"x" * 500) == []
    assert splitter.feed(b"x" * 600) == []
    with pytest.raises(EventTooLong):
        splitter.feed(b"x")


_PIECES = st.lists(
    st.sampled_from(
        [
            *(b"data: ", b"data:", b"data", b":", b" ", b"\n", b"\r", b"\r\n", b"\n\n", b"\r\n\r\n"),
            *(b"event: x", b"\xef\xbb\xbf", b"\xef", "é💡".encode(), b"[DONE]", b'{"a": 1}', b"x"),
        ]
    ),
    max_size=40,
).map(b"".join)


@given(_PIECES, st.data())
def test_any_cut_gives_the_same_events(stream: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reads = [stream[a:b] for a, b in pairwise([0, *cuts, len(stream)])]
    assert events(*reads) == events(stream)
    assert events(*(stream[i : i + 1] for i in range(len(stream)))) == events(stream)


@given(_PIECES)
def test_agrees_with_the_rules_applied_line_by_line(stream: bytes) -> None:
    """The standard's own procedure, written out plainly."""
    text = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    expected: list[bytes] = []
    held: list[bytes] = []
    for line in text.split(b"\n")[:-1]:
        if not line:
            if held:
                expected.append(b"\n".join(held))
            held = []
            continue
        name, _, value = line.partition(b":")
        if name == b"data":
            held.append(value[1:] if value.startswith(b" ") else value)
    assert events(stream) == expected
