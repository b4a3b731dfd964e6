"""The answer to one request as it is read: bytes in, tokens and times out. No network, no clock."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from harness.engines.live.client.chunk import DONE, Choice, Chunk, decode_chunk, error_message, one_line
from harness.engines.live.client.sse import EventSplitter, EventTooLong
from patches.seam import endings

# Statuses with which a server refuses a request, over HTTP or in an error object before the first token.
REFUSALS = frozenset({429, 503})
EXPIRED = 408


class Reading:
    """Collects one stream. `status` stays "" until the stream says how it ended."""

    __slots__ = (
        "_said",
        "_splitter",
        "cached_tokens",
        "chunk_ns",
        "chunk_tokens",
        "done_ns",
        "exact",
        "finish_reason",
        "first_output_ns",
        "keeps_ids",
        "output_tokens",
        "output_tokens_said",
        "prompt_tokens",
        "reason",
        "server_id",
        "status",
        "token_ids",
    )

    def __init__(self, keep_ids: bool) -> None:
        self._splitter = EventSplitter()
        self.keeps_ids = keep_ids
        self._said = 0
        self.chunk_ns = array("q")
        self.chunk_tokens = array("i")
        self.token_ids = array("i")
        self.first_output_ns: int | None = None
        self.output_tokens = 0
        self.output_tokens_said: int | None = None
        self.exact = True
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.server_id: str | None = None
        self.done_ns: int | None = None
        self.status = ""
        self.reason = ""

    def feed(self, now_ns: int, data: bytes) -> None:
        """Take what one read brought."""
        tokens = 0
        try:
            for event in self._splitter.feed(data):
                tokens += self._event(now_ns, event)
        except EventTooLong as error:
            self._fail(str(error))
        except msgspec.DecodeError as error:
            self._fail(f"an event cannot be read ({one_line(str(error), 120)})")
        if tokens:
            self.chunk_ns.append(now_ns)
            self.chunk_tokens.append(tokens)
            self.output_tokens += tokens

    def end(self) -> None:
        """The stream is over: without [DONE] it was cut off."""
        if not self.status:
            self._fail("the stream ended without [DONE]")

    def _event(self, now_ns: int, event: bytes) -> int:
        """Tokens of one event; after a failure there are none."""
        if self.status not in ("", "ok"):
            return 0
        if event == DONE:
            if self.done_ns is None:
                self.done_ns = now_ns
            self.status = "ok"
            return 0
        if not event:
            return 0
        if self.done_ns is not None:
            # what came before may not be the whole answer
            self._fail("the server sent data after [DONE]")
            return 0
        chunk = decode_chunk(event)
        if chunk.error is not None:
            self._error(chunk.error)
            return 0
        if self.server_id is None:
            self.server_id = chunk.id
        said = None if chunk.usage is None else self._usage(chunk)
        if not chunk.choices:
            return 0
        choice = chunk.choices[0]
        if choice.prompt_token_ids is not None and self.prompt_tokens is None:
            self.prompt_tokens = len(choice.prompt_token_ids)
        tokens = self._count(choice, said)
        if tokens and self.first_output_ns is None and _is_output(choice):
            self.first_output_ns = now_ns
        if choice.finish_reason is not None:
            self._finish(choice)
        return tokens

    def _usage(self, chunk: Chunk) -> int | None:
        usage = chunk.usage
        assert usage is not None
        if usage.prompt_tokens is not None:
            self.prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if usage.completion_tokens is not None:
            self.output_tokens_said = usage.completion_tokens
        return usage.completion_tokens

    def _count(self, choice: Choice, said: int | None) -> int:
        """Tokens by their ids, else by the running count, else one for any text."""
        ids = choice.token_ids
        if ids is not None:
            if self.keeps_ids:
                self.token_ids.extend(ids)
            self._said += len(ids)
            return len(ids)
        if said is not None:
            new = max(0, said - self._said)
            self._said += new
            return new
        delta = choice.delta
        text = choice.text or (delta and (delta.content or delta.reasoning or delta.reasoning_content))
        if not text:
            return 0
        self.exact = False
        self._said += 1
        return 1

    def _finish(self, choice: Choice) -> None:
        self.finish_reason = choice.finish_reason
        if choice.finish_reason == "error":
            self._fail("the server ended it with an internal error")
        elif choice.finish_reason == "abort":
            # Not by this client, which stops listening when it cancels. A patch's ending says what it is.
            ending = endings.parse(choice.stop_reason)
            if ending is not None:
                self.status, self.reason = ending.status, ending.code
            else:
                self.status = "failed" if choice.stop_reason is None else "expired"
                self.reason = one_line(str(choice.stop_reason or "aborted by the server"))

    def _error(self, error: Any) -> None:
        """An error object inside a stream that began with 200."""
        message, code = error_message(error)
        if code == EXPIRED:
            self.status = "expired"
        elif code in REFUSALS and not self._said:
            self.status = "rejected"
        else:
            self.status = "failed"
        self.reason = message

    def _fail(self, reason: str) -> None:
        self.status, self.reason = "failed", reason


def _is_output(choice: Choice) -> bool:
    """Visible output: anything in a completion; content, not reasoning, in a chat."""
    return choice.delta is None or bool(choice.delta.content)
