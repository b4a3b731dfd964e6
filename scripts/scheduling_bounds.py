"""What no scheduler could pass on a run's profile and traffic: a bound beside each figure that misses its target.

    python scripts/scheduling_bounds.py results/scheduling-tight --arm all --arm wfq+tenant

All bounds are for the work that the arm did (or was offered), by the profile's own step times. They are
bounds under the assumptions said with each, not promises that something reaches them.

Short TTFT p99. Work that was done back to back fixes the mean step: with R output and P prefill tokens a second there
are R L decodes and P L prefill tokens in a step of L seconds, so no order of the same work changes L. A request that
comes waits for the rest of the step under way (a part of L, uniform), for the next one (L: it is scheduled
already where scheduling is asynchronous) and for its own: the decodes of a mean step, and its own uncached tokens
at what they add. Assumes that all steps are equally long, that nobody waits for a seat or for blocks, and that all other
prefill steps aside in its own step. Serving less would make it smaller.

Jain. In each 5 s window that counts, what was decoded is left as it was; the prefill tokens of the
backlogged tenants are dealt out anew so that service over weight is as equal as it can be (water filling).
Assumes that a prompt can be prefilled in any number of parts at no cost, in blocks or in time.

Share. A tenant's offered tokens a second against its max-min share by weight of the service that all got.
Above 1 its own line grows: who comes at second t of the phase waits for `(ratio - 1) t`. Assumes that the phase
begins with no line.

Goodput. Requests are taken cheapest first, each at the least it can cost: its uncached prompt in full
steps without decodes, and for each output token its part of a step of as many decodes as seats and memory
allow; and again by memory, blocks times the time of its output at one decode a step. The less of the two. Assumes
that a request that is in time needs nothing beyond that, and that the cache hits as often as in the run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness.errors import UserError, told  # noqa: E402
from harness.metrics.derive import chunks_of, request_figures  # noqa: E402
from harness.metrics.fairness_windows import WINDOW_NS, jain_index, shares_by_window  # noqa: E402
from harness.plan import RunPlan, read  # noqa: E402
from harness.profiles.model import StepTimeModel  # noqa: E402
from harness.stats.blocks import Window  # noqa: E402

Floats = npt.NDArray[np.float64]
PHASE_S = 60.0
PHASES = (1, 2, 3, 4, 5)


# the arithmetic


def percentile(values: Floats, percent: float) -> float:
    """Nearest rank."""
    return float(np.sort(values)[max(0, int(np.ceil(percent / 100 * len(values))) - 1)])


def ttft_p99_s(step_s: float, rest_s: float, price_s: float, uncached: Floats, steps_before: int) -> float:
    """p99 over requests and moments of arrival of `U L + steps_before L + rest + price u`."""
    moments = (np.arange(200) + 0.5) / 200
    own = rest_s + price_s * uncached
    return percentile((moments[:, None] * step_s + steps_before * step_s + own[None, :]).ravel(), 99)


def water_fill(fixed: Floats, weight: Floats, amount: float) -> Floats:
    """`fixed` raised to one level with `amount`, of which a unit of level takes `weight`."""
    if amount <= 0:
        return fixed
    order = np.argsort(fixed, kind="stable")
    level, used, filled = float(fixed[order[0]]), 0.0, 0.0
    for index in order:
        need = (float(fixed[index]) - level) * used
        if filled + need >= amount:
            break
        filled, level = filled + need, float(fixed[index])
        used += float(weight[index])
    return np.maximum(fixed, level + (amount - filled) / used)


def max_min(offered: Floats, weight: Floats, capacity: float) -> Floats:
    """Each gets what it asks for, or a share by weight of what those who ask for less leave."""
    got, open_ = np.zeros(len(offered)), np.ones(len(offered), dtype=bool)
    left = capacity
    while open_.any():
        share = left * weight / weight[open_].sum()
        content = open_ & (offered <= share)
        if not content.any():
            got[open_] = share[open_]
            break
        got[content] = offered[content]
        left -= float(offered[content].sum())
        open_ &= ~content
    return got


def most_served(costs: Floats, budget: float) -> float:
    """How many fit, the cheapest first, the last one in part."""
    total = np.cumsum(np.sort(costs))
    whole = int(np.searchsorted(total, budget, side="right"))
    if whole == len(costs):
        return float(whole)
    before = float(total[whole - 1]) if whole else 0.0
    return whole + (budget - before) / float(total[whole] - before)


# a run


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


def _phase(frame: pd.DataFrame, phase: int) -> pd.DataFrame:
    return frame[frame["phase"] == phase]


def _window_ns(requests: pd.DataFrame, phase: int) -> tuple[int, int]:
    begin = (phase - 1) * int(PHASE_S * 1e9)
    return begin, begin + int(PHASE_S * 1e9)


def short_ttft_ms(machine: Machine, seeds: Sequence[Seed], phase: int) -> tuple[float, float]:
    """p99 as found, and the bound."""
    short = pd.concat([r[r["short"]] for r in (_phase(s.requests, phase) for s in seeds)])
    steps = pd.concat([_steps_in(s, phase) for s in seeds])
    context = _mean_context(seeds, phase)
    found = short["ttft_ms"].dropna().to_numpy(np.float64)
    uncached = (short["prompt_tokens"] - short["cached_tokens"]).dropna().to_numpy(np.float64)
    running = float(steps["decode_tokens"].mean())
    step_s = float((steps["end_ns"] - steps["start_ns"]).mean()) / 1e9
    rest_s = min(step_s, machine.rest_s(running, context))
    price_s = machine.price_s(running, context, float(uncached.mean()))
    least = ttft_p99_s(step_s, rest_s, price_s, uncached, machine.steps_before)
    return percentile(found, 99), 1e3 * least


def _steps_in(seed: Seed, phase: int) -> pd.DataFrame:
    begin, end = _window_ns(seed.requests, phase)
    return seed.steps[(seed.steps["start_ns"] >= begin) & (seed.steps["start_ns"] < end)]


def _mean_context(seeds: Sequence[Seed], phase: int) -> float:
    """Tokens before a decode, the mean over output tokens."""
    every = pd.concat([_phase(s.requests, phase) for s in seeds])
    output = every["output_tokens"].to_numpy(np.float64)
    context = every["prompt_tokens"].to_numpy(np.float64) + output / 2
    return float((context * output).sum() / max(1.0, output.sum()))


def jain(seeds: Sequence[Seed], phase: int) -> tuple[float, float] | None:
    """The mean index as found and the bound; None where no window counts."""
    found, best = [], []
    for seed in seeds:
        requests, chunks = seed.requests, chunks_of(seed.tokens)
        names = sorted(requests["tenant"].unique())
        who = requests["tenant"].map({name: i for i, name in enumerate(names)}).to_numpy(np.int64)
        begin, end = _window_ns(requests, phase)
        shares = shares_by_window(requests, chunks, who, len(names), [Window(phase, begin, end)])
        weight = np.ones(len(names))
        weight[who] = requests["weight"].to_numpy(np.float64)
        for i, start in enumerate(shares.starts_ns):
            some = shares.backlogged[:, i]
            if some.sum() < 2:
                continue
            inside = (chunks.t_ns >= start) & (chunks.t_ns < start + WINDOW_NS)
            decoded = (
                np.bincount(who[chunks.request[inside]], chunks.tokens[inside], minlength=len(names)) / weight
            )
            prefill = float(((shares.service[:, i] - decoded) * weight)[some].sum())
            found.append(jain_index(shares.service[some, i]))
            best.append(jain_index(water_fill(decoded[some], weight[some], max(0.0, prefill))))
    return (float(np.mean(found)), float(np.mean(best))) if found else None


def over_their_share(seeds: Sequence[Seed], phase: int) -> dict[str, float]:
    """Tenants whose offered work is above their share, and how many times."""
    every = pd.concat([_phase(s.requests, phase) for s in seeds])
    work = _work(every)
    names = sorted(every["tenant"].unique())
    offered = np.array([work["tokens"][every["tenant"] == name].sum() for name in names])
    weight = np.array([float(every["weight"][every["tenant"] == name].iloc[0]) for name in names])
    steps = pd.concat([_steps_in(s, phase) for s in seeds])
    got = max_min(offered, weight, float((steps["prefill_tokens"] + steps["decode_tokens"]).sum()))
    return {name: o / g for name, o, g in zip(names, offered, got, strict=True) if o > 1.001 * g}


def _work(requests: pd.DataFrame) -> pd.DataFrame:
    """Uncached prompt and output tokens of each request; of the unserved by the hits of their tenant's others."""
    prompt = requests["prompt_tokens"].astype(float)
    missed = (prompt - requests["cached_tokens"]) / prompt
    missed = missed.fillna(missed.groupby(requests["tenant"]).transform("mean")).fillna(1.0)
    cut = requests["status"] == "cancelled"
    output = requests["output_tokens_planned"].where(~cut, requests["output_tokens"]).astype(float)
    return pd.DataFrame({"uncached": prompt * missed, "output": output, "tokens": prompt * missed + output})


