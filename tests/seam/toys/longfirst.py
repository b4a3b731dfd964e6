"""Serves the longest prompt first."""

from __future__ import annotations

from typing import Any

from patches.seam.patch import Hooks
from tests.seam.toys import toy


def build(knobs: Any, context: Any) -> Hooks:
    """A key that falls with the prompt's length."""
    return Hooks(request_key=lambda request, now: (-request.num_prompt_tokens, None))


PATCH = toy("longfirst", build, "request_key", rank=20)
