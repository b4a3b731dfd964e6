"""Every format is recognised by its content and read exactly; what fits two formats, or none, is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UserError
from tests.workloads import trace_files as files
from workloads.traces import FORMATS, TraceRow, Window, open_trace
from workloads.traces.summary import Gatherer
from workloads.traces.values import SeenIds, iso_ns
from workloads.traces.window import read_window

MS, S = 1_000_000, 1_000_000_000


def read(path: Path, format_name: str | None = None) -> tuple[list[TraceRow], Counter[str]]:
    tally: Counter[str] = Counter()
    return list(open_trace(path, format_name).rows(tally)), tally


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("packed", [False, True])
def test_each_format_is_recognised_whatever_the_file_is_called(
    tmp_path: Path, name: str, packed: bool
) -> None:
    path = files.write(tmp_path / "trace.data", files.SMALL[name], packed=packed)
    source = open_trace(path)
    assert source.reader.name == name
    rows, _ = read(path)
    assert rows
    assert rows == read(path, name)[0]


@pytest.mark.parametrize("name", FORMATS)
def test_line_ends_byte_order_mark_and_blank_lines_change_nothing(tmp_path: Path, name: str) -> None:
    text = files.SMALL[name]
    plain, _ = read(files.write(tmp_path / "plain", text))
    for number, other in enumerate(
        (
            text.replace("\n", "\r\n").encode(),
            b"\xef\xbb\xbf" + text.encode(),
            b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
            text.rstrip("\n").encode(),
            text.encode() + b"\n  \n",
        )
    ):
        assert read(files.write(tmp_path / f"other{number}", other))[0] == plain
    # Blank lines move what follows, so only the line numbers differ.
    spaced, _ = read(files.write(tmp_path / "spaced", text.replace("\n", "\n\n")))
    assert [row.arrival_ns for row in spaced] == [row.arrival_ns for row in plain]
    assert [row.line for row in spaced] == [2 * row.line - 1 for row in plain]


def test_mooncake_rows(tmp_path: Path) -> None:
    rows, _ = read(files.write(tmp_path / "t", files.SMALL["mooncake"]))
    assert rows[1] == TraceRow(1500 * MS, 1100, 30, 2, (0, 1, 3), 512)


def test_bailian_rows_name_their_chat_and_keep_type_and_turn(tmp_path: Path) -> None:
    path = files.write(tmp_path / "t", files.SMALL["bailian"])
    assert open_trace(path).label_names == ("type", "turn")
    rows, tally = read(path)
    assert rows[2] == TraceRow(61_114 * MS, 60, 8, 3, (10, 11, 13, 14), 16, "chat-7", ("text", "2"))
    assert [row.session for row in rows] == ["chat-7", "chat-8", "chat-7"]
    assert not tally
    orphan = {**files.BAILIAN[2], "parent_chat_id": 99}
    rows, tally = read(files.write(tmp_path / "o", files.lines(*files.BAILIAN[:2], orphan)))
    assert rows[2].session == "chat-99"
    assert tally == {"unknown_parent": 1}


def test_timed_trace_counts_seconds_and_blocks_of_16_and_may_lack_ids(tmp_path: Path) -> None:
    rows, _ = read(files.write(tmp_path / "t", files.SMALL["timed_trace"]))
    assert rows[0] == TraceRow(250 * MS, 40, 5, 1, (1, 2, 3), 16)
    bare = [{key: value for key, value in row.items() if key != "hash_ids"} for row in files.TIMED]
    path = files.write(tmp_path / "bare", files.lines(*bare))
    assert open_trace(path).reader.name == "timed_trace"
    assert read(path)[0][1] == TraceRow(2 * S, 48, 6, 2)


def test_timed_trace_in_blocks_of_512_is_told_from_mooncake_by_its_fractions_of_a_second(
    tmp_path: Path,
) -> None:
    rows = [{**row, "timestamp": row["timestamp"] / 1000} for row in files.MOONCAKE]  # type: ignore[operator]
    path = files.write(tmp_path / "t", files.lines(*rows))
    assert (open_trace(path).reader.name, open_trace(path).block_tokens) == ("timed_trace", 512)
    assert read(path)[0][1].arrival_ns == 1500 * MS


def test_what_fits_two_formats_is_refused_until_one_is_named(tmp_path: Path) -> None:
    row = {"timestamp": 3, "input_length": 9, "output_length": 5, "hash_ids": [1]}
    path = files.write(tmp_path / "t", files.lines(row, row))
    with pytest.raises(UserError, match=r"fits mooncake and timed_trace.*--format mooncake"):
        open_trace(path)
    assert read(path, "mooncake")[0][0].arrival_ns == 3 * MS
    assert read(path, "timed_trace")[0][0].arrival_ns == 3 * S
    with pytest.raises(UserError, match="not in the format burstgpt; it looks like mooncake or timed_trace"):
        open_trace(path, "burstgpt")
    with pytest.raises(UserError, match="no trace format 'moon'; the formats are mooncake, bailian"):
        open_trace(path, "moon")


def test_azure_times_are_exact_to_the_nanosecond(tmp_path: Path) -> None:
    rows, _ = read(files.write(tmp_path / "23", files.AZURE_2023))
    assert rows[0] == TraceRow(1_700_158_623_979_960_000, 4808, 10, 2)
    assert rows[2].arrival_ns == 1_700_158_625_000_000_100
    rows, _ = read(files.write(tmp_path / "24", files.AZURE_2024))
    assert rows[0].arrival_ns == 1_715_472_000_001_163_000
    assert rows[1].arrival_ns - rows[0].arrival_ns == 998_837_000


@pytest.mark.parametrize(
    ("text", "zone_s"), [("+00:00", 0), ("Z", 0), ("+02:00", -7200), ("-0530", 19_800), ("", 0)]
)
def test_a_zone_moves_the_time_to_utc(text: str, zone_s: int) -> None:
    at_ns, zoned = iso_ns(f"1970-01-02T00:00:01.5{text}")
    assert at_ns == (86_401 + zone_s) * S + S // 2
    assert zoned == bool(text)


def test_failed_calls_of_burstgpt_are_left_out_and_counted(tmp_path: Path) -> None:
    rows, tally = read(files.write(tmp_path / "t", files.BURSTGPT))
    assert tally == {"failed": 2}
    assert rows == [
        TraceRow(5 * S, 472, 18, 2, labels=("ChatGPT", "Conversation log")),
        TraceRow(118 * S, 417, 276, 5, labels=("GPT-4", "Conversation log")),
    ]
    path = files.write(tmp_path / "2", files.BURSTGPT_2)
    assert open_trace(path).label_names == ("Model", "Log Type")
    assert [row.session for row in read(path)[0]] == ["1722ac82-0a46", "", "1722ac82-0a46"]


def test_servegen_is_read_as_csv_as_json_lines_and_as_one_json_array(tmp_path: Path) -> None:
    expected = [(62_500_000, 300, 12), (1500 * MS, 80, 7)]
    flat = [{"request_id": r["request_id"], "timestamp": r["timestamp"], **r["data"]} for r in files.SERVEGEN]  # type: ignore[dict-item]
    for number, text in enumerate(
        (
            files.SERVEGEN_CSV,
            files.lines(*files.SERVEGEN),
            files.lines(*flat),
            json.dumps(files.SERVEGEN),
            json.dumps(flat, indent=1),
        )
    ):
        rows, _ = read(files.write(tmp_path / str(number), text))
        assert [(row.arrival_ns, row.input_tokens, row.output_tokens) for row in rows] == expected


def test_an_array_longer_than_one_piece_is_read_whole(tmp_path: Path) -> None:
    rows = [{**files.SERVEGEN[0], "request_id": i} for i in range(30_000)]
    path = files.write(tmp_path / "t", json.dumps(rows))
    assert path.stat().st_size > 2 << 20
    assert [row.line for row in read(path)[0]] == list(range(1, 30_001))


def test_columns_may_come_in_any_order_and_others_become_labels(tmp_path: Path) -> None:
    text = "generatedtokens,customer,ContextTokens,TIMESTAMP\n7,acme, 374.0 ,2023-11-16 18:15:46.6805900\n"
    path = files.write(tmp_path / "t", text)
    assert open_trace(path).label_names == ("customer",)
    assert read(path)[0][0] == TraceRow(1_700_158_546_680_590_000, 374, 7, 2, labels=("acme",))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file is empty"),
        ("\n \n", "the file is empty"),
        ("a,b\n1,2\n", "begins with the columns a, b; known are Mooncake"),
        ('{"a": 1}\n', "begins with the keys a; known are Mooncake"),
        ("[]\n", "no request in it"),
        ("[1, 2]\n", "line 1: expected an object"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request in it, only a header"),
        ("TIMESTAMP,ContextTokens,contexttokens\n", "the header names the column 'contexttokens' twice"),
        (
            "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15 00:00:00,1,2,3\n",
            "images, sound or video",
        ),
        ('{"request_id": 0, "timestamp": 1.0, "data": {"text_tokens": 4}}\n', "images, sound or video"),
        (
            '{"request_id": 0, "type": "text", "input_length": 61, "output_length": 3}\n',
            "without arrival times",
        ),
        ("600,1.5,0.9,Gamma,1.2,0.8\n", "not a trace that is known"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"),
    ],
)
def test_what_is_no_trace_is_refused_with_what_it_is(tmp_path: Path, text: str, says: str) -> None:
    path = files.write(tmp_path / "t", text)
    with pytest.raises(UserError) as caught:
        open_trace(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_public_traces_have_their_published_sizes(shared_dir: Path) -> None:
    folder = shared_dir / "data" / "traces"
    for name, format_name, requests, mean, longest in (
        ("azure2023_code.csv", "azure-2023", 8819, 2047.8, 7437),
        ("azure2023_conv.csv", "azure-2023", 19_366, 1154.7, 14_050),
        ("mooncake_synthetic.jsonl", "mooncake", 3993, 15_325.5, 191_378),
    ):
        source = open_trace(folder / name)
        gathered, scan = read_window(source, Window(), lambda: Gatherer(lambda _: "", None))
        figures = gathered.figures()
        assert source.reader.name == format_name
        assert (figures.requests, scan.out_of_order, scan.tally) == (requests, 0, {})
        assert (figures.input.mean, figures.input.max) == (mean, longest)


@given(st.lists(st.integers(0, 30)))
def test_seen_ids_are_those_of_a_set(values: list[int]) -> None:
    ids, plain = SeenIds(), set[int]()
    for value in values:
        assert ids.add(value) == (value not in plain)
        plain.add(value)
        assert all((i in ids) == (i in plain) for i in range(32))
