"""Is a kernel right? Small batches against plain arithmetic in float32, before anything is timed."""

from __future__ import annotations

import torch

from scripts.gpu_timing.attention import ONE_CALL, TWO_CALLS, Attention, Step
from scripts.gpu_timing.kernels import keys_of

# (prefill chunk, tokens before it, decodes, context of each): every mask, unequal lengths, several pages, and
# few sequences with many keys, where kernels split them.
BATCHES = (
    (0, 0, 3, 300),
    (0, 0, 2, 3000),
    (40, 0, 0, 0),
    (40, 300, 0, 0),
    (24, 40, 3, 70),
    (16, 16, 2, 3000),
    (16, 3000, 2, 16),
)
# Rounding to 16 bits leaves well under 1%; a wrong mask or a row that was not written far more.
TOLERANCE = 0.02


class WrongResult(Exception):
    """The kernel's output is not attention's."""


def check(attention: Attention) -> float:
    """The largest relative error over all batches and ways.

    Raises:
        WrongResult: it is above TOLERANCE, or the step's own keys are not where they belong.
    """
    worst = 0.0
    for sizes in BATCHES:
        for way in (ONE_CALL, TWO_CALLS) if sizes[0] and sizes[2] else (ONE_CALL,):
            for step in attention.steps(sizes, 2, way):
                found = _error(attention, step)
                if not found <= TOLERANCE:
                    raise WrongResult(
                        f"(chunk, kv, decodes, ctx) = {sizes}, {way}: relative error {found:.3g}"
                    )
                worst = max(worst, found)
    return worst


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last queries of one sequence, in float32.

    `query` is [q, heads, head dim]; `key` and `value` are [k, kv heads, head dim] with k >= q.
    """
    (q, heads, width), k = query.shape, key.shape[0]
    key, value = (x.float().repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) / width**0.5
    positions = torch.arange(k, device=query.device)
    seen = positions <= positions[k - q :, None]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def _error(attention: Attention, step: Step) -> float:
    outputs = attention.run(step)
    rows = step.rows
    if not torch.equal(attention.cache.as_rows[rows], attention.own[: rows.shape[0]]):
        raise WrongResult("the step's own keys and values were not written")
    worst = 0.0
    for part, out in zip(step.parts, outputs, strict=True):
        start = part.first
        for i, count in enumerate(part.lens.queries):
            expected = reference(attention.query[start : start + count], *keys_of(part.placed, part.lens, i))
            got = out[start - part.first : start - part.first + count].float()
            # A NaN must count as the worst of errors: it compares false with everything.
            error = float((got - expected).norm() / expected.norm())
            worst = error if error != error else max(worst, error)
            start += count
        if worst != worst:
            return float("inf")
    return worst
