"""Time blocks: the units that the bootstrap draws, because neighbouring requests are not independent.

Each measured phase of each seed is cut into blocks of equal length. Blocks are numbered phase by
phase (all seeds of a phase together), so that a run of phases is one slice of every per-block array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

BLOCK_S = 10.0
MIN_BLOCKS = 6


@dataclass(frozen=True, slots=True)
class Window:
    """One measured phase: its number and its half-open time range, ns."""

    number: int
    start_ns: int
    end_ns: int

    @property
    def blocks(self) -> int:
        """How many blocks it is cut into: of about 10 s, and never fewer than six."""
        return max(MIN_BLOCKS, round((self.end_ns - self.start_ns) / 1e9 / BLOCK_S))


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """The blocks of a run: measured phases in order of time, and the number of seeds."""

    windows: tuple[Window, ...]
    seeds: int

    @property
    def offsets(self) -> list[int]:
        """Where each phase's blocks begin; one entry more than there are phases."""
        edges = [0]
        for window in self.windows:
            edges.append(edges[-1] + window.blocks * self.seeds)
        return edges

    @property
    def size(self) -> int:
        """Blocks in all phases and seeds."""
        return self.offsets[-1]

    def of_phases(self, phases: Sequence[int] | None) -> slice:
        """The slice of blocks that belongs to these phases (None: all); they must lie side by side."""
        if phases is None:
            return slice(0, self.size)
        places = [i for i, window in enumerate(self.windows) if window.number in phases]
        if not places:
            return slice(0, 0)
        if places != list(range(places[0], places[-1] + 1)):
            raise ValueError(f"phases {list(phases)} do not follow one another")
        return slice(self.offsets[places[0]], self.offsets[places[-1] + 1])

    def of_times(self, seed: int, t_ns: npt.ArrayLike) -> Ints:
        """The block of each time in the seed at that position; -1 outside all measured phases."""
        times = np.asarray(t_ns, dtype=np.float64)
        out = np.full(times.shape, -1, dtype=np.int64)
        for window, offset in zip(self.windows, self.offsets, strict=False):
            inside = (times >= window.start_ns) & (times < window.end_ns)
            share = (times[inside] - window.start_ns) / (window.end_ns - window.start_ns)
            number = np.minimum((share * window.blocks).astype(np.int64), window.blocks - 1)
            out[inside] = offset + seed * window.blocks + number
        return out

    def of_requests(self, seed: int, phase: npt.ArrayLike, t_ns: npt.ArrayLike) -> Ints:
        """As `of_times`, but each time is first moved into the phase that its request belongs to."""
        numbers, times = np.asarray(phase), np.asarray(t_ns, dtype=np.float64).copy()
        known = np.zeros(times.shape, dtype=bool)
        for window in self.windows:
            mine = numbers == window.number
            known |= mine
            times[mine] = np.clip(times[mine], window.start_ns, window.end_ns - 1)
        return np.where(known, self.of_times(seed, times), -1)

    def edges(self, window: Window) -> Floats:
        """The borders of a phase's blocks, ns, shape (blocks + 1,)."""
        return np.linspace(window.start_ns, window.end_ns, window.blocks + 1)

    def seconds(self) -> Floats:
        """The length of every block, s, shape (size,)."""
        return np.concatenate(
            [np.full(w.blocks * self.seeds, (w.end_ns - w.start_ns) / 1e9 / w.blocks) for w in self.windows]
        )
