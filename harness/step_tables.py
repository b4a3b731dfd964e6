"""A fit of steps as the tables of a profile, and how far these are off on other steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.profiles import Profile
from harness.profiles.model import StepTimeModel
from harness.profiles.thin import rounded
from harness.step_fit import KINDS, Bools, Fit, Kind, Steps

# Tables must be positive; this is nothing beside a step.
_NOTHING_US = 0.001
# Between nodes attention's quadratic part is read too high by an eighth of its part there, squared.
_NODE_GROWTH = 1.2


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How far the tables are off on steps that they were not fitted to, per cent; negative bias: too short.

    Attributes:
        total_pct: of all these steps' time together.
    """

    rows: int
    median_pct: float
    p90_pct: float
    bias_pct: float
    total_pct: float


def domain_of(steps: Steps, mixed: bool) -> dict[str, int]:
    """The profile's domain: what these steps reached."""
    own = steps.where(steps.of("mixed"))
    alone = steps.where(steps.of("decode"))
    return {
        "max_tokens": int((steps.chunk + steps.decodes).max()),
        "max_sequences": int(steps.requests.max()),
        "max_decodes": int(alone.decodes.max()),
        "max_decodes_mixed": int(own.decodes.max()) if mixed else 0,
        "max_chunk": int(steps.chunk.max()),
        "max_context": int(max(steps.deepest.max(), (steps.context / np.maximum(steps.decodes, 1)).max(), 1)),
    }


def tables_of(
    fits: Mapping[Kind, Fit], steps: Steps, domain: Mapping[str, int], layers: int
) -> dict[str, Any]:
    """The content of tables.json: the fits, read at nodes between which they are straight, or nearly so.

    What all regimes have in common is the dense table, a constant: the rest may differ between them.
    """
    common = max(min(one.constant for one in fits.values()) / 2, _NOTHING_US)
    decode, prefill, mixed = fits["decode"], fits["prefill"], fits.get("mixed")

    def layer(us: float) -> float:
        return rounded(max(us - common, _NOTHING_US) / layers)

    chunks = _chunk_nodes(domain["max_chunk"], prefill.chunk.knots)
    kv, ctx = [0, domain["max_context"]], [0, domain["max_context"]]
    n = _nodes(domain["max_decodes"], decode.decodes.knots)
    content: dict[str, Any] = {
        "source": "fitted by bench calibrate",
        # Read at multiples of 16, so the last node is beyond any step.
        "dense": {
            "tokens": [1, 2 * max(domain["max_tokens"], 16)],
            "layer_us": [rounded(common / layers)] * 2,
            "once_us": [_NOTHING_US] * 2,
        },
        "per_sequence": {"sequences": [1, 2 * domain["max_sequences"]], "us": [_NOTHING_US] * 2},
        "prefill": {
            "chunk": chunks,
            "kv": kv,
            "us": [layer(prefill.us(c, c * k + c * c / 2, 0, 0)) for c in chunks for k in kv],
        },
        "decode": {"n": n, "ctx": ctx, "us": [layer(decode.us(0, 0, d, d * x)) for d in n for x in ctx]},
    }
    if mixed is not None:
        own = steps.where(steps.of("mixed"))
        chunks = _chunk_nodes(int(own.chunk.max()), mixed.chunk.knots)
        n = _nodes(domain["max_decodes_mixed"], mixed.decodes.knots)
        content["mixed"] = {
            "chunk": chunks,
            "kv": kv,
            "n": n,
            "ctx": ctx,
            "us": [
                layer(mixed.us(c, c * k + c * c / 2, d, d * x))
                for c in chunks
                for k in kv
                for d in n
                for x in ctx
            ],
        }
    return content


def _nodes(largest: int, knots: Sequence[int]) -> list[int]:
    return sorted({1, largest, *(knot for knot in knots if knot <= largest)})


def _chunk_nodes(largest: int, knots: Sequence[int]) -> list[int]:
    nodes, at = set(_nodes(largest, knots)), 1.0
    while at < largest:
        nodes.add(round(at))
        at = max(at * _NODE_GROWTH, at + 1)
    return sorted(nodes)


def held_out(profile: Profile, steps: Steps) -> dict[str, HeldOut]:
    """How far a profile is off on these steps, by regime, and `all`."""
    model = StepTimeModel(profile)
    batches = zip(steps.chunks, steps.decodes, steps.context, steps.requests, strict=True)
    said = np.array([model.step_us(chunks, int(n), int(ctx), int(rows)) for chunks, n, ctx, rows in batches])
    kinds: dict[str, Bools] = {kind: steps.of(kind) for kind in KINDS}
    out = {}
    for name, rows in (kinds | {"all": np.ones(len(steps), np.bool_)}).items():
        if not rows.any():
            continue
        error = said[rows] / steps.us[rows] - 1
        out[name] = HeldOut(
            rows=int(rows.sum()),
            median_pct=_pct(np.median(np.abs(error))),
            p90_pct=_pct(np.percentile(np.abs(error), 90)),
            bias_pct=_pct(np.mean(error)),
            total_pct=_pct(said[rows].sum() / steps.us[rows].sum() - 1),
        )
    return out


def _pct(value: Any) -> float:
    return round(100 * float(value), 2)
