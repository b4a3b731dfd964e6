"""What the patches' gauges say over time: looked at after each step was scheduled, noted where a value changed."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from harness.engines.virtual.clock import EPOCH_S
from harness.schema import HELD, arrow_schema
from patches.seam import adapter
from patches.seam.receipt import PatchTally

_EPOCH_NS = round(EPOCH_S * 1e9)
# What a gauge said that was never asked: equal to nothing.
_UNSEEN = object()
# A gauge's number, and what it said last.
_Said = list[Any]


class GaugeLog:
    """The changes of all gauges of an engine's patches, and of how many requests their gates hold and why.

    Args:
        tallies: the patches' counters, by name.
        held_by: number of held requests by (patch, reason), reasons that hold nobody left out.

    It costs one call and one comparison a gauge and step, and 20 bytes a change.
    """

    def __init__(
        self,
        tallies: Mapping[str, PatchTally],
        held_by: Callable[[], Mapping[tuple[str, str], int]] = dict,
    ) -> None:
        # (patch, gauge) by number. Of each gauge its number and what it said last; those of a patch lie in the order
        # in which they were declared, as in its tally, so that no name is looked up in a step.
        self._names: list[tuple[str, str]] = []
        self._patches: list[tuple[str, PatchTally, list[_Said]]] = [(*one, []) for one in tallies.items()]
        self._held_by = held_by
        self._held: Mapping[tuple[str, str], int] = {}
        self._reasons: dict[tuple[str, str], _Said] = {}
        self._t_ns, self._which, self._values = array("q"), array("i"), array("d")

    @classmethod
    def of(cls, scheduler: Any) -> GaugeLog | None:
        """A log for the patches that this scheduler was built with; None where it is stock."""
        installation, runtime = adapter.active(), adapter.runtime_of(scheduler)
        if installation is None or runtime is None:
            return None
        return cls(
            {name: installation.tallies[name] for name in installation.plan.names}, runtime.held_by_reason
        )

    def __bool__(self) -> bool:
        """True once there is something to write."""
        return bool(self._t_ns)

    def sample(self, t_ns: int) -> None:
        """Ask all gauges at `t_ns`, and note those that say something else than before."""
        for patch, tally, said in self._patches:
            gauges = tally.gauges
            if len(said) < len(gauges):
                said += [self._new(patch, name) for name in list(gauges)[len(said) :]]
            for gauge, last in zip(gauges.values(), said, strict=True):
                value = gauge() if callable(gauge) else gauge
                if value != last[1]:
                    self._note(t_ns, last, value)
        held = self._held_by()
        if held != self._held:
            self._note_held(t_ns, dict(held))

    def table(self) -> pa.Table:
        """The changes, in order of time; at one time patches in plan order and gauges as they were declared."""
        which = np.asarray(self._which, np.int32)
        patches, gauges = ([name[part] for name in self._names] for part in (0, 1))
        columns = [
            pa.array(np.asarray(self._t_ns, np.int64)),
            *(
                pa.DictionaryArray.from_arrays(which, pa.array(names, pa.string()))
                for names in (patches, gauges)
            ),
            pa.array(np.asarray(self._values, np.float64), from_pandas=True),
        ]
        schema = arrow_schema("gauges")
        return pa.Table.from_arrays(
            [c.cast(f.type) for c, f in zip(columns, schema, strict=True)], schema=schema
        )

    def _new(self, patch: str, name: str) -> _Said:
        self._names.append((patch, name))
        return [len(self._names) - 1, _UNSEEN]

    def _note(self, t_ns: int, last: _Said, value: float) -> None:
        # One NaN for all that is not finite: its own kind is not kept, and NaN differs from itself.
        finite = value if math.isfinite(value) else None
        if finite == last[1]:
            return
        last[1] = finite
        self._t_ns.append(t_ns)
        self._which.append(last[0])
        self._values.append(math.nan if finite is None else finite)

    def _note_held(self, t_ns: int, held: dict[tuple[str, str], int]) -> None:
        for key in dict.fromkeys((*self._held, *held)):
            last = self._reasons.get(key)
            if last is None:
                patch, reason = key
                last = self._reasons[key] = self._new(patch, HELD + reason)
            self._note(t_ns, last, float(held.get(key, 0)))
        self._held = held


def patch_tables(scheduler: Any) -> dict[str, dict[str, list[Any]]]:
    """The record tables that this scheduler's patches keep of their own, as columns; none where it is stock.

    Patches tell times by the engine's clock; here they count from the run's start.
    """
    installation = adapter.active()
    if installation is None or adapter.runtime_of(scheduler) is None:
        return {}
    tallies = (installation.tallies[name] for name in installation.plan.names)
    tables = {name: dict(columns()) for tally in tallies for name, columns in tally.tables.items()}
    for columns in tables.values():
        if "t_ns" in columns:
            columns["t_ns"] = [t_ns - _EPOCH_NS for t_ns in columns["t_ns"]]
    return tables
