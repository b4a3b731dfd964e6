"""A small tokenizer for virtual runs: words, numbers, runs of spaces, single signs.

It loses nothing: ids 0 to 255 are bytes, and every piece that the vocabulary lacks is spelt in
them. The vocabulary is made from the workload's own texts in order of first appearance, so an id
means the same on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from workloads.five_phase.draft import frozen
from workloads.request import TokenIds

# A letter run takes one space before it along, as the tokenizers of real models do.
PIECES = re.compile(r" ?[A-Za-z]+|\d{1,3}| +|[^\sA-Za-z\d]|\s")
BYTES = 256


class Tokenizer:
    """Text to ids and back.

    Args:
        texts: where the vocabulary comes from, in order.
        vocab_size: ids are below this; pieces that find no room are spelt in bytes.

    Raises:
        ValueError: if there is no room for the 256 bytes.
    """

    def __init__(self, texts: Iterable[str], vocab_size: int) -> None:
        if vocab_size < BYTES:
            raise ValueError(f"a vocabulary of {vocab_size} has no room for {BYTES} bytes")
        pieces: dict[str, None] = {}
        for text in texts:
            pieces.update(dict.fromkeys(PIECES.findall(text)))
        kept = list(pieces)[: vocab_size - BYTES]
        self._ids = {piece: BYTES + i for i, piece in enumerate(kept)}
        self._bytes = [bytes([i]) for i in range(BYTES)] + [piece.encode() for piece in kept]

    def __len__(self) -> int:
        return len(self._bytes)

    def encode(self, text: str) -> TokenIds:
        """Token ids of the text, shape (tokens,), read-only."""
        pieces = PIECES.findall(text)
        ids = list(map(self._ids.get, pieces))
        if None not in ids:
            return frozen(np.array(ids, dtype=np.int32))
        spelt: list[int] = []
        for piece, known in zip(pieces, ids, strict=True):
            if known is None:
                spelt.extend(piece.encode())
            else:
                spelt.append(known)
        return frozen(spelt)

    def encode_bytes(self, data: bytes) -> TokenIds:
        """Token ids of bytes that may end within a character, as half-typed text does."""
        try:
            return self.encode(data.decode())
        except UnicodeDecodeError:
            return frozen(list(data))

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one id stands for."""
        return self._bytes[token]

    def decode(self, ids: TokenIds) -> str:
        """The text of the ids; bytes that are no UTF-8 show as replacement characters."""
        return b"".join(self._bytes[token] for token in ids.tolist()).decode(errors="replace")
