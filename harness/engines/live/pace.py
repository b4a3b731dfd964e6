"""How fast a machine serves a model: the cost of a step, fitted to the steps of a short burst.

step = a + b * prefill tokens + c * decodes + d * tokens in the decodes' contexts

That is no profile (`bench calibrate` makes one); it is enough to choose rates that load the machine as the five phases
mean it, and targets that a request can meet there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from harness.engines.live import probe
from harness.engines.live.server import Server
from harness.engines.live.telemetry.collect import Telemetry
from harness.errors import RunFailed

# (prompt tokens, output tokens) of the burst, and of requests that are alone.
BURST: tuple[tuple[int, int], ...] = tuple((32 + 24 * i, 12 + 2 * i) for i in range(20))
ALONE: tuple[tuple[int, int], ...] = ((128, 1), (128, 1), (128, 12), (384, 4))
_SEED = 7
# A pause of the engine is no step: it had nothing to do.
_IDLE = 2.0
_FEWEST_STEPS = 12


@dataclass(frozen=True, slots=True)
class Pace:
    """What steps cost, us, and what a request costs beside them, ms."""

    step_us: float
    prefill_token_us: float
    decode_us: float
    context_token_us: float
    request_ms: float

    def to_json(self) -> dict[str, float]:
        """Rounded to what a fit is worth."""
        return {name: float(f"{value:.4g}") for name, value in asdict(self).items()}

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Pace:
        """The inverse of `to_json`; KeyError or TypeError where a field is missing or unknown."""
        return Pace(**{name: float(value) for name, value in raw.items()})

    def prefill_ms(self, tokens: int) -> float:
        """A prompt alone, cold, until its first token."""
        return self.request_ms + (self.step_us + self.prefill_token_us * tokens) / 1000


def measure(server: Server, vocab_size: int) -> float:
    """Send what the fit needs; returns the seconds that the first token of a request alone took."""
    rng = np.random.Generator(np.random.PCG64(_SEED))
    alone = [_timed(server, probe.body(server, rng, vocab_size, *shape)) for shape in ALONE]
    burst = [probe.body(server, rng, vocab_size, *shape) for shape in BURST]
    with ThreadPoolExecutor(len(BURST)) as pool:
        list(pool.map(lambda body: _timed(server, body), burst))
    return min(alone[:2])


def _timed(server: Server, body: dict[str, Any]) -> float:
    """Seconds that the answer took."""
    began = time.monotonic()
    if error := probe.send(server, body):
        server.check()
        raise RunFailed(f"a calibration request failed: {error}")
    return time.monotonic() - began


def fit(telemetry: Telemetry, first_token_s: float) -> Pace:
    """The pace that the engine's steps show.

    Raises:
        RunFailed: there are too few steps, or their times say nothing.
    """
    steps, batches = telemetry.steps, telemetry.batches
    begin = steps["t_ns"].to_numpy()
    # From one scheduling to the next, so that what the engine does between steps counts.
    took = np.diff(begin) / 1000
    own = batches["step_us"].to_numpy()[:-1]
    busy = (took < _IDLE * own) & (steps["running"].to_numpy()[:-1] > 0)
    if busy.sum() < _FEWEST_STEPS:
        raise RunFailed(f"calibration saw {int(busy.sum())} steps only; run the same command again")
    columns = [
        np.ones(len(took)),
        steps["prefill_tokens"].to_numpy()[:-1].astype(float),
        steps["decode_tokens"].to_numpy()[:-1].astype(float),
        batches["context_tokens"].to_numpy()[:-1].astype(float),
    ]
    matrix = np.stack(columns, axis=1)[busy]
    # Relative errors count, so that short steps do too.
    found, _ = nnls(matrix / took[busy, None], np.ones(int(busy.sum())))
    step, prefill, decode, context = map(float, found)
    if prefill <= 0 or step + decode <= 0:
        raise RunFailed(
            "calibration could not make sense of the step times; run it again on a quieter machine"
        )
    prompt = ALONE[0][0]
    request_ms = max(0.0, 1000 * first_token_s - (step + prefill * prompt) / 1000)
    return Pace(step, prefill, decode, context, request_ms)
