"""A broken row, a broken file, and a file that unpacks to far more than it shows: one clear line, little memory."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from tests.workloads import trace_files as files
from workloads.traces import Window, open_trace
from workloads.traces.summary import Gatherer
from workloads.traces.window import read_window


def fault(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        list(open_trace(path).rows(Counter()))
    assert "\n" not in str(caught.value)
    return str(caught.value)


MOON: dict[str, Any] = dict(files.MOONCAKE[2])
CHAT: dict[str, Any] = dict(files.BAILIAN[2])


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ('{"timestamp": 5', "not JSON (Expecting ',' delimiter, column 16); is the file complete?"),
        ("[1]", "expected an object"),
        ("nonsense", "not JSON"),
        ("[" * 20_000, "not JSON (nested too deeply)"),
        ({**MOON, "timestamp": float("nan")}, "not JSON (NaN is no number)"),
        ({**MOON, "timestamp": float("inf")}, "not JSON (Infinity is no number)"),
        ({**MOON, "timestamp": -1}, "timestamp is -1; expected a time of 0 or later"),
        ({**MOON, "timestamp": "3000"}, "timestamp is '3000'; expected a number"),
        ({**MOON, "timestamp": True}, "timestamp is True; expected a number"),
        ({**MOON, "timestamp": 10**15}, "is the unit right?"),
        ('{"timestamp": 1e999999999, "input_length": 7, "hash_ids": [1]}', "is the unit right?"),
        ('{"timestamp": 1e99999999999999999999, "hash_ids": [1]}', "not JSON"),
        ('{"timestamp": 1, "input_length": 1e999999999, "hash_ids": [1]}', "more than 10,000,000 tokens"),
        ({key: value for key, value in MOON.items() if key != "timestamp"}, "timestamp is missing"),
        ({**MOON, "input_length": 0}, "input_length is 0; a request without a prompt cannot be sent"),
        ({**MOON, "input_length": -700}, "input_length is -700; expected a whole number, 0 or more"),
        ({**MOON, "input_length": "700"}, "input_length is '700'; expected a number"),
        ({**MOON, "input_length": 700.5}, "input_length is '700.5'; expected a whole number"),
        ({**MOON, "input_length": 10**9}, "more than 10,000,000 tokens are no request"),
        ({**MOON, "output_length": None}, "output_length is missing"),
        ({**MOON, "output_length": [5]}, "output_length is [5]; expected a number"),
        ({**MOON, "hash_ids": 7}, "hash_ids is 7; expected a list of whole numbers"),
        ({**MOON, "hash_ids": [0, 4.5]}, "hash_ids holds '4.5'; expected whole numbers"),
        ({**MOON, "hash_ids": [0, -4]}, "hash_ids holds -4, which is below 0"),
        ({**MOON, "hash_ids": [0, 1 << 64]}, "which is too large"),
        ({**MOON, "hash_ids": [0]}, ""),
        ({**MOON, "hash_ids": [0, 4, 5]}, "has 3 ids of 512 tokens, but 700 tokens of input have 2 blocks"),
        ({key: value for key, value in MOON.items() if key != "hash_ids"}, "hash_ids is missing"),
    ],
)
def test_a_broken_row_of_mooncake_is_named(tmp_path: Path, bad: Any, says: str) -> None:
    path = files.write(tmp_path / "t.jsonl", files.lines(*files.MOONCAKE, bad))
    if not says:
        # The last block is not full, and may go without a name.
        assert len(list(open_trace(path).rows(Counter()))) == 4
        return
    said = fault(path)
    assert said.startswith(f"{path}: line 4: ")
    assert says in said


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (files.BAILIAN[0], "chat_id 7 has come before"),
        ({**CHAT, "chat_id": None}, "chat_id is missing"),
        ({**CHAT, "chat_id": -3}, "chat_id is -3"),
        ({**CHAT, "chat_id": 12, "parent_chat_id": "x"}, "parent_chat_id is 'x'; expected an id, or -1"),
    ],
)
def test_a_broken_row_of_bailian_is_named(tmp_path: Path, bad: Any, says: str) -> None:
    said = fault(files.write(tmp_path / "t", files.lines(*files.BAILIAN, bad)))
    assert f"{tmp_path / 't'}: line 4: " in said
    assert says in said


@pytest.mark.parametrize(
    ("name", "bad", "says"),
    [
        ("azure-2023", "2023-11-16 18:17:06,110", "2 fields, but the header names 3 columns"),
        ("azure-2023", "2023-11-16 18:17:06,0,7", "ContextTokens is 0; a request without a prompt"),
        ("azure-2023", "2023-11-16 18:17:06,,7", "ContextTokens is missing"),
        ("azure-2023", "2023-11-16 18:17:06,1e3,7.5", "GeneratedTokens is '7.5'"),
        ("azure-2023", "2023-11-16 18:17:06,nan,7", "ContextTokens is 'nan'; expected a number"),
        ("azure-2023", "2023-11-31 18:17:06,9,7", "TIMESTAMP has the day 2023-11-31, which there is not"),
        ("azure-2023", "2023-11-16 24:00:00,9,7", "there is no such time of day"),
        ("azure-2023", "2023-11-16 18:17:06.1234567890,9,7", "up to 9 digits"),
        ("azure-2023", "18:17:06,9,7", "expected a date and time such as"),
        ("azure-2023", "2023-11-16 18:17:06+00:00,9,7", "has a time zone, the rows before it have none"),
        ("azure-2024", "2024-05-12 00:00:03,9,7", "has no time zone"),
        ("azure-2023", '"2023-11-16', "not CSV"),
        ("azure-2023", "2023-11-16 18:17:06,٣,7", "ContextTokens is"),
        ("burstgpt", "-5,ChatGPT,4,5,9,API log", "Timestamp is '-5'; expected a time of 0 or later"),
        ("burstgpt", "130,ChatGPT,0,20,20,API log", "Request tokens is 0"),
        ("burstgpt", "130,ChatGPT,x,0,20,API log", "Request tokens is 'x'"),
        ("servegen", "1,2.0,5,5", "request_id 1 has come before"),
        ("servegen", "x,2.0,5,5", "request_id is 'x'"),
    ],
)
def test_a_broken_line_of_a_csv_is_named(tmp_path: Path, name: str, bad: str, says: str) -> None:
    path = files.write(tmp_path / "t.csv", f"{files.SMALL[name]}{bad}\n")
    number = files.SMALL[name].count("\n") + 1
    said = fault(path)
    assert said.startswith(f"{path}: line {number}: ")
    assert says in said


def test_an_answer_of_no_tokens_is_replayed_with_one_and_counted(tmp_path: Path) -> None:
    for name, row in (
        ("azure-2023", "2023-11-16 18:17:06,9,0\n"),
        ("mooncake", files.lines({**MOON, "output_length": 0})),
    ):
        tally: Counter[str] = Counter()
        path = files.write(tmp_path / name, files.SMALL[name] + row)
        assert list(open_trace(path).rows(tally))[-1].output_tokens == 1
        assert tally == {"zero_output": 1}


def test_rows_out_of_order_are_counted_and_the_earliest_is_the_start(tmp_path: Path) -> None:
    rows = [files.MOONCAKE[2], files.MOONCAKE[0], files.MOONCAKE[1]]
    source = open_trace(files.write(tmp_path / "t", files.lines(*rows)))
    gathered, scan = read_window(source, Window(1.0, 2.0), lambda: Gatherer(lambda _: "", None))
    assert (scan.out_of_order, scan.span_s) == (1, 3.0)
    assert gathered.figures().input.total == 1100


@pytest.mark.parametrize("cut", [20, -4])
def test_a_gzip_file_that_ends_early_is_refused(tmp_path: Path, cut: int) -> None:
    data = gzip.compress(files.SMALL["azure-2023"].encode())
    said = fault(files.write(tmp_path / "t.gz", data[:cut]))
    assert "damaged gzip" in said
    assert "is the download complete?" in said


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"PK\x03\x04rest", "not a text file but a zip file; unpack it first"),
        (b"PAR1\xff\xfe", "a Parquet file"),
        ("TIMESTAMP,a".encode("utf-16"), "UTF-16"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n\xff\xfe\n", "not a text file in UTF-8"),
    ],
)
def test_files_of_other_kinds_are_called_by_name(tmp_path: Path, data: bytes, says: str) -> None:
    assert says in fault(files.write(tmp_path / "t", data))


def test_missing_files_folders_and_devices_are_refused(tmp_path: Path) -> None:
    assert "no such file" in fault(tmp_path / "none")
    assert "not a file" in fault(tmp_path)
    assert "not a file" in fault(Path("/dev/null"))


def test_a_json_array_that_is_not_closed_is_refused(tmp_path: Path) -> None:
    text = json.dumps(files.SERVEGEN)
    assert "element 3: the array is not closed" in fault(files.write(tmp_path / "a", text[:-1]))
    assert "element 2: not JSON" in fault(files.write(tmp_path / "b", text[:-5]))


def test_a_small_file_that_unpacks_to_much_takes_little_memory(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.gz"
    with gzip.open(bomb, "wb", compresslevel=1) as out:
        for _ in range(64):
            out.write(bytes(1 << 20))
    tracemalloc.start()
    try:
        assert "longer than 8 MiB, which no row of a trace is" in fault(bomb)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_long_trace_is_summed_up_without_being_held(tmp_path: Path) -> None:
    path = tmp_path / "long.csv.gz"
    with gzip.open(path, "wt", compresslevel=1) as out:
        out.write("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n")
        for i in range(16_000):
            out.write(f"{i / 8},ChatGPT,{i % 900 + 1},{i % 50 + 1},0,API log\n")
    source = open_trace(path)
    tracemalloc.start()
    try:
        gathered, scan = read_window(source, Window(), lambda: Gatherer(lambda _: "x", None))
        assert scan.rows == 16_000
        # Three numbers of 8 bytes a row; rows that are kept take 16 times that.
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()
    assert gathered.figures().peak_rps == 8.0


def test_only_the_first_rows_are_read_with_a_limit(tmp_path: Path) -> None:
    path = files.write(tmp_path / "t", files.SMALL["mooncake"] + "broken\n")
    assert len(list(open_trace(path).rows(Counter(), limit=3))) == 3
    with pytest.raises(UserError, match="line 4"):
        list(open_trace(path).rows(Counter(), limit=4))


def test_a_row_that_asks_for_what_is_not_modelled_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    rows = [row, row | {"timestamp": 5, "lora_name": "sql"}]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    said = fault(file)
    assert f"{file}: line 2: " in said
    assert "LoRA" in said
