"""`bench step-error`: what it prints, what it writes, and what it says of a wrong folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import cli


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["step-error", *arguments])
    return int(ended.value.code or 0)


def test_tables_name_their_profile(
    shared_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "error.json"
    assert run(str(shared_dir / "data" / "rtx4090-llama31-8b"), "--json", str(out)) == 0
    printed = capsys.readouterr().out
    assert "rtx4090-24g/llama-3.1-8b" in printed
    assert "not measured" in printed
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["profile"] == "rtx4090-24g/llama-3.1-8b"
    assert written["not_measured"] == ["at a capture boundary"]
    assert written["regimes"]["mixed"]["rows"] > 1000


def test_tables_over_sizes_name_their_gpu(shared_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(shared_dir / "data" / "aic" / "a100_sxm")) == 0
    printed = capsys.readouterr().out
    assert "a100-80g/llama-3.1-8b" in printed
    assert "several prompts" in printed


def test_what_is_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(tmp_path / "none")) == 2
    assert "no such folder" in capsys.readouterr().err
    assert run(str(tmp_path)) == 2
    said = capsys.readouterr().err
    assert "give --profile" in said
    assert said.count("\n") == 1
    assert run(str(tmp_path), "--profile", "rtx4090-24g/llama-3.1-8b") == 2
    assert "attention.csv: cannot be read" in capsys.readouterr().err
