"""What a step costs, fitted to steps that were measured: for each regime a sum of terms that only grow.

    decode   a + f(decodes) + b * context
    prefill  a + f(chunk)   + b * attention work
    mixed    a + f(chunk)   + b * attention work + g(decodes) + c * context

`f` and `g` are straight between knots and never fall; attention work is sum(new * before + new^2 / 2) over the step's
chunks, context the decodes' contexts summed. Coefficients are found by nonnegative least squares on relative errors,
weighted by what the fit itself says: weights of measured times would favour steps that happened to be short.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from scipy.optimize import nnls

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Kind = Literal["decode", "prefill", "mixed"]
KINDS: tuple[Kind, ...] = ("decode", "prefill", "mixed")

FEWEST = 40
_FEWEST_IN_SEGMENT = 10
_ROUNDS = 4
# A step that took so many times what the others say is a stall of the machine, not of the step.
STALL = 4.0


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Steps with tokens; arrays of shape (steps,).

    Attributes:
        us: how long it took.
        chunk: prefill tokens. work: their attention work, tokens squared.
        deepest: tokens in the KV cache before the deepest of its chunks.
        decodes: requests that decode. context: their contexts summed, new tokens included.
        requests: with tokens in the step.
        chunks: of each step a tuple of (new tokens, tokens before them).
    """

    us: Floats
    chunk: Floats
    work: Floats
    deepest: Floats
    decodes: Floats
    context: Floats
    requests: Floats
    chunks: npt.NDArray[np.object_]

    def __len__(self) -> int:
        return len(self.us)

    def where(self, rows: Bools) -> Steps:
        """Some of them."""
        return Steps(*(getattr(self, name)[rows] for name in self.__slots__))

    def of(self, kind: Kind) -> Bools:
        """Which of them are of one regime."""
        chunk, decodes = self.chunk > 0, self.decodes > 0
        return {"decode": ~chunk & decodes, "prefill": chunk & ~decodes, "mixed": chunk & decodes}[kind]


def steps_of(steps: pa.Table, batches: pa.Table) -> Steps:
    """The steps that telemetry saw (`telemetry.tables.BATCHES`); those with drafts, or without tokens, are left out."""
    news, befores = batches["chunk_tokens"].to_pylist(), batches["chunk_before"].to_pylist()
    pairs = [list(zip(new, before, strict=True)) for new, before in zip(news, befores, strict=True)]
    kept = np.empty(len(pairs), object)
    kept[:] = [tuple(chunks) for chunks in pairs]
    found = Steps(
        us=batches["step_us"].to_numpy().astype(np.float64),
        chunk=np.array([sum(new for new, _ in chunks) for chunks in pairs], np.float64),
        work=np.array([sum(n * b + n * n / 2 for n, b in chunks) for chunks in pairs], np.float64),
        deepest=np.array([max((b for _, b in chunks), default=0) for chunks in pairs], np.float64),
        decodes=steps["decode_tokens"].to_numpy().astype(np.float64),
        context=batches["context_tokens"].to_numpy().astype(np.float64),
        requests=steps["scheduled"].to_numpy().astype(np.float64),
        chunks=kept,
    )
    return found.where((found.us > 0) & (found.requests > 0) & (steps["drafted"].to_numpy() == 0))


@dataclass(frozen=True, slots=True)
class Rising:
    """A function that is straight between knots, 0 at 0, and never falls; past the last knot it goes on.

    `slopes` has one entry a knot: of the segment that ends there.
    """

    knots: tuple[int, ...]
    slopes: tuple[float, ...]

    def at(self, x: float) -> float:
        """Its value."""
        total, before = 0.0, 0
        for number, (knot, slope) in enumerate(zip(self.knots, self.slopes, strict=True)):
            last = number == len(self.knots) - 1
            total += slope * max(0.0, (x if last else min(x, knot)) - before)
            before = knot
        return total


NOTHING = Rising((), ())


@dataclass(frozen=True, slots=True)
class Fit:
    """One regime's cost, us.

    Attributes:
        steps: that it was fitted to.
    """

    constant: float
    chunk: Rising
    work_us: float
    decodes: Rising
    context_us: float
    steps: int

    def us(self, chunk: float, work: float, decodes: float, context: float) -> float:
        """A step of this regime."""
        return (
            self.constant
            + self.chunk.at(chunk)
            + self.work_us * work
            + self.decodes.at(decodes)
            + self.context_us * context
        )

    def all_us(self, steps: Steps) -> Floats:
        """Of many steps."""
        columns = zip(steps.chunk, steps.work, steps.decodes, steps.context, strict=True)
        return np.array([self.us(*map(float, row)) for row in columns])


def fit_all(steps: Steps) -> dict[Kind, Fit]:
    """Fit each regime to its own steps, at least `FEWEST` of them.

    With fewer prefills alone these are fitted together with the mixed ones, as steps with no decodes; `Fit.steps` then
    says how few there were. A regime that cannot be fitted so either is left out.
    """
    of = {kind: steps.where(steps.of(kind)) for kind in KINDS}
    fits: dict[Kind, Fit] = {kind: _fit(kind, own) for kind, own in of.items() if len(own) >= FEWEST}
    if "mixed" in fits and "prefill" not in fits:
        both = _fit("mixed", steps.where(steps.chunk > 0))
        fits["prefill"] = replace(both, steps=len(of["prefill"]))
    return fits


def _fit(kind: Kind, own: Steps) -> Fit:
    chunk_knots = _knots(own.chunk) if kind != "decode" else ()
    decode_knots = _knots(own.decodes) if kind != "prefill" else ()
    columns = [np.ones((len(own), 1)), _segments(own.chunk, chunk_knots), own.work[:, None]]
    columns += [_segments(own.decodes, decode_knots), own.context[:, None]]
    found = _solve(np.concatenate(columns, axis=1), own.us)
    chunks, decodes = len(chunk_knots), len(decode_knots)
    return Fit(
        constant=found[0],
        chunk=Rising(chunk_knots, tuple(found[1 : 1 + chunks])),
        work_us=found[1 + chunks],
        decodes=Rising(decode_knots, tuple(found[2 + chunks : 2 + chunks + decodes])),
        context_us=found[-1],
        steps=len(own),
    )


def _solve(matrix: Floats, us: Floats) -> list[float]:
    weight = 1 / us
    rows = np.ones(len(us), np.bool_)
    for _ in range(_ROUNDS):
        found, _ = nnls(matrix[rows] * weight[rows, None], us[rows] * weight[rows])
        said = np.maximum(matrix @ found, 1.0)
        weight, rows = 1 / said, us < STALL * said
    return [float(value) for value in found]


def _knots(values: Floats) -> tuple[int, ...]:
    """Powers of two up to the largest value, and that; only such that a segment holds enough steps."""
    largest = int(values.max())
    knots: list[int] = []
    power = 1
    while power < largest:
        before = knots[-1] if knots else 0
        inside = int(((values > before) & (values <= power)).sum())
        beyond = int((values > power).sum())
        if inside >= _FEWEST_IN_SEGMENT and beyond >= _FEWEST_IN_SEGMENT:
            knots.append(power)
        power *= 2
    return (*knots, largest)


def _segments(values: Floats, knots: tuple[int, ...]) -> Floats:
    """How much of each segment lies below each value; shape (steps, segments)."""
    begins = (0, *knots[:-1])
    parts = [np.clip(values - b, 0, k - b) for b, k in zip(begins, knots, strict=bool(knots))]
    return np.stack(parts, axis=1) if parts else np.empty((len(values), 0))