def goodput_rps(machine: Machine, seeds: Sequence[Seed], phase: int) -> tuple[float, float, str]:
    """As found, the bound, and which of the two resources sets it."""
    every = pd.concat([_phase(s.requests, phase) for s in seeds])
    work, seconds = _work(every), PHASE_S * len(seeds)
    uncached, output = work["uncached"].to_numpy(np.float64), work["output"].to_numpy(np.float64)
    held = every["prompt_tokens"].to_numpy(np.float64) + output
    context = float(held.mean())
    seats = min(machine.seats, machine.blocks * machine.block_size / context)
    token_s = machine.rest_s(seats, context) / seats
    by_time = most_served(uncached * machine.least_prefill_s() + output * token_s, seconds)
    blocks_s = np.ceil(held / machine.block_size) * output * machine.rest_s(1, context)
    by_memory = most_served(blocks_s, machine.blocks * seconds)
    which = "time" if by_time <= by_memory else "memory"
    if min(by_time, by_memory) >= len(every):
        which = "offered"
    return float(every["met"].sum()) / seconds, min(by_time, by_memory) / seconds, which


def table_of(run: Path, plan: RunPlan, arm: str) -> Table:
    """One arm's figures and bounds, a row a phase."""
    machine, seeds = Machine(plan, arm), load(run, arm)
    table = Table(title=f"{run.name}, {arm}: found, and what bounds it")
    for column in (
        "phase",
        "short TTFT p99 ms",
        "at least",
        "Jain",
        "at most",
        "goodput req/s",
        "at most",
        "work over its share",
    ):
        table.add_column(column, justify="right")
    for phase in PHASES:
        ttft, least = short_ttft_ms(machine, seeds, phase)
        fair = jain(seeds, phase)
        served, most, which = goodput_rps(machine, seeds, phase)
        over = ", ".join(f"{name} {ratio:.2f}" for name, ratio in over_their_share(seeds, phase).items())
        table.add_row(
            str(phase),
            f"{ttft:.0f}",
            f"{least:.0f}",
            *((f"{fair[0]:.3f}", f"{fair[1]:.3f}") if fair else ("-", "-")),
            f"{served:.2f}",
            f"{most:.2f} ({which})",
            over,
        )
    return table


def main() -> None:
    """Print the bounds of a run's arms."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a virtual run of the five phases")
    parser.add_argument("--arm", action="append", help="may be repeated; default: all arms")
    args = parser.parse_args()
    with told("scheduling_bounds"):
        plan = read(args.run, same_code=False)
        arms = [arm.name for arm in plan.arms]
        for name in args.arm or arms:
            if name not in arms:
                raise UserError(f"the run has no arm {name}; it has {', '.join(arms)}")
            Console(width=150).print(table_of(args.run, plan, name))


if __name__ == "__main__":
    main()
