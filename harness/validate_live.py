"""How well a profile predicts a live run: the same traffic and arms on the virtual engine, request by request.

Two questions. How far off are the means of TTFT, TPOT and E2E? And would the virtual engine have led to the same
decision: has each difference between two arms the sign that it has live? A live difference whose interval holds zero, or
that is no larger than what two servers with the same flags differ by (the A/A pair), decides nothing, and is shown as
such. The profile comes from another run (`bench calibrate`), or it is no prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from harness import plan as plans
from harness.arms import Arm
from harness.assumptions import Assumptions
from harness.errors import RunFailed, UserError
from harness.metrics.derive import chunks_of, request_figures
from harness.plan import RunPlan
from harness.profiles import Profile
from harness.records import MANIFEST, PLAN, arm_dir, is_complete, read_json
from harness.worker import build_workload, run_virtual

Floats = npt.NDArray[np.float64]
Pair = tuple[str, str]

FIGURES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E"}
_BLOCK_NS = 5_000_000_000
_RESAMPLES, _SEED = 2_000, 20_261_130


@dataclass(frozen=True, slots=True)
class Served:
    """One arm and seed: a row a request, in the workload's order; NaN where a figure does not exist."""

    intended_ns: npt.NDArray[np.int64]
    figures: Mapping[str, Floats]
    ok: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Error:
    """Mean of one figure over the requests that were served in both, ms."""

    arm: str
    figure: str
    requests: int
    live_ms: float
    virtual_ms: float

    @property
    def error_pct(self) -> float:
        """Virtual against live."""
        return 100 * (self.virtual_ms / self.live_ms - 1)


@dataclass(frozen=True, slots=True)
class Decision:
    """What going from one arm to another does to the mean of one figure, live and virtual, in percent.

    Attributes:
        low, high: 95% interval of the live change, over blocks of 5 s.
        noise_pct: what the run's A/A pair differs by in this figure, without its sign; 0 without such a pair.
    """

    base: str
    arm: str
    figure: str
    live_pct: float
    low: float
    high: float
    virtual_pct: float
    noise_pct: float = 0.0

    @property
    def decides(self) -> bool:
        """Whether the live change can be told from none."""
        return not self.low <= 0 <= self.high and abs(self.live_pct) > self.noise_pct

    @property
    def agrees(self) -> bool:
        """Whether both have the same sign."""
        return (self.live_pct > 0) == (self.virtual_pct > 0)


@dataclass(frozen=True, slots=True)
class LiveValidation:
    """The answer to both questions."""

    run: str
    profile: str
    errors: tuple[Error, ...]
    decisions: tuple[Decision, ...]

    def mean_error_pct(self, figure: str) -> float:
        """Mean over the arms of how far a figure's mean is off, without its sign."""
        return float(np.mean([abs(one.error_pct) for one in self.errors if one.figure == figure]))

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "run": self.run,
            "profile": self.profile,
            "mean_error_pct": {name: self.mean_error_pct(name) for name in FIGURES},
            "errors": [_fields(one) | {"error_pct": one.error_pct} for one in self.errors],
            "decisions": [
                _fields(one) | {"decides": one.decides, "agrees": one.agrees} for one in self.decisions
            ],
        }


def is_live_run(folder: Path) -> bool:
    """Whether a folder holds a run of `bench run` (of which kind, `validate` will say)."""
    return (folder / PLAN).is_file()


def validate(
    folder: Path,
    profile: Profile,
    pairs: Sequence[Pair] = (),
    say: Callable[[str], None] = lambda _: None,
) -> LiveValidation:
    """Replay a live run's finished arms on a profile.

    Args:
        pairs: (base, arm) of each decision; by default each arm against the one that the run repeats, or its first.

    Raises:
        UserError: it is no live run, or a pair names an arm that it does not have.
        RunFailed: none of its arms is finished, or no request was served by both.
    """
    plan = plans.read(folder, same_code=False)
    live = plan.live
    if live is None or live.emulated:
        raise UserError(f"{folder} ran on the {plan.engine} engine; give a run with --engine live")
    names = [
        arm.name
        for arm in plan.arms
        if all(is_complete(arm_dir(folder, arm.name, seed)) for seed in plan.seeds)
    ]
    if not names:
        raise RunFailed(f"{folder}: no arm of it is finished; run the same `bench run` command again")
    base = live.again_of or names[0]
    chosen = tuple(pairs) or tuple((base, name) for name in names if name not in (base, live.again))
    for name in {name for pair in chosen for name in pair} - set(names):
        raise UserError(f"--pair: the run has no finished arm {name!r}; it has {', '.join(names)}")
    lives: dict[str, Served] = {}
    virtuals: dict[str, Served] = {}
    for arm in (plan.arm(name) for name in names):
        say(f"{arm.name} on {profile.name}")
        lives[arm.name] = _joined([_recorded(arm_dir(folder, arm.name, seed)) for seed in plan.seeds])
        # Two servers with the same flags are one to an engine that does not vary.
        same = live.again_of if arm.name == live.again and live.again_of in virtuals else ""
        virtuals[arm.name] = virtuals[same] if same else _replayed(folder, plan, arm, profile)
    noise = {figure: _noise_pct(figure, live.again_of, live.again, lives) for figure in FIGURES}
    return LiveValidation(
        run=plan.run_name,
        profile=profile.name,
        errors=tuple(
            _error(name, figure, lives[name], virtuals[name]) for name in names for figure in FIGURES
        ),
        decisions=tuple(
            replace(_decision(pair, figure, lives, virtuals), noise_pct=noise[figure])
            for pair in chosen
            for figure in FIGURES
        ),
    )


