"""The KV cache of one layer and where the sequences of a batch lie in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from harness.profiles.shape import ModelShape


class TooLarge(Exception):
    """The row does not fit into the device's memory."""


@dataclass(frozen=True, slots=True)
class Lens:
    """Queries and keys of each sequence, and their running sums on the device (int32)."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    used_k: torch.Tensor

    @staticmethod
    def of(queries: Sequence[int], keys: Sequence[int], device: str) -> Lens:
        """Lengths of a batch; the last query of a sequence is its last key's."""
        tensors = (
            torch.tensor(values, dtype=torch.int32, device=device)
            for values in ([0, *accumulate(queries)], [0, *accumulate(keys)], list(keys))
        )
        return Lens(tuple(queries), tuple(keys), *tensors)


@dataclass(frozen=True, slots=True)
class Placed:
    """Keys and values as the kernel takes them, and where the step's own tokens are written.

    Paged: `key` and `value` are [pages, page, kv heads, head dim] and `table` is [sequences, pages of the
    longest], int32. Contiguous: [keys, kv heads, head dim], and `table` is None. `rows` are the rows of
    `KvCache.as_rows` that the step's keys, and then its values, go to.
    """

    key: torch.Tensor
    value: torch.Tensor
    table: torch.Tensor | None
    rows: torch.Tensor


class KvCache:
    """One layer's cache, [2, pages, page, kv heads, head dim], filled with noise; `page` 0 means contiguous."""

    def __init__(
        self, shape: ModelShape, tokens: int, page: int, *, dtype: torch.dtype, device: str, seed: int
    ) -> None:
        self.page = page
        self._device = device
        size = page or 1
        self.pages = max(-(-tokens // size), 1)
        self.tokens = self.pages * size
        generator = torch.Generator(device).manual_seed(seed)
        self._kv = torch.empty(
            (2, self.pages, size, shape.kv_heads, shape.head_dim), dtype=dtype, device=device
        )
        rows = self._kv.view(2 * self.tokens, -1)
        for part in rows.split(1 << 18):  # in parts: no single launch over more than 2^31 numbers
            part.normal_(generator=generator)
        # Whole words: an index copy moves element by element, and eight bytes at a time is what a copy kernel does.
        self.as_rows = rows.view(torch.int64)
        # Pages in random order, as in a cache that has been in use.
        self._order = torch.randperm(self.pages, generator=generator, device=device) if page else None

    def place(self, lens: Lens, copies: int) -> list[Placed]:
        """The same batch at `copies` places that overlap as little as the cache allows.

        Raises:
            TooLarge: contiguous, and the batch has more keys than the cache.
        """
        return self._paged(lens, copies) if self.page else self._contiguous(lens, copies)

    def shared(self, lens: Lens) -> float:
        """How many sequences read a page of this batch on average beyond one; 0 where the cache is large enough."""
        wanted = sum(self._pages_of(lens)) if self.page else sum(lens.keys)
        return max(wanted / self.pages - 1.0, 0.0)

    def _pages_of(self, lens: Lens) -> list[int]:
        return [-(-k // self.page) for k in lens.keys]

    def _paged(self, lens: Lens, copies: int) -> list[Placed]:
        assert self._order is not None
        pages = self._pages_of(lens)
        starts = torch.tensor([0, *accumulate(pages)][:-1], device=self._device)
        columns = torch.arange(max(pages), device=self._device)
        bases = torch.arange(copies, device=self._device) * sum(pages)
        # [copies, sequences, pages]; entries past a sequence's end are valid pages that nobody reads.
        tables = self._order[(bases[:, None, None] + starts[:, None] + columns) % self.pages]
        sequence, position = self._own(lens)
        slots = tables[:, sequence, position // self.page] * self.page + position % self.page
        key, value = self._kv[0], self._kv[1]
        return [
            Placed(key, value, table, torch.cat((slot, slot + self.tokens)))
            for table, slot in zip(tables.int().unbind(), slots.unbind(), strict=True)
        ]

    def _contiguous(self, lens: Lens, copies: int) -> list[Placed]:
        keys = sum(lens.keys)
        if keys > self.tokens:
            raise TooLarge(f"{keys:,} keys, room for {self.tokens:,}")
        sequence, position = self._own(lens)
        own = lens.cu_k[sequence] + position
        key, value = self._kv[0, :, 0], self._kv[1, :, 0]
        room = self.tokens // keys
        bases = [keys * (i % room) for i in range(copies)]
        return [
            Placed(key[b : b + keys], value[b : b + keys], None, torch.cat((own + b, own + b + self.tokens)))
            for b in bases
        ]

    def _own(self, lens: Lens) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequence and position of each of the step's own tokens."""
        queries = torch.tensor(lens.queries, device=self._device)
        sequence = torch.arange(len(lens.queries), device=self._device).repeat_interleave(queries)
        within = torch.arange(sum(lens.queries), device=self._device) - lens.cu_q[sequence]
        return sequence, lens.used_k[sequence] - queries[sequence] + within
