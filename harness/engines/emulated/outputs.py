"""The true output of each request, in a file that the engine's process maps into its memory.

The client sends a prompt and how many tokens it wants; what a request will produce is known to the workload alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa

from workloads.request import PlannedRequest

_SCHEMA = pa.schema(
    [pa.field("request_id", pa.string(), False), pa.field("output", pa.list_(pa.int32()), False)]
)
# Ids that every vocabulary has.
_UNKNOWN_IDS = range(3, 100)


def write_outputs(requests: Iterable[PlannedRequest], path: Path) -> None:
    """Write what these requests will produce."""
    planned = list(requests)
    ends = np.cumsum([0, *(len(one.output) for one in planned)], dtype=np.int32)
    tokens = np.concatenate([np.zeros(0, np.int32), *(one.output for one in planned)])
    columns = [
        pa.array([one.request_id for one in planned], pa.string()),
        pa.ListArray.from_arrays(pa.array(ends), pa.array(tokens)),
    ]
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
        writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))


class PlannedOutputs:
    """Reads that file.

    Attributes:
        unknown: requests that were asked for and are not in it: warm-up, or somebody else's.
    """

    def __init__(self, path: Path) -> None:
        """Map the file; OSError or pyarrow's ArrowInvalid where it cannot be read."""
        with pa.memory_map(str(path)) as file:
            batch = pa.ipc.open_file(file).get_batch(0)
        self._outputs = batch.column("output")
        self._row = {name: row for row, name in enumerate(batch.column("request_id").to_pylist())}
        self.unknown = 0

    def tokens(self, request_id: str | None, wanted: int) -> list[int]:
        """At least `wanted` tokens; a request that is not known gets a fixed sequence.

        Args:
            request_id: as the client sent it.
        """
        row = None if request_id is None else self._row.get(request_id)
        if row is None:
            self.unknown += 1
            tokens = [*_UNKNOWN_IDS] * (wanted // len(_UNKNOWN_IDS) + 1)
        else:
            tokens = self._outputs[row].values.to_pylist()
        return tokens + tokens[-1:] * (wanted - len(tokens))
