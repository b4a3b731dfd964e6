"""What one event of a stream says, and nothing more of it than is used.

The forms are those of vLLM 0.32.0: `CompletionStreamResponse` (`entrypoints/openai/completion/protocol.py`), the
chat chunks with a `delta`, and `ErrorResponse` (`entrypoints/serve/engine/protocol.py`). Unknown fields are
skipped without being built.
"""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"[DONE]"
_MAX_MESSAGE = 300


class Details(msgspec.Struct):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """`usage`, of one chunk or of the whole stream."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None


class Delta(msgspec.Struct):
    """`choices[].delta` of a chat chunk."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    """One of `choices`."""

    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    delta: Delta | None = None


class Chunk(msgspec.Struct):
    """One event."""

    id: str | None = None
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


decode_chunk = msgspec.json.Decoder(Chunk).decode


def one_line(text: str, limit: int = _MAX_MESSAGE) -> str:
    """Text of a stranger as one short line without control characters."""
    # what is cut away is not worth cleaning
    head = text[: 4 * limit]
    line = " ".join("".join(c if c.isprintable() else " " for c in head).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def error_message(error: Any) -> tuple[str, int | None]:
    """Message and HTTP code of an `error` value: an object in vLLM, a bare string from its key check.

    Where the error has a `reason`, a word for programs, that is taken for the message.
    """
    if not isinstance(error, dict):
        return one_line(str(error)), None
    code = error.get("code")
    message = error.get("reason") or error.get("message") or error.get("type") or "error without a message"
    return one_line(str(message)), code if isinstance(code, int) and not isinstance(code, bool) else None


def body_message(body: bytes) -> str:
    """What an error body says: the message of its error object, else its text."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return one_line(body.decode("utf-8", "replace"))
    if isinstance(value, dict) and value.get("error"):
        return error_message(value["error"])[0]
    if isinstance(value, dict) and isinstance(value.get("detail"), str):
        return one_line(value["detail"])
    return one_line(body.decode("utf-8", "replace"))
