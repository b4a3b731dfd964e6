"""A request while it is being written: its parts, before it has a place in the workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workloads.request import Segment, TokenIds


@dataclass(frozen=True, slots=True)
class Part:
    """A named run of tokens; the same (kind, name) always stands for the same tokens."""

    kind: str
    name: str
    ids: TokenIds

    def segment(self) -> Segment:
        """The part without its content."""
        return Segment(self.kind, self.name, len(self.ids))


@dataclass(frozen=True, slots=True)
class Draft:
    """One request of a tenant and phase; see `PlannedRequest` for the fields."""

    tenant: str
    phase: int
    intended_ns: int
    parts: tuple[Part, ...]
    output: TokenIds
    cancel_ns: int | None = None
    session: str = ""

    def prompt(self) -> TokenIds:
        """All parts in one read-only array."""
        return frozen(np.concatenate([part.ids for part in self.parts]))


def frozen(ids: TokenIds | Sequence[int]) -> TokenIds:
    """The ids as a read-only int32 array: requests share content, and nobody may change it."""
    array = np.asarray(ids, dtype=np.int32)
    array.setflags(write=False)
    return array
