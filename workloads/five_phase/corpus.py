"""The text that everything is made from: the pin's own sources, and phrases of ours.

Nothing is downloaded. The files are found beside the installed vLLM without importing it, and
`corpus_files.txt` holds the sha256 of each: another vLLM would give another workload under the same
name, so a file that differs is an error.
"""

from __future__ import annotations

import hashlib
import importlib.util
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

import numpy as np

from harness.errors import UserError
from workloads.five_phase import phrases
from workloads.five_phase.draft import frozen
from workloads.five_phase.tokenizer import BYTES, PIECES, Tokenizer
from workloads.request import TokenIds

FILE_LIST = "corpus_files.txt"
VLLM_VERSION = "0.32.0"
# What is edited in completion sessions; the rest is read, as documents.
CODE_PREFIXES = ("vllm/v1/core/", "vllm/v1/engine/")


@dataclass(frozen=True, slots=True)
class Text:
    """Files one after the other, as tokens.

    Attributes:
        ids: all tokens, shape (tokens,).
        starts: index of each file's first token, rising.
        names: the files' paths.
    """

    ids: TokenIds
    starts: tuple[int, ...]
    names: tuple[str, ...]

    def name_at(self, index: int) -> str:
        """The path of the file that holds this token."""
        return self.names[bisect_right(self.starts, index) - 1]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokenised texts, and a sha256 over all that decides their tokens but the vocabulary's size."""

    tokenizer: Tokenizer
    code: Text
    documents: Text
    sha256: str


def file_list() -> dict[str, str]:
    """sha256 by path, relative to the folder that holds the package `vllm`, in the list's order."""
    text = resources.files(__package__).joinpath(FILE_LIST).read_text(encoding="utf-8")
    rows = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    return {path: digest for digest, path in rows}


def site_folder() -> Path:
    """The folder that holds the installed package `vllm`, which stays unimported.

    Raises:
        UserError: if vLLM is not installed here.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"workload: vLLM {VLLM_VERSION} is not installed here, and its sources are the workload's text; "
            "run make setup"
        )
    return Path(spec.submodule_search_locations[0]).parent


def read_texts(folder: Path) -> dict[str, str]:
    """The listed files under `folder`, each checked against its sha256.

    Raises:
        UserError: if one is missing or is not the pin's.
    """
    texts = {}
    for path, digest in file_list().items():
        try:
            data = (folder / path).read_bytes()
        except OSError as error:
            raise UserError(
                f"workload: cannot read {path} of the installed vLLM ({error.strerror}); "
                f"it should be version {VLLM_VERSION}: run make setup"
            ) from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise UserError(
                f"workload: {path} of the installed vLLM is not that of version {VLLM_VERSION}, so the traffic "
                "would be another one; run make setup to get the pin back"
            )
        texts[path] = data.decode()
    return texts


@lru_cache(maxsize=4)
def load_corpus(vocab_size: int) -> Corpus:
    """The corpus with ids below `vocab_size`; read and tokenised once a process.

    Raises:
        UserError: if vLLM is absent or another one, or if the vocabulary is too small.
    """
    if vocab_size < BYTES:
        raise UserError(f"workload: the vocabulary needs at least {BYTES} ids, not {vocab_size}")
    texts = read_texts(site_folder())
    ours = phrases.all_text()
    tokenizer = Tokenizer([*texts.values(), ours], vocab_size)
    files = {path: tokenizer.encode(text) for path, text in texts.items()}
    code = {path: ids for path, ids in files.items() if path.startswith(CODE_PREFIXES)}
    digest = hashlib.sha256()
    for piece in (*file_list().values(), PIECES.pattern, ours):
        digest.update(piece.encode() + b"\0")
    return Corpus(tokenizer, _text(code), _text(files), digest.hexdigest())


def _text(files: dict[str, TokenIds]) -> Text:
    ends = np.cumsum([len(ids) for ids in files.values()])
    starts = (0, *(int(end) for end in ends[:-1]))
    return Text(frozen(np.concatenate(list(files.values()))), starts, tuple(files))
