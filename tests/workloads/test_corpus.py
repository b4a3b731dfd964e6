"""The tokenizer loses nothing, and the corpus is the pin's or an error."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UserError
from workloads.five_phase.corpus import file_list, load_corpus, read_texts, site_folder
from workloads.five_phase.tokenizer import Tokenizer

SMALL = Tokenizer(["def add(a, b):\n    return a + b  # adds 123\n"], 270)


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back(text: str) -> None:
    ids = SMALL.encode(text)
    assert SMALL.decode(ids) == text
    assert all(0 <= token < 270 for token in ids.tolist())


def test_known_pieces_are_one_token_and_others_are_bytes() -> None:
    tokenizer = Tokenizer(["def f(): pass"], 1_000)
    assert len(tokenizer.encode("def f(): pass")) == 6
    assert tokenizer.encode("xyz").tolist() == list(b"xyz")
    assert tokenizer.encode_bytes(b"\xc3").tolist() == [0xC3]
    # In order of first appearance, after the bytes.
    assert tokenizer.encode("def").tolist() == [256]


def test_ids_of_a_vocabulary_with_no_room_for_bytes_are_refused() -> None:
    with pytest.raises(UserError, match="at least 256"):
        load_corpus(100)


def test_the_corpus_reads_back_as_the_files(root: Path) -> None:
    corpus = load_corpus(128_256)
    texts = read_texts(site_folder())
    assert corpus.tokenizer.decode(corpus.documents.ids) == "".join(texts.values())
    assert corpus.code.names == tuple(
        name for name in texts if name.startswith(("vllm/v1/core", "vllm/v1/engine"))
    )
    assert corpus.code.name_at(0) == corpus.code.names[0]
    assert corpus.code.name_at(len(corpus.code.ids) - 1) == corpus.code.names[-1]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The corpus's files in a folder of their own."""
    for path in file_list():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(site_folder() / path, tmp_path / path)
    return tmp_path


def test_a_changed_file_is_named(copy: Path) -> None:
    changed = copy / "vllm/v1/core/block_pool.py"
    changed.write_text(changed.read_text() + "\n")
    with pytest.raises(UserError, match=r"vllm/v1/core/block_pool\.py .* is not that of version 0\.32\.0"):
        read_texts(copy)


def test_a_missing_file_is_named(copy: Path) -> None:
    (copy / "vllm/config/cache.py").unlink()
    with pytest.raises(UserError, match=r"vllm/config/cache\.py"):
        read_texts(copy)


def test_no_vllm_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="make setup"):
        site_folder()
