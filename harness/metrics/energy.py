"""The energy of a live run's GPUs, block by block, from the samples beside its records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from harness.stats.blocks import BlockGrid

Floats = npt.NDArray[np.float64]
SAMPLES = "gpu.parquet"


def joules_by_block(folders: Sequence[Path], grid: BlockGrid) -> tuple[Floats | None, str]:
    """Joules of each block, shape (blocks,), and why they are not valid ("" where they are).

    Args:
        folders: of the records, one a seed, in the grid's order.

    Returns:
        None in place of the joules where no seed has samples, which is no fault: a virtual run, or no GPU.

    Raises:
        UserError: a file of samples is damaged.
    """
    places = [folder / SAMPLES for folder in folders]
    if not any(place.is_file() for place in places):
        return None, ""
    from harness.engines.live.gpu import joules_between, load

    joules = np.zeros(grid.size)
    for seed, place in enumerate(places):
        if not place.is_file():
            return joules, f"{place.parent.name} has no GPU samples"
        samples = load(place)
        for window, offset in zip(grid.windows, grid.offsets, strict=False):
            edges = [round(edge) for edge in grid.edges(window)]
            whole, parts = joules_between(samples, edges)
            if parts is None:
                return joules, f"{place.parent.name}: {whole.reason}"
            first = offset + seed * window.blocks
            joules[first : first + window.blocks] = parts
    return joules, ""
