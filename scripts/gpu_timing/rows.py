"""What is timed: rows of the three tables, in blocks by importance.

A block enters the tables whole or not at all, so that a run which is cut off leaves rectangular grids. The
axes are those which `scripts/make_profile.py` reads; held-out rows lie off all of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

ATTENTION, DENSE, PER_SEQUENCE = "attention", "dense", "per_sequence"
PER_LAYER = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
ONCE = ("embedding", "final_layernorm")
HEAD = ("lm_head", "sampler")
QK_NORM = "qk_norm"


@dataclass(frozen=True, slots=True, order=True)
class Row:
    """One time to take.

    `sizes` are (prefill chunk, tokens before it, decodes, context of each) in the attention table, and the
    number of tokens or of sequences in the others; `layer` is empty for attention.
    """

    table: str
    layer: str
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that are worth something only together."""

    name: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Axes:
    """The nodes of the grids. `mixed` are the decode counts beside a chunk, the most telling first."""

    chunks: tuple[int, ...]
    kv: tuple[int, ...]
    decodes: tuple[int, ...]
    mixed: tuple[int, ...]
    ctx: tuple[int, ...]
    tokens: tuple[int, ...]
    sequences: tuple[int, ...]


def _tokens() -> tuple[int, ...]:
    small = (1, 2, 4, *range(8, 65, 8))
    return (*small, *range(80, 513, 16), *(t for t in range(528, 2049) if t % 64 in (0, 16)))


FULL = Axes(
    chunks=(16, 64, 128, 256, 512, 1024, 2048),
    kv=(0, 16, 64, 128, 512, 1024, 2048, 4096, 8192, 16384),
    decodes=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    mixed=(32, 128, 1, 8, 64, 16, 4, 2),
    ctx=(16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    tokens=_tokens(),
    sequences=(1, 2, 4, 8, 20, *range(16, 257, 16)),
)
# Off every node of FULL: what a profile's interpolation is judged by.
HELD_OUT = Axes(
    chunks=(24, 96, 192, 384, 768, 1536),
    kv=(0, 32, 256, 3072, 12288),
    decodes=(3, 6, 12, 24, 48, 96, 192),
    mixed=(6, 24, 96),
    ctx=(24, 384, 1536, 3072, 12288),
    tokens=tuple(t for t in range(528, 2049, 16) if t % 64 in (32, 48)),
    sequences=(3, 6, 7, 12, 24, 25, 97),
)
QUICK = Axes(
    chunks=(16, 64),
    kv=(0, 16, 64),
    decodes=(1, 2, 4),
    mixed=(2, 1),
    ctx=(16, 64),
    tokens=(1, 2, 8, 16, 64),
    sequences=(1, 2, 4),
)


def full_blocks(*, qk_norm: bool) -> list[Block]:
    """Everything a profile needs, the most important first, and then the held-out rows."""
    layers = _layers(qk_norm)
    powers = tuple(1 << i for i in range(12))
    coarse = [t for t in FULL.tokens if t in powers], [s for s in FULL.sequences if s in powers]
    return [
        Block("dense, powers of two", (*_dense(layers, coarse[0]), *_heads(coarse[1]))),
        *_attention(FULL),
        Block(
            "dense, the rest",
            (*_dense(layers, set(FULL.tokens) - {*powers}), *_heads(set(FULL.sequences) - {*powers})),
        ),
        *_mixed(FULL),
        Block(
            "held out: attention",
            tuple(row for block in (*_attention(HELD_OUT), *_mixed(HELD_OUT)) for row in block.rows),
        ),
        Block("held out: dense", (*_dense(layers, HELD_OUT.tokens), *_heads(HELD_OUT.sequences))),
    ]


def quick_blocks(*, qk_norm: bool) -> list[Block]:
    """A few rows of everything, to see that the script works on a machine; too few for a profile."""
    dense = Block("dense", (*_dense(_layers(qk_norm), QUICK.tokens), *_heads(QUICK.sequences)))
    return [dense, *_attention(QUICK), *_mixed(QUICK)]


def shuffled(block: Block, seed: int) -> list[Row]:
    """The rows of a block in a seeded order, so that slow drift does not follow an axis."""
    rows = sorted(block.rows)
    random.Random(f"{seed} {block.name}").shuffle(rows)
    return rows


def _attention(axes: Axes) -> list[Block]:
    decode = tuple(Row(ATTENTION, "", (0, 0, n, x)) for n, x in product(axes.decodes, axes.ctx))
    prefill = tuple(Row(ATTENTION, "", (c, k, 0, 0)) for c, k in product(axes.chunks, axes.kv))
    return [Block("decode", decode), Block("prefill", prefill)]


def _mixed(axes: Axes) -> list[Block]:
    return [
        Block(
            f"mixed, {n} decode{'s' if n > 1 else ''}",
            tuple(Row(ATTENTION, "", (c, k, n, x)) for c, k, x in product(axes.chunks, axes.kv, axes.ctx)),
        )
        for n in axes.mixed
    ]


def _layers(qk_norm: bool) -> tuple[str, ...]:
    return (*PER_LAYER, *([QK_NORM] if qk_norm else []), *ONCE)


def _dense(layers: Iterable[str], tokens: Iterable[int]) -> list[Row]:
    return [Row(DENSE, layer, (t,)) for layer, t in product(layers, sorted(tokens))]


def _heads(sequences: Iterable[int]) -> list[Row]:
    return [Row(PER_SEQUENCE, layer, (s,)) for layer, s in product(HEAD, sorted(sequences))]


def largest(blocks: Sequence[Block], table: str) -> int:
    """The largest number of tokens (or sequences) that a row of the table computes, 1 without rows."""
    sizes = [row.sizes for block in blocks for row in block.rows if row.table == table]
    if table == ATTENTION:
        return max((chunk + n for chunk, _, n, _ in sizes), default=1)
    return max((size for (size,) in sizes), default=1)
