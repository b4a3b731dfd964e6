"""Attention of one layer for any number of heads: read where measured, modelled where not.

Heads of another width than 128 count as that many heads of 128 with the same work and the same bytes.

Two kinds of tables:

- many geometries, prefills without prior tokens, no mixed rows (`ByGeometry`). Heads are blended
  linearly; key-value heads that were not measured stand for more or fewer sequences, since a decode
  kernel's work and its grid are both sequences times key-value heads. Prior tokens and mixed steps are
  modelled (`attention_rules`).
- one geometry with everything (`FromOne`). A prefill of q tokens with h heads is as many tiles of query rows
  as one of q * h / H tokens with H heads; the prior context is set so that the work is the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from harness.profiles import attention_rules as rules
from harness.profiles.gpu import Geometry, Gpu
from harness.profiles.grid import Grid2, Grid4

HEAD_WIDTH = 128
DTYPE_BYTES = 2
# From this many decodes beside a prefill on the kernel is half as fast per decode in both tables; that
# number counts sequences, not heads.
MIXED_SLOW_FROM = 128
SLOPE_KV = 2048


class AttentionTimes(ABC):
    """Attention of one layer for one geometry.

    Attributes:
        decode_n, decode_ctx: nodes of the decode table.
        chunk, kv: nodes at which a prefill table loses nothing that matters.
        mixed_chunk, mixed_kv, mixed_n, mixed_ctx: the same for mixed steps.
        max_chunk, max_context, max_decodes_mixed: what the tables cover.
    """

    decode_n: Sequence[int]
    decode_ctx: Sequence[int]
    chunk: Sequence[int]
    kv: Sequence[int]
    mixed_chunk: Sequence[int]
    mixed_kv: Sequence[int]
    mixed_n: Sequence[int]
    mixed_ctx: Sequence[int]
    max_chunk: int
    max_context: int
    max_decodes_mixed: int

    @abstractmethod
    def decode_us(self, n: int, ctx: int) -> float:
        """n decodes at context ctx, us."""

    @abstractmethod
    def prefill_us(self, q: int, kv: int) -> float:
        """One chunk of q tokens behind kv, us."""

    @abstractmethod
    def mixed_us(self, q: int, kv: int, n: int, ctx: int) -> float:
        """A chunk of q tokens behind kv beside n decodes at context ctx, us."""


def attention_of(gpu: Gpu, heads: int, kv_heads: int, head_dim: int) -> AttentionTimes:
    """The reader for a GPU's kind of tables."""
    wide = head_dim / HEAD_WIDTH
    kind = FromOne if len(gpu.numbers.prefill.kv) > 1 else ByGeometry
    return kind(gpu, heads * wide, kv_heads * wide)


