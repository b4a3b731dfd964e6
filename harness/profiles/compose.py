"""Tables of any dense model on any GPU with a file: the GPU's kernel times, put together by the model's shape.

    layer = products (qkv, o, gate and up, down) + norms, rotary embedding, activation + 2 sums over the GPUs
    once  = embedding + final norm + 1 sum over the GPUs
    head  = output head + sampler + gathering the logits

Assumed: nothing between kernels. A captured graph leaves well under a microsecond there, and the run that the RTX 4090
tables are validated against needs none. `LAYER_GAP_US` and `STEP_US` are where such a cost goes.
Pure arithmetic without transcendental functions: the same bits on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.profiles.attention import HEAD_WIDTH, AttentionTimes, attention_of
from harness.profiles.communication import SUMS_A_LAYER, SUMS_A_STEP, all_reduce_us, gather_us
from harness.profiles.elementwise import ElementwiseTimes
from harness.profiles.gemm import GemmTimes
from harness.profiles.gpu import Gpu
from harness.profiles.schema import REGIMES, Domain, Regime
from harness.profiles.shape import ModelShape
from harness.profiles.tables import Decode, Dense, Mixed, PerSequence, Prefill, Tables

LAYER_GAP_US = 0.0
STEP_US = 0.0
MAX_TOKENS = 16384
MAX_SEQUENCES = 1024


@dataclass(frozen=True, slots=True)
class Composed:
    """What `compose` makes.

    Attributes:
        tables: for one layer and one step, of one of the GPUs.
        domain: what they cover.
        not_measured: regimes that no row of the GPU's tables covers for this model, in the order of REGIMES.
        extrapolated: what is read beyond the sizes that were measured, a sentence each.
    """

    tables: Tables
    domain: Domain
    not_measured: tuple[Regime, ...]
    extrapolated: tuple[str, ...]


def compose(gpu: Gpu, shape: ModelShape, tensor_parallel: int = 1) -> Composed:
    """Tables of a whole model's `shape` on `tensor_parallel` GPUs; UserError if it cannot be divided so."""
    part = shape.shard(tensor_parallel) if tensor_parallel > 1 else shape
    gemms = GemmTimes(gpu)
    attention = attention_of(gpu, part.heads, part.kv_heads, part.head_dim)
    dense = _dense(gpu, shape, part, gemms, tensor_parallel)
    head = _head(gpu, shape, part, gemms, tensor_parallel)
    decode = Decode(
        n=list(attention.decode_n),
        ctx=list(attention.decode_ctx),
        us=[attention.decode_us(n, ctx) for n in attention.decode_n for ctx in attention.decode_ctx],
    )
    prefill = Prefill(
        chunk=list(attention.chunk),
        kv=list(attention.kv),
        us=[attention.prefill_us(q, kv) for q in attention.chunk for kv in attention.kv],
    )
    domain = Domain(
        max_tokens=dense.tokens[-1],
        max_sequences=head.sequences[-1],
        max_decodes=decode.n[-1],
        max_decodes_mixed=attention.max_decodes_mixed,
        max_chunk=attention.max_chunk,
        max_context=attention.max_context,
    )
    beyond = _beyond(gpu, part, gemms)
    tables = Tables(
        source=_source(gpu),
        dense=dense,
        per_sequence=head,
        prefill=prefill,
        decode=decode,
        mixed=_mixed(attention),
    )
    return Composed(tables, domain, _not_measured(gpu, part, gemms, tensor_parallel), beyond)


def _dense(gpu: Gpu, shape: ModelShape, part: ModelShape, gemms: GemmTimes, gpus: int) -> Dense:
    small = ElementwiseTimes(gpu, part)
    tokens = [m for m in gemms.m if m <= MAX_TOKENS]
    sums = [all_reduce_us(gpu.spec, m, shape.hidden, gpus) for m in tokens]
    layer = [
        sum(gemms.us(n, k, m) for _, n, k in part.gemms)
        + small.layer_us(m)
        + SUMS_A_LAYER * us
        + LAYER_GAP_US
        for m, us in zip(tokens, sums, strict=True)
    ]
    once = [
        small.us("embedding", m) + small.us("final_norm", m) + SUMS_A_STEP * us + STEP_US
        for m, us in zip(tokens, sums, strict=True)
    ]
    return Dense(tokens=tokens, layer_us=layer, once_us=once)


def _head(gpu: Gpu, shape: ModelShape, part: ModelShape, gemms: GemmTimes, gpus: int) -> PerSequence:
    # Every GPU samples from the gathered logits of the whole vocabulary.
    small = ElementwiseTimes(gpu, shape)
    sequences = [n for n in gemms.m_head if n <= MAX_SEQUENCES]
    us = [
        gemms.us(part.vocab, part.hidden, n)
        + small.us("sampler", n)
        + gather_us(gpu.spec, n, shape.vocab, gpus)
        for n in sequences
    ]
    return PerSequence(sequences=sequences, us=us)


def _mixed(attention: AttentionTimes) -> Mixed:
    return Mixed(
        chunk=list(attention.mixed_chunk),
        kv=list(attention.mixed_kv),
        n=list(attention.mixed_n),
        ctx=list(attention.mixed_ctx),
        us=[
            attention.mixed_us(q, kv, n, ctx)
            for q in attention.mixed_chunk
            for kv in attention.mixed_kv
            for n in attention.mixed_n
            for ctx in attention.mixed_ctx
        ],
    )


def _own_geometry(gpu: Gpu, part: ModelShape) -> bool:
    """Whether attention of this part was measured, or lies between geometries that were."""
    decode = gpu.numbers.decode
    if len(decode.geometries) == 1:
        only = decode.geometries[0]
        return (part.heads, part.kv_heads, part.head_dim) == (only.heads, only.kv_heads, HEAD_WIDTH)
    heads = [g.heads for g in decode.geometries if g.kv_heads == part.kv_heads]
    return part.head_dim == HEAD_WIDTH and bool(heads) and min(heads) <= part.heads <= max(heads)


def _beyond(gpu: Gpu, part: ModelShape, gemms: GemmTimes) -> tuple[str, ...]:
    said = [
        f"{name} {n} x {k}: {why}"
        for name, n, k in (*part.gemms, ("lm_head", part.vocab, part.hidden))
        if (why := gemms.beyond(n, k)) is not None
    ]
    if not _own_geometry(gpu, part):
        said.append(
            f"attention of {part.heads} heads and {part.kv_heads} key-value heads of {part.head_dim}: "
            "by the work of a measured geometry"
        )
    return tuple(said)


def _not_measured(gpu: Gpu, part: ModelShape, gemms: GemmTimes, gpus: int) -> tuple[Regime, ...]:
    lacking: set[Regime] = set(gpu.not_measured)
    if gpus > 1:
        lacking.add("communication")
    # A GPU with a few shapes has no row of another model at all; in a grid of sizes every model has neighbours.
    other = gpu.numbers.gemm_grid is None and any(gemms.beyond(n, k) for _, n, k in part.gemms)
    if other or not _own_geometry(gpu, part):
        lacking |= {"decode", "prefill", "context", "mixed"}
    return tuple(regime for regime in REGIMES if regime in lacking)


def _source(gpu: Gpu) -> str:
    source = gpu.source
    holder = next((line.strip() for line in source.notice.splitlines() if "Copyright" in line), "")
    return f"{source.project} @{source.revision}, {source.licence}, {holder}; composed for this model"
