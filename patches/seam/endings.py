"""Why a patch ended a request: the stop reasons, built and parsed in one place.

A stop reason is what travels with the request's last output (`EngineCoreOutput.stop_reason`):

    deadline_expired               it was too late to start; HTTP 408
    refused:<code>:<retry_after_s> it was not taken in; HTTP 503 with Retry-After

The seam `expire` carries them out: what a hook names leaves the scheduler before the next pass, and
its output is delivered with the next update.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

DEADLINE_EXPIRED = "deadline_expired"

#: Codes of refusals, and what a client may be told.
CODES = {
    "queue_depth": "too many requests wait",
    "kv_red": "the KV cache is nearly full and the request's priority is not high",
    "predicted_late": "the wait ahead of it is longer than the request may wait",
    "overload": "the engine is overloaded and its tenant has had its floor",
}

#: A Retry-After above this says nothing that a client could plan by.
MAX_RETRY_AFTER_S = 600

_REFUSED = re.compile(r"refused:([a-z][a-z0-9_]*):([1-9][0-9]*)\Z")


@dataclass(frozen=True, slots=True)
class Ending:
    """A parsed stop reason.

    Attributes:
        status: "expired" or "rejected", as in the records.
        code: "deadline_expired", or the code of the refusal.
        retry_after_s: seconds after which a refused client may try again; None where it was not refused.
    """

    status: str
    code: str
    retry_after_s: int | None = None

    @property
    def http_status(self) -> int:
        """408 for an expired request, 503 for a refused one."""
        return 408 if self.retry_after_s is None else 503


def refused(code: str, retry_after_s: float) -> str:
    """The stop reason of a refusal; the wait is rounded up to whole seconds, 1 to `MAX_RETRY_AFTER_S`.

    Raises:
        ValueError: the code is not one of `CODES`.
    """
    if code not in CODES:
        raise ValueError(f"{code!r} is no code of a refusal; known: {', '.join(CODES)}")
    if retry_after_s != retry_after_s:
        # Not a number: nothing is known, so the longest that is said.
        retry_after_s = MAX_RETRY_AFTER_S
    return f"refused:{code}:{math.ceil(max(1.0, min(retry_after_s, float(MAX_RETRY_AFTER_S))))}"


def parse(stop_reason: object) -> Ending | None:
    """What a stop reason of ours says; None for any other (a stop token or string, none at all)."""
    if not isinstance(stop_reason, str):
        return None
    if stop_reason == DEADLINE_EXPIRED:
        return Ending("expired", DEADLINE_EXPIRED)
    found = _REFUSED.match(stop_reason)
    return Ending("rejected", found[1], int(found[2])) if found else None
