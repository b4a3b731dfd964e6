"""Errors that a user can act on: one line each, with the exit code that goes with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Bad input: says what was wrong, where, and what to type next. Exit code 2."""

    exit_code = 2


class RunFailed(Exception):
    """A run could not be finished or may not be believed. Exit code 1."""

    exit_code = 1


class GateFailed(Exception):
    """A gated metric is worse than its margin allows. Exit code 3."""

    exit_code = 3


@contextmanager
def told(program: str) -> Iterator[None]:
    """Around a script's work: one of these errors becomes its line on stderr and its exit code."""
    try:
        yield
    except (UserError, RunFailed, GateFailed) as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
