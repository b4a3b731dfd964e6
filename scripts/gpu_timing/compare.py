"""A table of this script beside a public one, by regime: the rows that both have.

Two layouts are read: aiconfigurator's (gemm_perf, context_attention_perf and generation_attention_perf, in
milliseconds) and that of the kernel tables (attention.csv, dense.csv, per_sequence.csv).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UserError
from harness.profiles.aic_tables import AicTables, is_aic_folder, read_aic_tables
from harness.profiles.kernel_tables import KernelTables, read_kernel_tables
from harness.profiles.shape import ModelShape
from scripts.gpu_timing.store import META

# Up to here weights bind on every GPU, and steps run in a captured graph.
SMALL_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Difference:
    """Ours over the public table's minus one, per cent: median and p90 without sign, mean with it."""

    regime: str
    rows: int
    median_pct: float
    p90_pct: float
    bias_pct: float

    @staticmethod
    def of(regime: str, pairs: Iterable[tuple[float, float]]) -> Difference:
        """From pairs of (ours, theirs); percentiles are nearest rank."""
        off = [100.0 * (ours / theirs - 1.0) for ours, theirs in pairs]
        size, n = sorted(map(abs, off)), len(off)
        return Difference(regime, n, size[(n + 1) // 2 - 1], size[-(-9 * n // 10) - 1], sum(off) / n)


def compare(folder: Path, public: Path) -> list[Difference]:
    """Differences by regime; one without rows in common is not there.

    Raises:
        UserError: one of the folders is not what it should be, or they have no row in common.
    """
    ours = read_kernel_tables(folder)
    if (public / "attention.csv").is_file():
        pairs = _with_tables(ours, read_kernel_tables(public))
    elif is_aic_folder(public):
        pairs = _with_aiconfigurator(ours, _shape(folder), read_aic_tables(public))
    else:
        raise UserError(
            f"{public}: neither gemm_perf.parquet nor attention.csv is there; name a folder of public tables"
        )
    found = [Difference.of(regime, rows) for regime, rows in pairs.items() if rows]
    if not found:
        raise UserError(f"{public}: no row in common with {folder}; is it of the same model and GPU?")
    return found


def table(differences: Iterable[Difference]) -> str:
    """One line a regime."""
    head = f"{'regime':<24}{'rows':>7}{'median':>9}{'p90':>9}{'bias':>9}\n"
    return head + "".join(
        f"{d.regime:<24}{d.rows:>7,}{d.median_pct:>8.1f}%{d.p90_pct:>8.1f}%{d.bias_pct:>+8.1f}%\n"
        for d in differences
    )


Pairs = dict[str, list[tuple[float, float]]]


def _with_tables(ours: KernelTables, theirs: KernelTables) -> Pairs:
    pairs: Pairs = {}
    for kernel in sorted(ours.dense.keys() & theirs.dense.keys()):
        for tokens, us in ours.dense[kernel].items():
            if tokens in theirs.dense[kernel]:
                where = "up to" if tokens <= SMALL_TOKENS else "above"
                pairs.setdefault(f"{kernel} {where} {SMALL_TOKENS}", []).append(
                    (us, theirs.dense[kernel][tokens])
                )
    for key in sorted(ours.attention.keys() & theirs.attention.keys()):
        regime = "decode" if not key[0] else "mixed" if key[2] else "prefill"
        pairs.setdefault(f"{regime} attention", []).append((ours.attention[key], theirs.attention[key]))
    both = sorted(ours.per_sequence.keys() & theirs.per_sequence.keys())
    pairs["head and sampler"] = [(ours.per_sequence[n], theirs.per_sequence[n]) for n in both]
    return pairs


def _with_aiconfigurator(ours: KernelTables, shape: ModelShape, theirs: AicTables) -> Pairs:
    heads = (shape.heads, shape.kv_heads)
    context, decode = theirs.context.get(heads, {}), theirs.generation.get(heads, {})
    pairs: Pairs = {}
    for name, n, k in shape.gemms:
        products = theirs.gemm.get((n, k), {})
        for tokens, us in ours.dense[name].items():
            if tokens in products:
                where = "up to" if tokens <= SMALL_TOKENS else "above"
                pairs.setdefault(f"GEMM {where} {SMALL_TOKENS}", []).append((us, products[tokens]))
    for (chunk, kv, n_decode, ctx), us in sorted(ours.attention.items()):
        if chunk and not kv and not n_decode and (1, chunk) in context:
            pairs.setdefault("prefill attention", []).append((us, context[1, chunk]))
        # Their context counts the token of the step, ours does not: one key in ctx + 1.
        if not chunk and (n_decode, ctx) in decode:
            pairs.setdefault("decode attention", []).append((us, decode[n_decode, ctx]))
    return pairs


def _shape(folder: Path) -> ModelShape:
    try:
        return ModelShape(**json.loads((folder / META).read_text(encoding="utf-8"))["setup"]["model"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder / META}: does not say which model was timed; time it again") from None
