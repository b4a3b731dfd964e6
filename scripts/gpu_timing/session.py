"""A run: blocks in order of importance until the time is up, with progress, drift and what was left out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.errors import RunFailed
from scripts.gpu_timing.bench import Bench
from scripts.gpu_timing.drift import LIMIT_PCT, Sentinel
from scripts.gpu_timing.kv import TooLarge
from scripts.gpu_timing.rows import Block, Row, shuffled
from scripts.gpu_timing.store import Store

_PROGRESS_S = 10.0
_SENTINEL_S = 5.0
# What the last writes may take.
_RESERVE_S = 3.0
_FAILURES_IN_A_ROW = 8


@dataclass(slots=True)
class Clock:
    """Wall time since the script began, and when it must end."""

    budget_s: float
    start: float = field(default_factory=time.monotonic)

    def spent_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    def left_s(self) -> float:
        """Seconds for rows."""
        return self.budget_s - _RESERVE_S - self.spent_s()


@dataclass(slots=True)
class Session:
    """Runs blocks. `left_out` has, for each block that is not whole, why and how many rows are missing."""

    bench: Bench
    store: Store
    sentinel: Sentinel
    clock: Clock
    repeats: int
    say: Callable[[str], None]
    seed: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    drifted_rows: int = 0
    _row_s: float = 0.004
    _said: float = 0.0
    _checked: float = 0.0
    _drifting: bool = False

    def run(self, blocks: Sequence[Block], meta: Callable[[], dict[str, Any]]) -> None:
        """Time every block that fits into the time left; the tables are written after each."""
        to_do = [row for block in blocks for row in block.rows if row not in self.store.rows]
        self.say(f"{len(to_do):,} rows to time, about {self._predict_s(to_do):.0f} s")
        for block in blocks:
            missing = [row for row in shuffled(block, self.seed) if row not in self.store.rows]
            if not missing:
                continue
            expected_s = self._predict_s(missing)
            if expected_s > self.clock.left_s():
                self.left_out[block.name] = (
                    f"{len(missing)} rows: {expected_s:.0f} s needed, too little time left"
                )
                self.say(f"{block.name}: left out, it would take {expected_s:.0f} s")
                continue
            self.say(f"{block.name}: {len(missing)} rows, about {expected_s:.0f} s")
            self._run_block(block, missing)
            self.store.write(blocks, meta())

    def _run_block(self, block: Block, missing: Sequence[Row]) -> None:
        reasons: Counter[str] = Counter()
        in_a_row = 0
        begun = self.clock.spent_s()
        planned_s = 0.0
        for done, row in enumerate(missing):
            if self.clock.left_s() <= 0:
                reasons["the time was up"] = len(missing) - done
                break
            try:
                self._look_after(block, done, len(missing))
                taken = self.bench.time(row)
            except (TooLarge, torch.OutOfMemoryError):
                reasons["not enough device memory"] += 1
                continue
            except RuntimeError as error:
                reasons[str(error).splitlines()[0][:200] if str(error) else type(error).__name__] += 1
                in_a_row += 1
                if in_a_row >= _FAILURES_IN_A_ROW:
                    raise RunFailed(
                        f"{block.name}: {in_a_row} rows in a row failed ({next(reversed(reasons))}); what was taken is "
                        f"kept in {self.store.folder}"
                    ) from None
                continue
            in_a_row = 0
            self.drifted_rows += self._drifting
            self.store.add(row, taken)
            planned_s += self._launched_s(row)
            # What rows have taken beyond their launches so far is what the next ones will.
            self._row_s = max((self.clock.spent_s() - begun - planned_s) / (done + 1), 0.0005)
        if reasons:
            self.left_out[block.name] = "; ".join(
                f"{n} row{'s' if n > 1 else ''}: {why}" for why, n in reasons.items()
            )
            self.say(f"{block.name}: {self.left_out[block.name]}")

    def _look_after(self, block: Block, done: int, rows: int) -> None:
        now = self.clock.spent_s()
        if now - self._checked >= _SENTINEL_S:
            self._checked = now
            off_pct = self.sentinel.take()
            self._drifting = abs(off_pct) > LIMIT_PCT
            if self._drifting:
                self.say(
                    f"  the device is {off_pct:+.1f}% off its own median speed (a product timed now and then)"
                )
        if now - self._said >= _PROGRESS_S:
            self._said = now
            self.say(f"  {block.name}: {done} of {rows} rows, {now:.0f} of {self.clock.budget_s:.0f} s")

    def _launched_s(self, row: Row) -> float:
        """Time on the device, seconds: the repeats, one more to upload the graph, and the warm-up."""
        each = self.bench.estimate_us(row) * 1e-6
        return each * (self.bench.launches(row) * (self.repeats + 1) + 2)

    def _predict_s(self, rows: Sequence[Row]) -> float:
        return sum(map(self._launched_s, rows)) + self._row_s * len(rows)