def _replayed(folder: Path, plan: RunPlan, arm: Arm, profile: Profile) -> Served:
    # A CPU schedules one step after another, and its block size is the run's: both are in the profile's own flags.
    flags = arm.flags.model_copy(
        update={"async_scheduling": profile.stock.get("async_scheduling", arm.flags.async_scheduling)}
    )
    parts = []
    for seed in plan.seeds:
        workload = build_workload(plan, seed)
        said = _manifest_blocks(arm_dir(folder, arm.name, seed))
        assumed = replace(Assumptions(name="live"), kv_blocks=said or profile.kv_blocks)
        run, _, _ = run_virtual(profile, replace(arm, flags=flags), workload, assumed)
        parts.append(_served(run.tables["requests"], run.tables["tokens"]))
    return _joined(parts)


def _manifest_blocks(place: Path) -> int | None:
    blocks = read_json(place / MANIFEST).get("telemetry", {}).get("kv_blocks")
    return blocks if isinstance(blocks, int) else None


def _recorded(place: Path) -> Served:
    return _served(pq.read_table(place / "requests.parquet"), pq.read_table(place / "tokens.parquet"))


def _served(requests: pa.Table, tokens: pa.Table) -> Served:
    table: pd.DataFrame = requests.to_pandas()
    figures = request_figures(table, chunks_of(tokens.to_pandas()))
    return Served(
        table["intended_ns"].to_numpy(np.int64),
        {name: figures[name] for name in FIGURES},
        (table["status"].to_numpy(object) == "ok") & table["measured"].to_numpy(bool),
    )


def _joined(parts: Sequence[Served]) -> Served:
    # Far apart, so that blocks of two seeds never mix.
    shifted = [part.intended_ns + number * (1 << 50) for number, part in enumerate(parts)]
    return Served(
        np.concatenate(shifted),
        {name: np.concatenate([part.figures[name] for part in parts]) for name in FIGURES},
        np.concatenate([part.ok for part in parts]),
    )


def _error(name: str, figure: str, live: Served, virtual: Served) -> Error:
    both = _both(figure, live, virtual)
    if not both.any():
        raise RunFailed(f"{name}: no request was served live and on the virtual engine")
    means = (float(np.mean(one.figures[figure][both])) for one in (live, virtual))
    return Error(name, figure, int(both.sum()), *means)


def _decision(
    pair: Pair, figure: str, lives: Mapping[str, Served], virtuals: Mapping[str, Served]
) -> Decision:
    base, arm = pair
    both = _both(figure, lives[base], lives[arm], virtuals[base], virtuals[arm])
    if not both.any():
        raise RunFailed(f"{base} and {arm} served no request in common")
    before, after = (lives[name].figures[figure][both] for name in pair)
    low, high = _interval(lives[base].intended_ns[both], before, after)
    then, now = (float(np.mean(virtuals[name].figures[figure][both])) for name in pair)
    return Decision(base, arm, figure, _pct(before.mean(), after.mean()), low, high, _pct(then, now))


def _noise_pct(figure: str, base: str, again: str, lives: Mapping[str, Served]) -> float:
    if not (base in lives and again in lives):
        return 0.0
    both = _both(figure, lives[base], lives[again])
    before, after = (float(np.mean(lives[name].figures[figure][both])) for name in (base, again))
    return abs(_pct(before, after))


def _both(figure: str, *served: Served) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = np.logical_and.reduce(
        [one.ok & np.isfinite(one.figures[figure]) for one in served]
    )
    return found


def _interval(intended_ns: npt.NDArray[np.int64], before: Floats, after: Floats) -> tuple[float, float]:
    """Of the change of the mean, percent: requests that came within 5 s are drawn together."""
    _, block = np.unique(intended_ns // _BLOCK_NS, return_inverse=True)
    sums = [np.bincount(block, values) for values in (before, after)]
    draws = np.random.Generator(np.random.PCG64(_SEED)).integers(0, len(sums[0]), (_RESAMPLES, len(sums[0])))
    change = 100 * (sums[1][draws].sum(axis=1) / sums[0][draws].sum(axis=1) - 1)
    low, high = np.percentile(change, (2.5, 97.5))
    return float(low), float(high)


def _pct(before: float, after: float) -> float:
    return float(100 * (after / before - 1))


def _fields(one: Error | Decision) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__slots__}
