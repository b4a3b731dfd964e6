"""Serves the latest arrival first."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from patches.seam.patch import Hooks, Knobs
from tests.seam.toys import toy


class ReverseKnobs(Knobs):
    """Knobs of the toy."""

    bucket_requests: int = Field(1, ge=1, description="requests that share one place in the order")


def build(knobs: ReverseKnobs, context: Any) -> Hooks:
    """A key that falls with the number of arrival."""
    return Hooks(
        request_key=lambda request, now: (
            -(context.request_info(request).sequence // knobs.bucket_requests),
            None,
        )
    )


PATCH = toy("reverse", build, "request_key", rank=10, knobs=ReverseKnobs)
