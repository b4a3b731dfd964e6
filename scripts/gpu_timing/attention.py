"""Attention rows: batches of one chunk and equal decodes, in calls that find their keys outside the cache."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from scripts.gpu_timing.kernels import Kernel
from scripts.gpu_timing.kv import KvCache, Lens, Placed
from scripts.gpu_timing.timer import Call
from scripts.gpu_timing.work import kv_token_bytes, kv_tokens

if TYPE_CHECKING:
    from harness.profiles.shape import ModelShape

ONE_CALL, TWO_CALLS = "one call", "two calls"


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences that go into one call of the kernel: `first` is that of the batch's queries where they start."""

    first: int
    lens: Lens
    placed: Placed
    prepared: Any


@dataclass(frozen=True, slots=True)
class Step:
    """One layer's attention of a batch: its own keys and values are written, and then each part is attended."""

    parts: tuple[Part, ...]
    rows: torch.Tensor


class Attention:
    """Makes the calls of a row. Queries, outputs and the step's own keys stay in the cache; the rest does not."""

    def __init__(
        self,
        shape: ModelShape,
        kernel: Kernel,
        cache: KvCache,
        *,
        max_tokens: int,
        l2_bytes: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.kernel, self.cache = kernel, cache
        self._device, self._l2_bytes = device, l2_bytes
        self._token_bytes = kv_token_bytes(shape)
        self.query = torch.randn(max_tokens, shape.heads, shape.head_dim, dtype=dtype, device=device)
        own = torch.randn(2 * max_tokens, shape.kv_heads * shape.head_dim, dtype=dtype, device=device)
        self.own = own.view(torch.int64)

    def calls(self, sizes: tuple[int, ...], launches: int, way: str) -> list[Call]:
        """`launches` calls of a row; raises TooLarge where its keys do not fit."""
        steps = self.steps(sizes, launches, way)
        return [lambda step=steps[i % len(steps)]: self.run(step) for i in range(launches)]  # type: ignore[misc]

    def steps(self, sizes: tuple[int, ...], launches: int, way: str) -> list[Step]:
        """The places in the cache that the calls of a row go round."""
        chunk, kv, n, ctx = sizes
        queries = ([chunk] if chunk else []) + [1] * n
        keys = ([kv + chunk] if chunk else []) + [ctx + 1] * n
        lens = Lens.of(queries, keys, self._device)
        # As many places as it takes to outgrow the L2 cache twice.
        enough = 2 * self._l2_bytes // (kv_tokens(sizes) * self._token_bytes) + 1
        cuts = [0, 1, len(queries)] if chunk and n and way == TWO_CALLS else [0, len(queries)]
        parts = [Lens.of(queries[a:b], keys[a:b], self._device) for a, b in pairwise(cuts)]
        prepared = [self.kernel.prepare(part) for part in parts]
        return [
            Step(
                tuple(
                    Part(sum(queries[:a]), part, _cut(placed, keys, a, b), ready)
                    for part, ready, (a, b) in zip(parts, prepared, pairwise(cuts), strict=True)
                ),
                placed.rows,
            )
            for placed in self.cache.place(lens, min(launches, enough))
        ]

    def run(self, step: Step) -> list[torch.Tensor]:
        """Write the step's own keys and values, and attend; the output of each part."""
        self.cache.as_rows.index_copy_(0, step.rows, self.own[: step.rows.shape[0]])
        return [
            self.kernel(
                self.query[part.first : part.first + sum(part.lens.queries)],
                part.placed,
                part.lens,
                part.prepared,
            )
            for part in step.parts
        ]


def _cut(placed: Placed, keys: list[int], first: int, last: int) -> Placed:
    """The sequences from `first` until before `last`."""
    if placed.table is not None:
        return Placed(placed.key, placed.value, placed.table[first:last], placed.rows)
    a, b = sum(keys[:first]), sum(keys[:last])
    return Placed(placed.key[a:b], placed.value[a:b], None, placed.rows)
