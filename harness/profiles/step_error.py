"""How far a profile's step model is off on rows of the measured tables that it does not hold.

The error is that of one layer's attention (`attention`), where interpolation is hardest, and that of the
whole step built from it (`step`), which is what the engine's clock sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.profiles.kernel_tables import KernelTables, once_us, per_layer_us, read_kernel_tables
from harness.profiles.model import StepTimeModel
from harness.profiles.profile import Profile


@dataclass(frozen=True, slots=True)
class StepError:
    """Relative errors, predicted / measured - 1, in per cent."""

    rows: int
    median_pct: float
    p90_pct: float
    bias_pct: float


def step_error(profile: Profile, table_dir: Path) -> dict[str, StepError]:
    """Errors on held-out rows of a folder of kernel tables, by regime; no rows, no entry.

    Regimes: `decode`, `prefill` and `mixed` for the step; the same with ` attention` for that kernel
    alone; `dense` for token counts above the largest captured size. Rows at a capture boundary do not
    exist in tables that were taken eagerly.
    """
    tables, model = read_kernel_tables(table_dir), StepTimeModel(profile)
    errors: dict[str, list[float]] = {}
    for key, measured_us in sorted(tables.attention.items()):
        if _held(profile, key):
            continue
        chunk, kv, n, ctx = key
        prefills = [(chunk, kv)] if chunk else []
        regime = "decode" if not chunk else "mixed" if n else "prefill"
        predicted_us = model.attention_us(prefills, n, n * ctx)
        errors.setdefault(f"{regime} attention", []).append(predicted_us / measured_us - 1.0)
        requests = n + len(prefills)
        rest_us = _rest_us(tables, profile.layers, model.padded(chunk + n), requests)
        if rest_us is not None:
            step_us = model.step_us(prefills, n, n * ctx, requests)
            errors.setdefault(regime, []).append(step_us / (rest_us + profile.layers * measured_us) - 1.0)
    kept = set(profile.tables.dense.tokens)
    for tokens in tables.dense_tokens():
        if tokens not in kept and tokens > max(model.capture_sizes, default=0):
            measured_us = profile.layers * per_layer_us(tables, tokens) + once_us(tables, tokens)
            errors.setdefault("dense", []).append(model.dense_us(tokens) / measured_us - 1.0)
    return {regime: summarise(values) for regime, values in errors.items()}


def summarise(errors: Sequence[float]) -> StepError:
    """Median and p90 (nearest rank) of the absolute errors, and their signed mean."""
    size = sorted(abs(e) for e in errors)
    n = len(size)
    return StepError(n, 100 * size[(n + 1) // 2 - 1], 100 * size[-(-9 * n // 10) - 1], 100 * sum(errors) / n)


def _held(profile: Profile, key: tuple[int, int, int, int]) -> bool:
    """Whether the profile's tables hold this row."""
    chunk, kv, n, ctx = key
    tables = profile.tables
    if not chunk:
        return n in tables.decode.n and ctx in tables.decode.ctx
    if not n:
        return chunk in tables.prefill.chunk and kv in tables.prefill.kv
    mixed = tables.mixed
    return mixed is not None and chunk in mixed.chunk and kv in mixed.kv and n in mixed.n and ctx in mixed.ctx


def _rest_us(tables: KernelTables, layers: int, tokens: int, requests: int) -> float | None:
    """Everything of a step but attention, where all of it was measured at these sizes."""
    dense = tables.dense["qkv_proj"]
    if tokens not in dense or requests not in tables.per_sequence:
        return None
    return layers * per_layer_us(tables, tokens) + once_us(tables, tokens) + tables.per_sequence[requests]
