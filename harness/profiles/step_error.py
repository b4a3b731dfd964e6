"""How far a step is off on rows of measured tables that the profile does not hold.

Held out, by where a row stands and not by its error:

- tables of the profile's own model: rows off the nodes of its grids (`harness.profiles.thin`);
- tables of a model that the profile was composed for, without a row of it: every row;
- tables over sizes (`step_error_sizes`): what `harness.profiles.gpu_numbers` keeps back.

For each regime there is the error of the whole step, which is what the engine's clock sees, and that of one
layer's kernel alone (`attention`, `dense`, `product`), where interpolation is hardest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.profiles.aic_tables import is_aic_folder
from harness.profiles.compose import compose
from harness.profiles.gpu import Gpu, load_gpu
from harness.profiles.kernel_tables import KernelTables, once_us, per_layer_us, read_kernel_tables
from harness.profiles.model import StepTimeModel
from harness.profiles.profile import Profile

# Always said, with rows or without.
STEP_REGIMES = ("decode", "prefill", "mixed", "at a capture boundary")


@dataclass(frozen=True, slots=True)
class StepError:
    """Relative errors, predicted / measured - 1, in per cent."""

    rows: int
    median_pct: float
    p90_pct: float
    bias_pct: float


def step_error(profile: Profile, table_dir: Path) -> dict[str, StepError]:
    """Errors on held-out rows of a folder of kernel tables, by regime; no rows, no entry.

    Raises UserError for a folder that holds no such tables.
    """
    if is_aic_folder(table_dir):
        from harness.profiles.step_error_sizes import errors_over_sizes

        errors = errors_over_sizes(_gpu_of(profile), table_dir)
    else:
        errors = _errors_of_model(profile, read_kernel_tables(table_dir))
    return {regime: summarise(values) for regime, values in errors.items() if values}


def summarise(errors: Sequence[float]) -> StepError:
    """Median and p90 (nearest rank) of the absolute errors, and their signed mean."""
    size = sorted(abs(e) for e in errors)
    n = len(size)
    return StepError(n, 100 * size[(n + 1) // 2 - 1], 100 * size[-(-9 * n // 10) - 1], 100 * sum(errors) / n)


def _errors_of_model(profile: Profile, tables: KernelTables) -> dict[str, list[float]]:
    modelled = _is_modelled(profile)
    if profile.tensor_parallel > 1 and profile.tables_path is None:
        profile = _without_communication(profile)
    model = StepTimeModel(profile)
    errors: dict[str, list[float]] = {}
    for key, measured_us in sorted(tables.attention.items()):
        if not modelled and _held(profile, key):
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
        captured = tokens <= max(model.capture_sizes, default=0)
        if (tokens not in kept and not captured) or (modelled and model.padded(tokens) == tokens):
            measured_us = profile.layers * per_layer_us(tables, tokens) + once_us(tables, tokens)
            errors.setdefault("dense", []).append(model.dense_us(tokens) / measured_us - 1.0)
    return errors


def _gpu_of(profile: Profile) -> Gpu:
    """The file that a profile is composed of, by its name or by the path that it was asked for with."""
    named = profile.ref.name
    return load_gpu(named if named.endswith(".json") else profile.name.split("/")[0])


def _is_modelled(profile: Profile) -> bool:
    """Whether no row of this model on this GPU is in the profile."""
    return profile.tables_path is None and "decode" in profile.not_measured


def _without_communication(profile: Profile) -> Profile:
    """Tables of one GPU's kernels do not hold the exchange between GPUs."""
    gpu = _gpu_of(profile)
    free = gpu.spec.model_copy(update={"interconnect_latency_us": 0.0, "interconnect_gb_s": 1e12})
    parts = compose(gpu.model_copy(update={"spec": free}), profile.model_shape.shape, profile.tensor_parallel)
    silent = profile.model_copy(update={"composed_tables": parts.tables})
    silent.__dict__.pop("tables", None)
    return silent


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
