"""What moved between the device's memory and the tiers below it, block by block, from the records' transfers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.errors import UserError
from harness.stats.blocks import BlockGrid

Floats = npt.NDArray[np.float64]
TRANSFERS = "transfers.parquet"


def bytes_by_block(folders: Sequence[Path], grid: BlockGrid) -> Floats | None:
    """Bytes of the transfers that began in each block, shape (blocks,); None where nothing recorded any.

    Args:
        folders: of the records, one a seed, in the grid's order.

    Raises:
        UserError: a file is damaged.
    """
    places = [folder / TRANSFERS for folder in folders]
    if not any(place.is_file() for place in places):
        return None
    moved = np.zeros(grid.size)
    for seed, place in enumerate(places):
        if not place.is_file():
            continue
        try:
            table = pd.read_parquet(place, columns=["begin_ns", "size_bytes"])
        except (OSError, ValueError) as error:
            raise UserError(
                f"{place} cannot be read ({str(error).splitlines()[0]}): delete {place.parent} and run again"
            ) from None
        block = grid.of_times(seed, table["begin_ns"])
        inside = block >= 0
        moved += np.bincount(
            block[inside], table["size_bytes"].to_numpy(np.float64)[inside], minlength=grid.size
        )
    return moved
