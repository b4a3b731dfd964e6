"""How a request that a patch ended is answered over HTTP.

The engine's stop reason (`patches.seam.endings`) travels through vLLM as the message of an error. Here it becomes a
status, a `Retry-After` and a body that a program can read:

    {"error": {"message": ..., "type": ..., "param": null, "code": 503, "reason": "queue_depth", "retry_after_s": 3}}
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from patches.seam import endings
from patches.seam.endings import Ending

# How vLLM writes an error into a stream (`create_streaming_error_response`).
ERROR_EVENT = b'data: {"error"'
# Statuses that a stream's first event may turn into, before anything was sent.
BEFORE_FIRST_BYTE = frozenset({408, 503})
_TYPES = {408: "RequestTimeoutError", 503: "ServiceUnavailableError"}
_EXPIRED = "the request's deadline passed before it could be served"

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error as it will be sent. `ending` where a patch of ours caused it; `retry_after_s` where that is known."""

    status: int
    error: dict[str, Any]
    ending: Ending | None
    retry_after_s: int | None = None

    def later(self, retry_after_s: int) -> Refusal:
        """vLLM's own refusal, with the time after which to come again."""
        return replace(
            self, error={**self.error, "retry_after_s": retry_after_s}, retry_after_s=retry_after_s
        )

    @property
    def body(self) -> bytes:
        """Of an answer of its own."""
        return json.dumps({"error": self.error}).encode()

    @property
    def event(self) -> bytes:
        """In a stream that has begun."""
        return b"data: " + self.body + b"\n\n"

    @property
    def headers(self) -> Headers:
        """Beside those that the answer has anyway."""
        found = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self.body))]
        if self.retry_after_s is not None:
            found.append((b"retry-after", b"%d" % self.retry_after_s))
        return found


def of_event(chunk: bytes) -> Refusal | None:
    """The error in one event of a stream; None where there is none that concerns us."""
    if not chunk.startswith(ERROR_EVENT):
        return None
    return of_body(chunk.split(b"\n", 1)[0].removeprefix(b"data: "))


def of_body(body: bytes) -> Refusal | None:
    """The error of an answer's body; None where there is none that concerns us."""
    try:
        error = json.loads(body)["error"]
        code, message = error["code"], error["message"]
    except (ValueError, KeyError, TypeError):
        return None
    ending = endings.parse(message)
    if ending is not None:
        return Refusal(ending.http_status, _error(ending), ending, ending.retry_after_s)
    known = isinstance(code, int) and code in BEFORE_FIRST_BYTE
    return Refusal(code, error, None) if known else None


def plain_error(status: int, kind: str, message: str) -> bytes:
    """A body for what the front itself refuses."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()


def _error(ending: Ending) -> dict[str, Any]:
    told: dict[str, Any] = {"type": _TYPES[ending.http_status], "param": None, "code": ending.http_status}
    told["reason"] = ending.code
    if ending.retry_after_s is None:
        return {"message": _EXPIRED, **told}
    why = endings.CODES.get(ending.code, "the engine took no more requests")
    message = f"refused: {why}; try again in {ending.retry_after_s} s"
    return {"message": message, **told, "retry_after_s": ending.retry_after_s}
