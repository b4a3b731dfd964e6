"""Refuses API requests whose id begins with `refused`."""

from __future__ import annotations

from typing import Any

from patches.seam.patch import Hooks
from tests.seam.toys import toy


def build(knobs: Any, context: Any) -> Hooks:
    """A gate at the API."""

    def admission(frontend: Any, n: int, request_id: str | None) -> None:
        if request_id and request_id.startswith("refused"):
            raise PermissionError(request_id)

    return Hooks(api_admission=admission)


PATCH = toy("refuse", build, "api_admission")
