"""What can be wrong with a server, by the code that a run's verdict carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from harness.errors import RunFailed

Code = Literal[
    "start_failed",
    "start_timeout",
    "foreign_server",
    "patch_not_loaded",
    "server_crashed",
    "server_restart",
    "cache_not_reset",
]


class ServerFailed(RunFailed):
    """A server that cannot be measured, or no longer. `code` says how; `log_tail` holds its last log lines."""

    def __init__(self, code: Code, message: str, log_tail: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.log_tail = tuple(log_tail)
