"""Requests before the clock starts: they bring a fresh server to its pace, and leave nothing in its cache.

Their prompts are random tokens, so that they share no block with any traffic; the cache is emptied afterwards all the
same. They go on until the time is up and a round takes about as long as the one before it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from harness.engines.live import probe
from harness.engines.live.server import Server
from harness.errors import RunFailed

# (prompt tokens, output tokens) of one round, sent at once.
ROUND: tuple[tuple[int, int], ...] = ((16, 8), (48, 12), (96, 16), (200, 8))
SETTLED = 0.25
# A server that has not settled by then is measured as it is, and the verdict says so.
_LONGEST = 4.0
_MIN_ROUNDS = 3
_SEED = 20_240_901


@dataclass(frozen=True, slots=True)
class WarmUp:
    """How it went.

    Attributes:
        wanted_s, took_s: how long it was to take at least, and took.
        rounds_s: seconds of each round.
        prompt_tokens: all that were sent.
    """

    wanted_s: float
    took_s: float
    rounds_s: tuple[float, ...]
    prompt_tokens: int

    @property
    def short(self) -> str:
        """Why the server was not warm; "" where it was."""
        if self.took_s < self.wanted_s or len(self.rounds_s) < 2:
            return f"the server was warmed up for {self.took_s:.1f} s of {self.wanted_s:g} s"
        if not settled(self.rounds_s):
            before, last = self.rounds_s[-2:]
            return (
                f"the server still got faster when its warm-up ended after {self.took_s:.1f} s: its last round took "
                f"{last:.2f} s, the one before {before:.2f} s"
            )
        return ""

    def json(self) -> dict[str, Any]:
        """As a manifest holds it."""
        return {**asdict(self), "rounds_s": [round(s, 3) for s in self.rounds_s], "short": self.short}


def settled(rounds_s: Sequence[float]) -> bool:
    """Whether the last round was no faster than the one before, by more than chance would have it."""
    return len(rounds_s) >= 2 and rounds_s[-1] >= (1 - SETTLED) * rounds_s[-2]


def warm_up(server: Server, vocab_size: int, wanted_s: float, longest_tokens: int) -> WarmUp:
    """Send rounds until the server is warm; then empty its cache.

    Raises:
        RunFailed: a request of it failed. ServerFailed: the server did, or its cache could not be emptied.
    """
    rng = np.random.Generator(np.random.PCG64(_SEED))
    began = time.monotonic()
    rounds: list[float] = []
    tokens = 0
    with ThreadPoolExecutor(len(ROUND)) as pool:
        while wanted_s > 0:
            took = time.monotonic() - began
            enough = took >= wanted_s and len(rounds) >= _MIN_ROUNDS
            if enough and (settled(rounds) or took >= _LONGEST * wanted_s):
                break
            shapes = [(min(prompt, longest_tokens - output), output) for prompt, output in ROUND]
            bodies = [probe.body(server, rng, vocab_size, *shape) for shape in shapes]
            tokens += sum(prompt for prompt, _ in shapes)
            at = time.monotonic()
            for error in pool.map(lambda body: probe.send(server, body), bodies):
                if error:
                    server.check()
                    raise RunFailed(f"a warm-up request failed: {error}")
            rounds.append(time.monotonic() - at)
    took = time.monotonic() - began
    server.reset_prefix_cache()
    return WarmUp(wanted_s, took, tuple(rounds), tokens)