class ByGeometry(AttentionTimes):
    """Decodes and whole prompts measured for many geometries; prior tokens and mixed steps modelled."""

    def __init__(self, gpu: Gpu, heads: float, kv_heads: float) -> None:
        decode, prefill = gpu.numbers.decode, gpu.numbers.prefill
        self.decode_n, self.decode_ctx = decode.n, decode.ctx
        listed = sorted({g.kv_heads for g in decode.geometries})
        near = max((k for k in listed if k <= kv_heads), default=listed[0])
        self._per_listed = kv_heads / near
        cells, covered = _blended(decode.geometries, near, heads / self._per_listed, decode.n, decode.ctx)
        self._decode = Grid2(decode.n, decode.ctx, cells)
        listed = sorted({g.kv_heads for g in prefill.geometries})
        near = min(listed, key=lambda k: (abs(k - kv_heads), k))
        self._whole, _ = _blended(prefill.geometries, near, heads, [0], prefill.chunk)
        self._chunks = prefill.chunk
        self.max_chunk = prefill.chunk[-1]
        self.max_context = max(ctx for ctx, seen in zip(decode.ctx, covered, strict=True) if seen)
        self.max_decodes_mixed = decode.n[-1]

        # What one prior token costs one query row, us: from the two longest prompts, which run at full rate.
        last, before = self._chunks[-1], self._chunks[-2]
        self._row_us = (self._whole[-1] - self._whole[-2]) / (0.5 * (last * last - before * before))
        self._full_rows = rules.full_rows(
            gpu.attention_kernel,
            gpu.spec.sms,
            heads,
            2 * kv_heads * HEAD_WIDTH * DTYPE_BYTES,
            gpu.spec.bandwidth_gb_s,
            self._row_us,
        )
        self._kernel = gpu.attention_kernel
        self._floor_us = self._decode.at(decode.n[0], decode.ctx[0])

        between = [
            *(
                a + (b - a) * i // 4
                for a, b in zip(self._chunks, self._chunks[1:], strict=False)
                for i in range(4)
            ),
            last,
        ]
        self.chunk = sorted({*self._chunks, *(c for c in between if c >= 256)})
        self.kv = (0, self.max_context)
        self.mixed_chunk = sorted({*self._chunks, *(c for c in (768, 1536, 3072, 6144, 12288) if c < last)})
        self.mixed_kv = (0, 2048, 8192, self.max_context) if self._kernel == "fa2" else (0, self.max_context)
        self.mixed_n = [n for n in decode.n if n <= 512]
        self.mixed_ctx = [x for x in decode.ctx if x >= 128 or x == decode.ctx[0]]

    def decode_us(self, n: int, ctx: int) -> float:
        """Read from the table of the nearest key-value heads, with as many sequences as give the same work."""
        return self._decode.at(n * self._per_listed, ctx)

    def prefill_us(self, q: int, kv: int) -> float:
        """The measured whole prompt, and by rule what stands before it."""
        return self._whole_us(q) + rules.context_us(q, kv, self._full_rows, self._row_us)

    def _whole_us(self, q: int) -> float:
        axis, us = self._chunks, self._whole
        if q <= axis[0]:
            return us[0]
        i = max(j for j in range(len(axis) - 1) if axis[j] <= q)
        part = (q - axis[i]) / (axis[i + 1] - axis[i])
        # Of a launch and a square, blending the time overstates the square, blending it per token the launch.
        per_token = us[i] / axis[i] + part * (us[i + 1] / axis[i + 1] - us[i] / axis[i])
        return min(us[i] + part * (us[i + 1] - us[i]), q * per_token)

    def mixed_us(self, q: int, kv: int, n: int, ctx: int) -> float:
        """Both in one launch, by rule."""
        return rules.mixed_us(
            self._kernel,
            q,
            n,
            ctx,
            self.prefill_us(q, kv),
            self.decode_us(n, ctx),
            self._floor_us,
            self._full_rows,
            self._row_us,
        )


class FromOne(AttentionTimes):
    """Everything measured for one geometry; others are read at the place where the same tiles run."""

    def __init__(self, gpu: Gpu, heads: float, kv_heads: float) -> None:
        numbers = gpu.numbers
        decode, prefill, mixed = numbers.decode, numbers.prefill, numbers.mixed
        own = decode.geometries[0]
        self._heads, self._kv_heads = heads / own.heads, kv_heads / own.kv_heads
        self._decode = Grid2(decode.n, decode.ctx, _known(own.us))
        self._prefill = Grid2(prefill.chunk, prefill.kv, _known(prefill.geometries[0].us))
        self._mixed = Grid4(mixed.chunk, mixed.kv, mixed.n, mixed.ctx, mixed.us) if mixed else None
        self._floor_us = self._decode.at(decode.n[0], decode.ctx[0])
        self.decode_n, self.decode_ctx = decode.n, decode.ctx
        self.chunk, self.kv = prefill.chunk, prefill.kv
        self.max_chunk, self.max_context = prefill.chunk[-1], min(prefill.kv[-1], decode.ctx[-1])
        self.mixed_chunk, self.mixed_kv = (mixed.chunk, mixed.kv) if mixed else (self.chunk, self.kv)
        self.mixed_n, self.mixed_ctx = (mixed.n, mixed.ctx) if mixed else (self.decode_n, self.decode_ctx)
        self.max_decodes_mixed = self.mixed_n[-1]

    def decode_us(self, n: int, ctx: int) -> float:
        """As many sequences as give the same key-value heads in flight."""
        return self._decode.at(n * self._kv_heads, ctx)

    def prefill_us(self, q: int, kv: int) -> float:
        """At the chunk with the same tiles, behind what gives the same work."""
        return self._prefill_at(*self._same_tiles(q, kv))

    def mixed_us(self, q: int, kv: int, n: int, ctx: int) -> float:
        """A decode's tiles go by heads too; where sequences themselves slow the kernel, the excess is scaled."""
        chunk, before = self._same_tiles(q, kv)
        alone = self._prefill_at(chunk, before)
        if self._mixed is None:
            return alone + max(self.decode_us(n, ctx) - self._floor_us, 0.0)
        if self._heads == 1.0:
            return self._mixed.at(chunk, before, n, ctx)
        before = max(before, 0.0)
        if n >= MIXED_SLOW_FROM:
            base = self._prefill_at(chunk, before)
            return base + self._heads * max(self._mixed.at(chunk, before, n, ctx) - base, 0.0)
        top = max((x for x in self.mixed_n if x < MIXED_SLOW_FROM), default=self.mixed_n[-1])
        same = n * self._heads
        us = self._mixed.at(chunk, before, min(same, top), ctx)
        if same > top:
            us += (same / top - 1.0) * max(us - self._prefill_at(chunk, before), 0.0)
        return us

    def _same_tiles(self, q: int, kv: int) -> tuple[float, float]:
        chunk = q * self._heads
        return chunk, kv + 0.5 * (q - chunk)

    def _prefill_at(self, chunk: float, kv: float) -> float:
        us = self._prefill.at(chunk, max(kv, 0.0))
        if kv < 0.0:
            slope = (self._prefill.at(chunk, SLOPE_KV) - self._prefill.at(chunk, 0.0)) / SLOPE_KV
            us = max(us + kv * slope, self._prefill.at(self.chunk[0], 0.0))
        return us


