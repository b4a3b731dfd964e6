"""Mooncake traces: real ones are read, broken ones are refused by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import UserError
from workloads.mooncake import MooncakeRow, read_mooncake

GOOD = '{"timestamp": 5, "input_length": 600, "output_length": 9, "hash_ids": [0, 4]}\n'


def test_rows(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD + "\n" + GOOD)
    assert list(read_mooncake(path)) == [MooncakeRow(5, 600, 9, (0, 4))] * 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"timestamp": 5', "not JSON"),
        ("[1]", "expected an object"),
        (GOOD.replace("600", '"600"'), "input_length is '600'"),
        (GOOD.replace("600", "-1"), "input_length is -1"),
        (GOOD.replace("9", "true"), "output_length is True"),
        (GOOD.replace('"timestamp": 5, ', ""), "timestamp is missing"),
        (GOOD.replace("[0, 4]", "[0, 4.5]"), "hash_ids is [0, 4.5]"),
        (GOOD.replace("[0, 4]", "7"), "hash_ids is 7"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD + line)
    with pytest.raises(UserError) as caught:
        list(read_mooncake(path))
    assert f"{path}, line 2: {said}" in str(caught.value)


def test_no_file_and_no_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the trace"):
        list(read_mooncake(tmp_path / "none.jsonl"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not a text file"):
        list(read_mooncake(tmp_path / "binary"))


def test_the_public_trace(shared_dir: Path) -> None:
    rows = list(read_mooncake(shared_dir / "data" / "traces" / "mooncake_conversation.jsonl"))
    assert len(rows) > 10_000
    assert rows[0] == MooncakeRow(0, 6758, 500, tuple(range(14)))
    assert all(len(row.hash_ids) == -(-row.input_tokens // 512) for row in rows)
