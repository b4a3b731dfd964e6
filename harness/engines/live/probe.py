"""A completion of random tokens, sent by hand: for warming a server up and for measuring its pace, never for figures."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from harness.engines.live.server import Server

# Below it lie ids that tokenizers give to special tokens.
FIRST_ID = 3
_TIMEOUT_S = 300.0


def body(server: Server, rng: np.random.Generator, vocab: int, prompt: int, output: int) -> dict[str, Any]:
    """A request for exactly `output` tokens after `prompt` random ones below `vocab`."""
    return {
        "model": server.model_name,
        "prompt": rng.integers(FIRST_ID, vocab, prompt).tolist(),
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
    }


def send(server: Server, request: dict[str, Any]) -> str:
    """Send it and wait for the answer; why it failed, or ""."""
    try:
        status, text = server.endpoint.call("POST", "/v1/completions", request, _TIMEOUT_S)
        counted = json.loads(text)["usage"]["completion_tokens"] if status == 200 else -1
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    return "" if counted == request["max_tokens"] else f"{status} {' '.join(text.split())[:200]}"