def _blended(
    geometries: Sequence[Geometry], kv_heads: int, heads: float, rows: Sequence[int], columns: Sequence[int]
) -> tuple[list[float], list[bool]]:
    """Times at these key-value heads, linear in heads, gaps filled; and which columns were measured at all."""
    held = sorted((g.heads, g.us) for g in geometries if g.kv_heads == kv_heads)
    i = max((j for j in range(len(held) - 1) if held[j][0] <= heads), default=0)
    (low_heads, low), (high_heads, high) = held[i], held[min(i + 1, len(held) - 1)]
    part = 0.0 if high_heads == low_heads else (max(heads, low_heads) - low_heads) / (high_heads - low_heads)
    covered = [
        any(us[r * len(columns) + c] for r in range(len(rows)) for us in (low,)) for c in range(len(columns))
    ]
    a, b = _filled(low, rows, columns), _filled(high, rows, columns)
    floor = [0.5 * x for x in a]
    return [max(x + part * (y - x), z) for x, y, z in zip(a, b, floor, strict=True)], covered


def _filled(us: Sequence[float | None], rows: Sequence[int], columns: Sequence[int]) -> list[float]:
    """Cells kept back: the mean of what blending along each axis gives. Cells beyond: on along the row."""
    width = len(columns)
    grid = [list(us[r * width : (r + 1) * width]) for r in range(len(rows))]
    out: list[list[float]] = []
    for r, row in enumerate(grid):
        line: list[float] = []
        for c, value in enumerate(row):
            if value is None:
                ways = []
                if 0 < c < width - 1 and (right := row[c + 1]) is not None:
                    ways.append(_between(line[c - 1], right, columns[c - 1 : c + 2]))
                if 0 < r < len(rows) - 1 and (below := grid[r + 1][c]) is not None:
                    ways.append(_between(out[r - 1][c], below, rows[r - 1 : r + 2]))
                if not ways:
                    slope = (line[c - 1] - line[c - 2]) / (columns[c - 1] - columns[c - 2])
                    ways.append(line[c - 1] + slope * (columns[c] - columns[c - 1]))
                value = sum(ways) / len(ways)
            line.append(value)
        out.append(line)
    return [value for line in out for value in line]


def _between(low: float, high: float, axis: Sequence[int]) -> float:
    return low + (axis[1] - axis[0]) / (axis[2] - axis[0]) * (high - low)


def _known(us: Sequence[float | None]) -> list[float]:
    return [float(value or 0.0) for value in us]
