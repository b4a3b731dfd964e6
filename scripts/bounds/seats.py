"""What a tenant's own bursts cost it on its share of the seats, by itself and with what others leave of theirs."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from scripts.bounds.line import percentile
from scripts.bounds.records import PHASE_S, Floats, Machine, Seed
from scripts.bounds.shares import max_min


@dataclass(frozen=True)
class SeatWait:
    """TTFT p99 of a tier as found, on its tenants' own shares, and with what idle tenants lend; ms."""

    found: float
    own: float
    lent: float


def seat_waits_s(arrival_s: Floats, hold_s: Floats, seats: int) -> Floats:
    """How long each waits for one of so many seats, first come, first served, if each then keeps it for so long."""
    free_s = [-np.inf] * seats
    waits = np.zeros(len(arrival_s))
    for index, (arrives, holds) in enumerate(zip(arrival_s, hold_s, strict=True)):
        begins = max(float(arrives), heapq.heappop(free_s))
        waits[index] = begins - arrives
        heapq.heappush(free_s, begins + float(holds))
    return waits


def seat_wait_ms(machine: Machine, seeds: Sequence[Seed], phase: int, tier: str) -> SeatWait | None:
    """One tier's requests of the phase, those of earlier phases before them; None where there are none."""
    found: list[Floats] = []
    own: list[Floats] = []
    lent: list[Floats] = []
    for seed in seeds:
        served = seed.requests.dropna(subset=["first_token_ns", "last_token_ns", "ttft_ms"])
        served = served[served["phase"] <= phase].sort_values("intended_ns", kind="stable")
        hold_s = (served["last_token_ns"] - served["scheduled_ns"]).to_numpy(np.float64) / 1e9
        now = (served["phase"] == phase).to_numpy(bool)
        tenants = sorted(served["tenant"].unique())
        who = served["tenant"].to_numpy(object)
        weight = np.array([float(served["weight"][who == name].iloc[0]) for name in tenants])
        used = np.array([hold_s[now & (who == name)].sum() / PHASE_S for name in tenants])
        for index, name in enumerate(tenants):
            mine = who == name
            if not (mine & now).any() or served["tier"][mine].iloc[0] != tier:
                continue
            wanted = np.where(np.arange(len(tenants)) == index, np.inf, used)
            found.append(served["ttft_ms"][mine & now].to_numpy(np.float64))
            for into, seats in (
                (own, machine.seats * weight[index] / weight.sum()),
                (lent, max_min(wanted, weight, machine.seats)[index]),
            ):
                into.append(_ttft_ms(served[mine], hold_s[mine], max(1, int(seats)), now[mine]))
    if not found:
        return None
    return SeatWait(*(percentile(np.concatenate(values), 99) for values in (found, own, lent)))


def _ttft_ms(served: pd.DataFrame, hold_s: Floats, seats: int, now: np.ndarray) -> Floats:
    prefill_ms = (served["first_token_ns"] - served["scheduled_ns"]).to_numpy(np.float64) / 1e6
    waits_s = seat_waits_s(served["intended_ns"].to_numpy(np.float64) / 1e9, hold_s, seats)
    return (1e3 * waits_s + prefill_ms)[now]
