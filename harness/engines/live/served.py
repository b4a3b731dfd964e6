"""What a live run must know of the model that it serves, read from its folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import UserError

_TEXT = (".json", ".jinja", ".txt", ".model")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
# Of weights the ends and the length are taken: whole ones take minutes for a large model.
_SAMPLE_BYTES = 2**20
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model in a folder.

    Attributes:
        sha256: over its texts, and over the ends and lengths of its weights.
        vocab_size: ids below this are ordinary tokens.
        max_tokens: longest request.
        kv_token_bytes: what a token takes in a float32 KV cache; 0 where the configuration does not tell.
    """

    folder: Path
    name: str
    sha256: str
    vocab_size: int
    max_tokens: int
    kv_token_bytes: int


def served_model(folder: Path) -> ServedModel:
    """Read a model's folder; UserError where it holds no readable config.json."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        vocabulary = int(config["vocab_size"])
        longest = int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"model {folder}: its config.json does not tell vocab_size and max_position_embeddings; "
            "give a model's folder"
        ) from None
    return ServedModel(
        folder=folder,
        name=folder.resolve().name,
        sha256=_digest(folder),
        vocab_size=_ordinary(folder, vocabulary),
        max_tokens=longest,
        kv_token_bytes=_kv_token_bytes(config),
    )


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in _TEXT and path.is_file():
            digest.update(f"{path.name}\0".encode() + path.read_bytes())
        elif path.suffix in _WEIGHTS and path.is_file():
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            for part in _ends(path):
                digest.update(part)
    return digest.hexdigest()


def _ends(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield file.read(_SAMPLE_BYTES)
        file.seek(max(0, path.stat().st_size - _SAMPLE_BYTES))
        yield file.read(_SAMPLE_BYTES)


def _ordinary(folder: Path, vocabulary: int) -> int:
    """Ids below which there are no special tokens, where those come last, as in most large vocabularies."""
    try:
        added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
        special = [int(one["id"]) for one in added if int(one["id"]) >= vocabulary // 2]
    except (OSError, ValueError, KeyError, TypeError):
        return vocabulary
    return min([vocabulary, *special])


def _kv_token_bytes(config: dict[str, Any]) -> int:
    try:
        heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
        width = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        return 2 * heads * width * int(config["num_hidden_layers"]) * _FLOAT32_BYTES
    except (KeyError, TypeError, ValueError):
        return 0
