"""Figures of an arm's phase, each with what bounds it; the formulas are in `scripts/scheduling_bounds.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from harness.metrics.derive import chunks_of
from harness.metrics.fairness_windows import WINDOW_NS, jain_index, shares_by_window
from harness.stats.blocks import Window
from scripts.bounds.line import beyond, burst_limit_s, busy_periods, percentile
from scripts.bounds.records import PHASE_S, Floats, Machine, Seed, in_phase, steps_in, window_ns
from scripts.bounds.shares import max_min, water_fill, whole_jain

# Prompts with so much that is not cached are whole where others are divisible.
LONG_TOKENS = 2048
# Moments in a step at which a request may come.
_MOMENTS = (np.arange(40) + 0.5) / 40


def ttft_p99_s(step_s: float, rest_s: float, price_s: float, uncached: Floats, steps_before: int) -> float:
    """p99 over requests and moments of arrival of `U L + steps_before L + rest + price u`."""
    own = rest_s + price_s * uncached
    before_s = (_MOMENTS + steps_before) * step_s
    return percentile((before_s[:, None] + own[None, :]).ravel(), 99)


def most_served(costs: Floats, budget: float) -> float:
    """How many fit, the cheapest first, the last one in part."""
    total = np.cumsum(np.sort(costs))
    whole = int(np.searchsorted(total, budget, side="right"))
    if whole == len(costs):
        return float(whole)
    before = float(total[whole - 1]) if whole else 0.0
    return whole + (budget - before) / float(total[whole] - before)


@dataclass(frozen=True)
class ShortTtft:
    """p99 as found, the bound if short ones never meet, and with the bursts in which they came; ms."""

    found: float
    alone: float
    bursts: float


def short_ttft_ms(machine: Machine, seeds: Sequence[Seed], phase: int) -> ShortTtft:
    """The short requests of one phase."""
    by_seed = [r[r["short"]].dropna(subset=["ttft_ms"]) for r in (in_phase(s.requests, phase) for s in seeds)]
    steps = pd.concat([steps_in(s, phase) for s in seeds])
    context = _mean_context(seeds, phase)
    uncached = pd.concat([_uncached(short) for short in by_seed]).to_numpy(np.float64)
    running = float(steps["decode_tokens"].mean())
    step_s = float((steps["end_ns"] - steps["start_ns"]).mean()) / 1e9
    rest_s = min(step_s, machine.rest_s(running, context))
    price_s = machine.price_s(running, context, float(uncached.mean()))
    bursts = []
    for short in by_seed:
        ordered = short.sort_values("intended_ns", kind="stable")
        arrival_s = ordered["intended_ns"].to_numpy(np.float64) / 1e9
        work_s = price_s * _uncached(ordered).to_numpy(np.float64)
        bursts += [(arrival_s[part], work_s[part]) for part in busy_periods(arrival_s, work_s)]
    before_s = (_MOMENTS + machine.steps_before) * step_s + rest_s
    return ShortTtft(
        percentile(pd.concat([short["ttft_ms"] for short in by_seed]).to_numpy(np.float64), 99),
        1e3 * ttft_p99_s(step_s, rest_s, price_s, uncached, machine.steps_before),
        1e3 * burst_limit_s(bursts, before_s, beyond(len(uncached))),
    )


def _uncached(requests: pd.DataFrame) -> pd.Series:
    return requests["prompt_tokens"] - requests["cached_tokens"]


def _mean_context(seeds: Sequence[Seed], phase: int) -> float:
    """Tokens before a decode, the mean over output tokens."""
    every = pd.concat([in_phase(s.requests, phase) for s in seeds])
    output = every["output_tokens"].to_numpy(np.float64)
    context = every["prompt_tokens"].to_numpy(np.float64) + output / 2
    return float((context * output).sum() / max(1.0, output.sum()))


@dataclass(frozen=True)
class Jain:
    """The mean index as found, the bound with whole prompts, and the one with prompts in any number of parts.

    `share_per_s` is what an equal share of the same service would have been, tokens a second for each unit of weight: a
    prompt of a tenant that gets no more than this takes its length over it.
    """

    found: float
    whole: float
    divided: float
    share_per_s: float


def jain(seeds: Sequence[Seed], phase: int) -> Jain | None:
    """Over the windows that count; None where none does."""
    rows = [row for seed in seeds for row in _jain_of_windows(seed, phase)]
    return Jain(*(float(np.mean(column)) for column in zip(*rows, strict=True))) if rows else None


def _jain_of_windows(seed: Seed, phase: int) -> list[tuple[float, float, float, float]]:
    requests, chunks = seed.requests, chunks_of(seed.tokens)
    names = sorted(requests["tenant"].unique())
    who = requests["tenant"].map({name: i for i, name in enumerate(names)}).to_numpy(np.int64)
    shares = shares_by_window(requests, chunks, who, len(names), [Window(phase, *window_ns(phase))])
    weight = np.ones(len(names))
    weight[who] = requests["weight"].to_numpy(np.float64)
    begin, end = (requests[f"{at}_ns"].to_numpy(np.float64) for at in ("scheduled", "first_token"))
    uncached = np.nan_to_num(_uncached(requests).to_numpy(np.float64))
    rows = []
    for i, start in enumerate(shares.starts_ns):
        some = shares.backlogged[:, i]
        if some.sum() < 2:
            continue
        inside = (chunks.t_ns >= start) & (chunks.t_ns < start + WINDOW_NS)
        decoded = (
            np.bincount(who[chunks.request[inside]], chunks.tokens[inside], minlength=len(names)) / weight
        )
        prefill = max(0.0, float(((shares.service[:, i] - decoded) * weight)[some].sum()))
        overlap = np.minimum(end, start + WINDOW_NS) - np.maximum(begin, start)
        computed = uncached * np.nan_to_num(np.maximum(0.0, overlap) / np.maximum(1.0, end - begin))
        whole = computed[some[who] & (uncached >= LONG_TOKENS) & (computed > 0)]
        rest = max(0.0, prefill - float(whole.sum()))
        rows.append(
            (
                jain_index(shares.service[some, i]),
                whole_jain(decoded[some], weight[some], whole, rest),
                jain_index(water_fill(decoded[some], weight[some], prefill)),
                float((shares.service[:, i] * weight)[some].sum() / weight[some].sum()) / (WINDOW_NS / 1e9),
            )
        )
    return rows


def over_their_share(seeds: Sequence[Seed], phase: int) -> dict[str, float]:
    """Tenants whose offered work is above their share, and how many times."""
    every = pd.concat([in_phase(s.requests, phase) for s in seeds])
    work = _work(every)
    names = sorted(every["tenant"].unique())
    offered = np.array([work["tokens"][every["tenant"] == name].sum() for name in names])
    weight = np.array([float(every["weight"][every["tenant"] == name].iloc[0]) for name in names])
    steps = pd.concat([steps_in(s, phase) for s in seeds])
    got = max_min(offered, weight, float((steps["prefill_tokens"] + steps["decode_tokens"]).sum()))
    return {name: o / g for name, o, g in zip(names, offered, got, strict=True) if o > 1.001 * g}


def _work(requests: pd.DataFrame) -> pd.DataFrame:
    """Uncached prompt and output tokens of each request; of the unserved by the hits of their tenant's others."""
    prompt = requests["prompt_tokens"].astype(float)
    missed = _uncached(requests) / prompt
    missed = missed.fillna(missed.groupby(requests["tenant"]).transform("mean")).fillna(1.0)
    cut = requests["status"] == "cancelled"
    output = requests["output_tokens_planned"].where(~cut, requests["output_tokens"]).astype(float)
    return pd.DataFrame({"uncached": prompt * missed, "output": output, "tokens": prompt * missed + output})


def goodput_rps(machine: Machine, seeds: Sequence[Seed], phase: int) -> tuple[float, float, str]:
    """As found, the bound, and which of the two resources sets it."""
    every = pd.concat([in_phase(s.requests, phase) for s in seeds])
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
