"""Step error on tables over sizes and geometries, which hold no whole model.

Whole steps are those of models of which one GPU's share consists of measured products alone (`SHARES`): its
products and attention of a layer. Norms, output head, sampler and the exchange between GPUs are in no row, so they
are left out on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from harness.profiles.aic_tables import AicTables, read_aic_tables
from harness.profiles.attention import HEAD_WIDTH, attention_of
from harness.profiles.capture import capture_sizes
from harness.profiles.gemm import GemmTimes
from harness.profiles.gpu import GemmGrid, Gpu
from harness.profiles.gpu_numbers import CHUNKS, DECODE_LARGEST_N, GEMM_SIZES_BACK, decode_cell_back
from harness.profiles.load import load_profile
from harness.profiles.model import GEMM_TILE_TOKENS, StepTimeModel
from harness.profiles.shape import ModelShape

SHARES = (("llama-3.1-8b", 4), ("qwen3-8b", 2), ("qwen3-8b", 4), ("qwen3-0.6b", 1))
# Sizes of products that a model's layer has.
SMALLEST, LARGEST = 1024, 16384
MOST_TOKENS = 16384
Errors = dict[str, list[float]]


def errors_over_sizes(gpu: Gpu, folder: Path) -> Errors:
    """Relative errors by regime of a GPU's file against the tables that it was made from."""
    tables, gemms, grid = read_aic_tables(folder), GemmTimes(gpu), gpu.numbers.gemm_grid
    if grid is None:
        return {}
    errors: Errors = {}
    for name, gpus in SHARES:
        profile = load_profile(str(gpu.path), model=name, tensor_parallel=gpus)
        part = profile.model_shape.shape.shard(gpus)
        _add(errors, _steps(gpu, tables, gemms, grid, part, StepTimeModel(profile)))
    _add(errors, _products(tables, gemms, grid))
    _add(errors, _attention(gpu, tables))
    return errors


def padded(tokens: int) -> int:
    """As a batch runs: the next captured size, above them the next tile."""
    sizes = capture_sizes(1024, MOST_TOKENS)
    if tokens <= sizes[-1]:
        return next(size for size in sizes if size >= tokens)
    return -(-tokens // GEMM_TILE_TOKENS) * GEMM_TILE_TOKENS


def at_boundary(tokens: int) -> bool:
    """Whether it is one token more than a captured size."""
    sizes = capture_sizes(1024, MOST_TOKENS)
    return tokens - 1 in sizes and tokens > 16


def _add(errors: Errors, found: Iterator[tuple[str, float]]) -> None:
    for regime, error in found:
        errors.setdefault(regime, []).append(error)


def _steps(
    gpu: Gpu, tables: AicTables, gemms: GemmTimes, grid: GemmGrid, part: ModelShape, model: StepTimeModel
) -> Iterator[tuple[str, float]]:
    shapes = [(n, k) for _, n, k in part.gemms]
    counts = set.intersection(*(set(tables.gemm[shape]) for shape in shapes))

    def measured(m: int) -> float:
        return sum(tables.gemm[shape][m] for shape in shapes)

    def predicted(m: int) -> float:
        return sum(gemms.us(n, k, padded(m)) for n, k in shapes)

    decode = gpu.numbers.decode
    geometry = (part.heads, part.kv_heads)
    for (n, ctx), us in sorted(tables.generation[geometry].items()):
        if n not in counts or n not in decode.n or ctx not in decode.ctx:
            continue
        back = decode_cell_back(decode.n.index(n), decode.ctx.index(ctx), len(decode.n), len(decode.ctx))
        if back or n not in grid.m:
            yield (
                "decode",
                (predicted(n) + model.attention_us([], n, n * ctx)) / (measured(n) + us) - 1.0,
            )
    for (prompts, tokens), us in sorted(tables.context[geometry].items()):
        m = prompts * tokens
        if m not in counts or m > MOST_TOKENS:
            continue
        error = (predicted(m) + model.attention_us([(tokens, 0)] * prompts, 0, 0)) / (measured(m) + us) - 1.0
        if prompts > 1:
            yield "prefill, several prompts", error
        elif tokens not in CHUNKS or m not in grid.m:
            yield "prefill", error
    for m in sorted(counts):
        if at_boundary(m):
            yield "at a capture boundary", predicted(m) / measured(m) - 1.0


def _products(tables: AicTables, gemms: GemmTimes, grid: GemmGrid) -> Iterator[tuple[str, float]]:
    for (n, k), times in sorted(tables.gemm.items()):
        if not (SMALLEST <= n <= LARGEST and SMALLEST <= k <= LARGEST):
            continue
        other = n in GEMM_SIZES_BACK or k in GEMM_SIZES_BACK
        for m, us in sorted(times.items()):
            if m > MOST_TOKENS or (m in grid.m) != other:
                continue
            regime = "product of a size between" if other else "product"
            if at_boundary(m):
                regime = "product at a capture boundary"
            yield regime, gemms.us(n, k, padded(m)) / us - 1.0


def _attention(gpu: Gpu, tables: AicTables) -> Iterator[tuple[str, float]]:
    decode, prefill = gpu.numbers.decode, gpu.numbers.prefill
    held = {(g.heads, g.kv_heads) for g in decode.geometries}
    listed = {g.kv_heads for g in decode.geometries}
    for (heads, kv_heads), cells in sorted(tables.generation.items()):
        if kv_heads not in listed:
            continue
        reader = attention_of(gpu, heads, kv_heads, HEAD_WIDTH)
        for (n, ctx), us in sorted(cells.items()):
            if n > DECODE_LARGEST_N or n not in decode.n or ctx not in decode.ctx:
                continue
            back = decode_cell_back(decode.n.index(n), decode.ctx.index(ctx), len(decode.n), len(decode.ctx))
            if (heads, kv_heads) not in held:
                yield "decode attention, other heads", reader.decode_us(n, ctx) / us - 1.0
            elif back:
                yield "decode attention", reader.decode_us(n, ctx) / us - 1.0
        for (prompts, tokens), us in sorted(tables.context.get((heads, kv_heads), {}).items()):
            if prompts > 1 or tokens > MOST_TOKENS or tokens < prefill.chunk[0]:
                continue
            if (heads, kv_heads) not in held:
                yield "prefill attention, other heads", reader.prefill_us(tokens, 0) / us - 1.0
            elif tokens not in prefill.chunk:
                yield "prefill attention", reader.prefill_us(tokens, 0) / us - 1.0
