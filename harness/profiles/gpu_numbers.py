"""The numbers of a GPU's file, thinned from measured tables by fixed rules; what they leave out tests them.

Kept back, by where a row stands and not by its error:

- products: token counts other than GEMM_TOKENS (so every one just above a captured size), and the sizes in
  GEMM_SIZES_BACK as n and as k;
- decode attention: cell (i, j) of the axes with (i + 2 j) divisible by five, off the edges; geometries
  whose heads are not key-value heads times a power of two;
- prefill attention: chunks other than CHUNKS, several prompts at once, and the same geometries;
- tables of one model: what `thin` leaves out.

Times of products jump by up to 18% between neighbouring sizes, as the library picks another kernel. Each is
averaged, as a share of the roofline, with those of the sizes beside it in n and k (weights 4 to 1).
Decided with errors on rows kept back in view: that averaging, how many token counts are kept, and how a prompt
between two measured lengths is blended (`attention.ByGeometry`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from harness.errors import UserError
from harness.profiles import thin
from harness.profiles.aic_tables import AicTables
from harness.profiles.elementwise import ACT_MOVES, EMBEDDING_MOVES, NORM_MOVES, ROPE_MOVES, SAMPLER_BYTES
from harness.profiles.gemm import roofline_us
from harness.profiles.gpu import GpuSpec, Numbers
from harness.profiles.kernel_tables import KernelTables
from harness.profiles.shape import DTYPE_BYTES, ModelShape

Content = dict[str, Any]

GEMM_TOKENS = (
    *(1, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 384, 512, 768, 1024, 1280, 1536, 1792),
    *(2048, 2304, 2560, 2816, 3072, 3584, 4096, 8192, 16384),
)
GEMM_SMALLEST_N, GEMM_SMALLEST_K = 512, 256
GEMM_LARGEST_K = 65536
GEMM_SIZES_BACK = (768, 2560, 10240)
OWN_WEIGHT = 4.0

DECODE_LARGEST_N, DECODE_SMALLEST_CTX = 1024, 16
CHUNKS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
GROUPS = (1, 2, 4, 8, 16)
KV_HEADS = (1, 2, 4, 8)

# What launching costs where bytes do not matter yet, us: means of the two GPUs with tables of these kernels.
LAUNCH_US = {"norm": 2.2, "rope": 2.6, "act": 3.1, "embedding": 3.3, "final_norm": 2.4, "sampler": 26.0}
# Bytes a second of these kernels over the memory's: 1.03 and 1.17 for the activation of 2,048 tokens there.
ELEMENTWISE_SHARE = 1.0
_BYTES_NODE = 1_000_000_000


def decode_cell_back(i: int, j: int, rows: int, columns: int) -> bool:
    """Whether cell (i, j) of a decode table is kept back."""
    return (i + 2 * j) % 5 == 0 and 0 < i < rows - 1 and 0 < j < columns - 1


def of_aic(tables: AicTables, spec: GpuSpec) -> Content:
    """Numbers from tables over sizes and geometries; rows without prior tokens, none mixed."""
    return {
        "gemm_grid": _gemm_grid(tables, spec),
        "decode": _decode(tables),
        "prefill": _prefill(tables),
        "elementwise": elementwise_of_sheet(spec),
    }


def of_kernel_tables(tables: KernelTables, model: ModelShape) -> Content:
    """Numbers from the tables of one model, `model`."""
    attention, dense = tables.attention, tables.dense
    tokens = [t for t in tables.dense_tokens() if thin.keep_tokens(t)]
    sequences = [s for s in sorted(tables.per_sequence) if thin.keep_sequences(s)]
    chunks = [c for c in thin.CHUNKS if any(key[0] == c for key in attention)]
    mixed_n = [n for n in thin.DECODES if any(key[0] and key[2] == n for key in attention)]
    heads: Content = {"heads": model.heads, "kv_heads": model.kv_heads}
    curves = [
        {"n": n, "k": k, "m": tokens, "us": [thin.rounded(dense[name][t]) for t in tokens]}
        for name, n, k in model.gemms
    ]
    curves.append(
        {
            "n": model.vocab,
            "k": model.hidden,
            "m": sequences,
            "us": [thin.rounded(tables.head[s]) for s in sequences],
        }
    )
    content: Content = {
        "gemm_curves": curves,
        "decode": {
            "n": list(thin.DECODES),
            "ctx": list(thin.CTX),
            "geometries": [
                heads | {"us": [thin.rounded(attention[0, 0, n, x]) for n in thin.DECODES for x in thin.CTX]}
            ],
        },
        "prefill": {
            "chunk": chunks,
            "kv": list(thin.KV),
            "geometries": [
                heads | {"us": [thin.rounded(attention[c, kv, 0, 0]) for c in chunks for kv in thin.KV]}
            ],
        },
    }
    if mixed_n:
        content["mixed"] = {
            "chunk": chunks,
            "kv": list(thin.KV),
            "n": mixed_n,
            "ctx": list(thin.CTX),
            **heads,
            "us": [
                thin.rounded(attention[c, kv, n, x])
                for c in chunks
                for kv in thin.KV
                for n in mixed_n
                for x in thin.CTX
            ],
        }
    content["elementwise"] = _elementwise(tables, model, tokens, sequences)
    return content


def like(other: Numbers, theirs: GpuSpec, spec: GpuSpec) -> Content:
    """Numbers of a GPU of which only the sheet is known: another one's shares of the roofline.

    A product's share is read at the token count that lies as far from the roofline's knee. Of attention and
    of elementwise kernels the part above launching is scaled by what the sheet allows.
    """
    content: Content = other.model_dump(exclude_none=True)
    knee = (theirs.tflops / theirs.bandwidth_gb_s) / (spec.tflops / spec.bandwidth_gb_s)
    for curve in content["gemm_curves"]:
        n, k, axis, us = curve["n"], curve["k"], curve["m"], curve["us"]
        curve["us"] = [
            thin.rounded(
                roofline_us(spec, n, k, m)
                / (roofline_us(theirs, n, k, max(m * knee, 1.0)) / thin.linear(axis, us, m * knee))
            )
            for m in axis
        ]
    _scale_attention(content, theirs, spec)
    for kernel, curve in content["elementwise"].items():
        launch = curve["us"][0]
        more = theirs.bandwidth_gb_s / spec.bandwidth_gb_s
        curve["us"] = [thin.rounded(launch + (us - launch) * more) for us in curve["us"]]
        content["elementwise"][kernel] = curve
    return content


def elementwise_of_sheet(spec: GpuSpec) -> Content:
    """Launch and bytes over bandwidth, for kernels that the tables do not hold."""
    per_node = _BYTES_NODE / (spec.bandwidth_gb_s * 1e3 * ELEMENTWISE_SHARE)
    return {
        kernel: {"bytes": [0, _BYTES_NODE], "us": [us, thin.rounded(us + per_node)]}
        for kernel, us in LAUNCH_US.items()
    }


def _gemm_grid(tables: AicTables, spec: GpuSpec) -> Content:
    sizes = sorted({n for n, _ in tables.gemm} | {k for _, k in tables.gemm})
    sizes = [size for size in sizes if size not in GEMM_SIZES_BACK]
    ns = [n for n in sizes if n >= GEMM_SMALLEST_N]
    ks = [k for k in sizes if GEMM_SMALLEST_K <= k <= GEMM_LARGEST_K]
    measured = sorted({m for times in tables.gemm.values() for m in times})
    ms = [m for m in GEMM_TOKENS if m in measured]
    if not ns or not ks or not ms:
        raise UserError("gemm_perf.parquet: none of the sizes that a model needs was measured")

    def share(i: int, j: int, m: int) -> float | None:
        if not (0 <= i < len(ns) and 0 <= j < len(ks)):
            return None
        us = tables.gemm.get((ns[i], ks[j]), {}).get(m)
        return None if us is None else roofline_us(spec, ns[i], ks[j], m) / us

    def smooth(i: int, j: int, m: int) -> float | None:
        own = share(i, j, m)
        if own is None:
            return None
        beside = [share(i + a, j + b, m) for a, b in ((1, 0), (-1, 0), (0, 1), (0, -1))]
        known = [x for x in beside if x is not None]
        mean = (OWN_WEIGHT * own + sum(known)) / (OWN_WEIGHT + len(known))
        return thin.rounded(roofline_us(spec, ns[i], ks[j], m) / mean)

    us = [smooth(i, j, m) for i in range(len(ns)) for j in range(len(ks)) for m in ms]
    return {"n": ns, "k": ks, "m": ms, "us": us}


def _kept_geometries(held: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(h, kv) for h, kv in sorted(held) if kv in KV_HEADS and h in {kv * g for g in GROUPS}]


def _decode(tables: AicTables) -> Content:
    axis_n = sorted({n for cells in tables.generation.values() for n, _ in cells if n <= DECODE_LARGEST_N})
    contexts = {ctx for cells in tables.generation.values() for _, ctx in cells}
    axis_ctx = sorted(ctx for ctx in contexts if ctx >= DECODE_SMALLEST_CTX)

    def cell(cells: dict[tuple[int, int], float], i: int, j: int) -> float | None:
        us = cells.get((axis_n[i], axis_ctx[j]))
        if us is None or decode_cell_back(i, j, len(axis_n), len(axis_ctx)):
            return None
        return thin.rounded(us)

    geometries = [
        {
            "heads": h,
            "kv_heads": kv,
            "us": [
                cell(tables.generation[h, kv], i, j) for i in range(len(axis_n)) for j in range(len(axis_ctx))
            ],
        }
        for h, kv in _kept_geometries(list(tables.generation))
    ]
    return {"n": axis_n, "ctx": axis_ctx, "geometries": geometries}


def _prefill(tables: AicTables) -> Content:
    chunks = [c for c in CHUNKS if all((1, c) in cells for cells in tables.context.values())]
    geometries = [
        {"heads": h, "kv_heads": kv, "us": [thin.rounded(tables.context[h, kv][1, c]) for c in chunks]}
        for h, kv in _kept_geometries(list(tables.context))
    ]
    return {"chunk": chunks, "kv": [0], "geometries": geometries}


def _elementwise(
    tables: KernelTables, model: ModelShape, tokens: Sequence[int], sequences: Sequence[int]
) -> Content:
    heads = (model.heads + model.kv_heads) * model.head_dim
    kernels = {
        "norm": ("layernorm", NORM_MOVES * model.hidden),
        "rope": ("rotary_emb", ROPE_MOVES * heads),
        "act": ("act_fn", ACT_MOVES * model.intermediate),
        "embedding": ("embedding", EMBEDDING_MOVES * model.hidden),
        "final_norm": ("final_layernorm", NORM_MOVES * model.hidden),
    }
    out: Content = {
        kernel: {
            "bytes": [DTYPE_BYTES * width * t for t in tokens],
            "us": [thin.rounded(tables.dense[name][t]) for t in tokens],
        }
        for kernel, (name, width) in kernels.items()
    }
    out["sampler"] = {
        "bytes": [SAMPLER_BYTES * model.vocab * s for s in sequences],
        "us": [thin.rounded(tables.sampler[s]) for s in sequences],
    }
    return out


def _scale_attention(content: Content, theirs: GpuSpec, spec: GpuSpec) -> None:
    """In place: the excess over the shortest decode, by how much longer the sheet allows the row to take."""
    decode, prefill, mixed = content["decode"], content["prefill"], content.get("mixed")
    geometry = decode["geometries"][0]
    launch: float = geometry["us"][0]
    heads, kv_heads = geometry["heads"], geometry["kv_heads"]

    def longer(chunk: int, kv: int, n: int, ctx: int) -> float:
        flops = 4.0 * heads * 128 * (chunk * kv + 0.5 * chunk * chunk + n * ctx)
        moved = 2.0 * 128 * (2.0 * kv_heads * (kv + chunk + n * ctx) + 2.0 * heads * (chunk + n))

        def least(s: GpuSpec) -> float:
            return max(flops / s.tflops, 1e3 * moved / s.bandwidth_gb_s)

        return least(spec) / least(theirs)

    def scaled(us: list[float], keys: list[tuple[int, int, int, int]]) -> list[float]:
        scale: Callable[[float, tuple[int, int, int, int]], float] = lambda x, key: (  # noqa: E731
            launch + max(x - launch, 0.0) * longer(*key)
        )
        return [thin.rounded(scale(x, key)) for x, key in zip(us, keys, strict=True)]

    keys = [(0, 0, n, x) for n in decode["n"] for x in decode["ctx"]]
    geometry["us"] = scaled(geometry["us"], keys)
    whole = prefill["geometries"][0]
    whole["us"] = scaled(whole["us"], [(c, kv, 0, 0) for c in prefill["chunk"] for kv in prefill["kv"]])
    if mixed is not None:
        mixed["us"] = scaled(
            mixed["us"],
            [
                (c, kv, n, x)
                for c in mixed["chunk"]
                for kv in mixed["kv"]
                for n in mixed["n"]
                for x in mixed["ctx"]
            ],
        )
