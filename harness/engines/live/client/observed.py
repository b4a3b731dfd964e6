"""What the client saw of one request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """One request as its client saw it; times are ns from the run's start, None where it did not happen.

    A chunk is what one read brought: tokens that arrive together share its time, however many events they were in.

    Attributes:
        intended_ns: when it was to be sent. Latency counts from here.
        sent_ns: when the client began to send it (its connection included); None if it never did.
        headers_ns: when the response's status line and headers had been read.
        first_token_ns: first generated token, reasoning included; a role-only or empty event is none.
        first_output_token_ns: first token of visible output.
        last_token_ns: last token.
        end_ns: when the stream ended, was closed or failed.
        status: ok, rejected, expired, cancelled or failed.
        http_status: of the response; None without one.
        reason: why, where the status is not ok; "" otherwise.
        retry_after_s: the `Retry-After` of a refusal.
        prompt_tokens_counted: the prompt's length as the server says it.
        cached_tokens: prompt tokens found in the prefix cache, as the server says it (it does so at the end of a
            stream, with --enable-prompt-tokens-details).
        output_tokens: tokens received, the sum of `chunk_tokens`.
        output_tokens_said: the count in the server's last usage, to compare with.
        tokens_exact: False where some event told neither its token ids nor a running count, and was taken for one.
        finish_reason: as the server says it.
        server_request_id: `id` of the stream; vLLM's is "cmpl-" and the X-Request-Id that was sent.
        chunk_ns: when each chunk was read, shape (chunks,), int64.
        chunk_tokens: tokens in each chunk, shape (chunks,), int32.
        token_ids: the output's token ids, shape (output_tokens,), int32; None unless asked for.
    """

    request_id: str
    intended_ns: int
    sent_ns: int | None
    headers_ns: int | None
    first_token_ns: int | None
    first_output_token_ns: int | None
    last_token_ns: int | None
    end_ns: int | None
    status: str
    http_status: int | None
    reason: str
    retry_after_s: float | None
    prompt_tokens_counted: int | None
    cached_tokens: int | None
    output_tokens: int
    output_tokens_said: int | None
    tokens_exact: bool
    finish_reason: str | None
    server_request_id: str | None
    chunk_ns: Times
    chunk_tokens: Counts
    token_ids: Counts | None

    @property
    def send_delay_ns(self) -> int | None:
        """How late it was sent; None if it never was."""
        return None if self.sent_ns is None else self.sent_ns - self.intended_ns
