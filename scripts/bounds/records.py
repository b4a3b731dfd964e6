"""What the bounds are computed from: a run's records, and step times of its profile under an arm's limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.errors import UserError
from harness.metrics.derive import chunks_of, request_figures
from harness.plan import RunPlan, WorkloadChoice
from harness.profiles.model import StepTimeModel

Floats = npt.NDArray[np.float64]
PHASE_S = 60.0


@dataclass(frozen=True)
class Seed:
    """The records of one seed, with the figures of its requests."""

    requests: pd.DataFrame
    tokens: pd.DataFrame
    steps: pd.DataFrame


class Machine:
    """Step times of the profile under an arm's limits."""

    def __init__(self, plan: RunPlan, arm: str) -> None:
        profile, flags = plan.step_profile, plan.arm(arm).flags
        self.seats = int(flags.max_num_seqs)
        self.blocks, self.block_size = profile.kv_blocks, profile.block_size
        self.chunk = int(flags.max_num_batched_tokens)
        self.steps_before = 1 if flags.async_scheduling else 0
        self._model = StepTimeModel(profile, self.seats, self.chunk)

    def rest_s(self, decodes: float, context: float) -> float:
        """A step of so many decodes (between whole numbers by the straight line) and nothing else."""
        low = max(1, int(decodes))
        ends = [self._model.step_us([], n, int(n * context), n) / 1e6 for n in (low, low + 1)]
        return ends[0] + (ends[1] - ends[0]) * max(0.0, decodes - low)

    def price_s(self, decodes: float, context: float, tokens: float) -> float:
        """What a prefill token adds to such a step, where there are so many."""
        n, tokens = max(1, int(decodes)), max(64, int(tokens))
        with_it = self._model.step_us([(tokens, 0)], n, int(n * context), n + 1) / 1e6
        return max(0.0, with_it - self.rest_s(n, context)) / tokens

    def least_prefill_s(self) -> float:
        """A prefill token in full steps without decodes."""
        return self._model.step_us([(self.chunk, 0)], 0, 0, 1) / 1e6 / self.chunk


def check_whole(run: Path, choice: WorkloadChoice) -> None:
    """UserError unless the run replayed all five phases at their length: bounds are of whole phases of a minute."""
    if choice.trace is not None or choice.phases != "all" or choice.time_scale != 1:
        raise UserError(
            f"{run} did not replay the five phases whole; run it with --phase all and without --trace or --time-scale"
        )


def load(run: Path, arm: str) -> list[Seed]:
    """All seeds of an arm; UserError where there is none."""
    folders = sorted((run / arm).glob("seed-*"))
    if not folders:
        raise UserError(f"{run} has no records of an arm {arm}")
    seeds = []
    for folder in folders:
        requests, tokens, steps = (
            pd.read_parquet(folder / f"{t}.parquet") for t in ("requests", "tokens", "steps")
        )
        for name, values in request_figures(requests, chunks_of(tokens)).items():
            requests[name] = values
        seeds.append(Seed(requests, tokens, steps))
    return seeds


def in_phase(frame: pd.DataFrame, phase: int) -> pd.DataFrame:
    """Requests of one phase."""
    return frame[frame["phase"] == phase]


def window_ns(phase: int) -> tuple[int, int]:
    """When the phase begins and ends."""
    begin = (phase - 1) * int(PHASE_S * 1e9)
    return begin, begin + int(PHASE_S * 1e9)


def steps_in(seed: Seed, phase: int) -> pd.DataFrame:
    """Steps that the GPU began in the phase."""
    begin, end = window_ns(phase)
    return seed.steps[(seed.steps["start_ns"] >= begin) & (seed.steps["start_ns"] < end)]
