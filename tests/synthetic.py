"""A run directory made up in a second: plausible records without an engine, for tests of what reads them.

The trace of a seed is the same for every arm; each arm has its own effect on it and its own noise.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from harness.atomic import write_json
from harness.records import arm_dir, write_arm
from harness.schema import arrow_schema

Floats = npt.NDArray[np.float64]
PHASES = ("steady", "prompt switch", "gold burst", "long documents", "overload")
LOAD = np.array([0.0, 0.02, 0.25, 0.6, 1.0])


@dataclass(frozen=True)
class Effect:
    """What an arm does to the traffic. Factors of 1 are a plain server under overload."""

    step: float = 1.0
    short_queue: float = 1.0
    long_queue: float = 1.0
    hit_rate: float = 0.40
    preempt: float = 1.0
    reject: float = 0.0
    hits: tuple[int, ...] = (1200, 800, 400)


EFFECTS = {
    "stock": Effect(),
    "tuned": Effect(step=0.96, short_queue=0.30, long_queue=1.05, hit_rate=0.41, preempt=0.4),
    "qos+mlfq+slru": Effect(step=0.96, short_queue=0.16, long_queue=1.12, hit_rate=0.47, preempt=0.35),
}

# name, tier, kind, weight, priority, slo ms, short, share of requests, prompt mean, output mean
TENANTS: tuple[tuple[Any, ...], ...] = (
    ("gold-a", "gold", "chat", 4, 0, 400.0, True, 0.26, 420, 60),
    ("gold-b", "gold", "completion", 4, 0, 400.0, True, 0.19, 1100, 30),
    ("silver-0", "silver", "chat", 2, 5, 1000.0, True, 0.13, 600, 70),
    ("silver-1", "silver", "chat", 2, 5, 1000.0, True, 0.13, 600, 70),
    ("silver-2", "silver", "chat", 2, 5, 1000.0, True, 0.13, 600, 70),
    ("bronze-0", "bronze", "rag", 1, 10, 6000.0, False, 0.08, 4000, 120),
    ("bronze-1", "bronze", "rag", 1, 10, 6000.0, False, 0.08, 4000, 120),
)


def rng_of(*names: object) -> np.random.Generator:
    """A generator fixed by names alone."""
    digest = hashlib.sha256("/".join(map(str, names)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))


def phase_list(phase_s: float, measured: tuple[int, ...] = (1, 2, 3, 4, 5)) -> list[dict[str, Any]]:
    """The manifest's phases, one after the other from 0."""
    ns = int(phase_s * 1e9)
    return [
        {
            "number": i + 1,
            "name": n,
            "start_ns": i * ns,
            "end_ns": (i + 1) * ns,
            "measured": i + 1 in measured,
        }
        for i, n in enumerate(PHASES)
    ]


def make_run(
    path: Path,
    arms: tuple[str, ...] = ("stock", "tuned", "qos+mlfq+slru"),
    seeds: tuple[int, ...] = (0, 1, 2),
    n: int = 2000,
    phase_s: float = 24.0,
    effects: dict[str, Effect] | None = None,
    noise: str = "",
) -> Path:
    """Write a complete run: plan.json and every arm and seed, `n` requests a seed; returns `path`."""
    known = {**EFFECTS, **(effects or {})}
    plan = {
        "schema": 1,
        "run": path.name,
        "workload": {
            "name": "five_phase",
            "phases": [1, 2, 3, 4, 5],
            "mode": "single",
            "rate_scale": 1.0,
            "time_scale": phase_s / 60,
            "length_scale": 1.0,
        },
        "profile": {"gpu": "rtx4090-24g", "model": "llama-3.1-8b", "sha256": "ab" * 32},
        "seeds": list(seeds),
        "arms": [
            {
                "name": arm,
                "base": "stock" if arm == "stock" else "tuned",
                "patches": patches_of(arm),
                "knobs": {p: {"example_ms": 5} for p in patches_of(arm)},
                "engine_flags": {"max_num_seqs": 256, "max_num_batched_tokens": 2048},
            }
            for arm in arms
        ],
    }
    write_json(path / "plan.json", plan)
    for arm in arms:
        for seed in seeds:
            tables = make_tables(arm, seed, n, phase_s, known.get(arm, Effect()), noise)
            manifest, receipt = make_papers(arm, seed, n, phase_s, known.get(arm, Effect()))
            write_arm(arm_dir(path, arm, seed), tables, manifest, receipt)
    return path


def patches_of(arm: str) -> list[str]:
    """The patches that an arm's name says."""
    return [] if arm in ("stock", "tuned") or arm.startswith("plain") else arm.split("+")


def make_papers(
    arm: str, seed: int, n: int, phase_s: float, effect: Effect = Effect()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Manifest and receipt of one arm and seed."""
    patches = patches_of(arm)
    manifest = {
        "schema": 1,
        "arm": arm,
        "seed": seed,
        "versions": {"vllm": "0.32.0", "python": "3.11.0", "torch": "2.13.0", "vllm_patchbench": "0.1.0"},
        "profile": {"name": "rtx4090-24g/llama-3.1-8b", "sha256": "ab" * 32, "source": "synthetic"},
        "workload": {
            "name": "five_phase",
            "sha256": hashlib.sha256(f"trace{seed}".encode()).hexdigest(),
            "corpus_sha256": "cd" * 32,
            "requests": n,
            "slo_factor": 2.0,
            "tenants": [
                dict(
                    zip(
                        ("name", "tier", "kind", "weight", "priority", "slo_ttft_ms", "short"),
                        t[:7],
                        strict=True,
                    )
                )
                for t in TENANTS
            ],
            "phases": phase_list(phase_s),
        },
        "plan_sha256": "ef" * 32,
        "patch_plan_sha256": "ef" * 32,
        "patches": patches,
        "knobs": {p: {"example_ms": 5} for p in patches},
        "engine_flags": {"max_num_seqs": 256, "max_num_batched_tokens": 2048},
        "schedule_digest": hashlib.sha256(f"{arm}{seed}".encode()).hexdigest(),
        "virtual_s": phase_s * 5 + 8.5,
        "command": ["bench", "run", "--enable", ",".join(patches)],
        "validity": {"valid": True, "reasons": []},
        "run_facts": {
            "wall_s": 21.5,
            "upstream_s": 17.0,
            "host": "synthetic",
            "started": "2026-01-01T00:00:00Z",
        },
    }
    receipt = {
        "schema": 1,
        "pid": 1,
        "plan_sha256": "ef" * 32,
        "hooks": {
            p: {"hits": h, "by_hook": {"waiting_key": h}} for p, h in zip(patches, effect.hits, strict=False)
        },
        "metrics": {p: {f"{p}_touched": 10.0 + seed} for p in patches},
    }
    return manifest, receipt


def make_tables(
    arm: str, seed: int, n: int, phase_s: float, effect: Effect, noise: str = ""
) -> dict[str, pa.Table]:
    """The four tables of one arm and seed."""
    trace = rng_of("trace", seed, n)
    luck = rng_of("luck", noise, arm, seed)

    # what is sent: the same for every arm
    share = np.array([t[7] for t in TENANTS])
    phase_weight = np.array([0.13, 0.13, 0.2, 0.22, 0.32])
    span = phase_s * 1e9
    phase = trace.choice(5, n, p=phase_weight)
    intended = np.sort((phase + trace.random(n)) * span).astype(np.int64)
    phase = np.minimum(intended // int(span), 4).astype(np.int32)
    who = trace.choice(len(TENANTS), n, p=share / share.sum())
    prompt = (np.array([t[8] for t in TENANTS])[who] * trace.lognormal(-0.05, 0.35, n)).astype(np.int32) + 8
    planned = np.clip(np.array([t[9] for t in TENANTS])[who] * trace.lognormal(-0.1, 0.4, n), 2, 500).astype(
        np.int32
    )
    cancels = (np.array([t[2] for t in TENANTS])[who] == "completion") & (trace.random(n) < 0.6)
    cancel_ns = np.where(cancels, intended + trace.uniform(0.2, 0.9, n) * 1e9, np.nan)
    short = np.array([t[6] for t in TENANTS])[who]
    slo = np.array([t[5] for t in TENANTS])[who]

    # what the server does: queueing follows a slow random level shared by neighbours in time
    level = _slow_level(intended / span, luck)
    ramp = LOAD[phase] * (0.4 + (intended % int(span)) / span) * 6000
    queue_ms = (
        ramp * np.where(short, effect.short_queue, effect.long_queue) * level * luck.lognormal(0, 0.3, n)
    )
    queue_ms = np.maximum(queue_ms, 1 + luck.exponential(8, n)) * effect.step
    cached = (prompt * np.clip(effect.hit_rate + luck.normal(0, 0.15, n), 0, 0.95) // 16 * 16).astype(
        np.int32
    )
    prefill_ms = (12 + 0.09 * (prompt - cached)) * effect.step
    step_ms = (18 + 14 * LOAD[phase]) * effect.step
    preempted = (luck.random(n) < 0.05 * effect.preempt * LOAD[phase]).astype(np.int32)
    rejected = luck.random(n) < effect.reject * LOAD[phase]

    sent = intended + (luck.random(n) * 1e6).astype(np.int64)
    scheduled = intended + (queue_ms * 1e6).astype(np.int64)
    first = scheduled + (prefill_ms * 1e6).astype(np.int64)

    # tokens: one chunk a token, one request after the other
    owner = np.repeat(np.arange(n, dtype=np.int32), planned)
    offsets = np.concatenate([[0], np.cumsum(planned)[:-1]])
    index = (np.arange(len(owner)) - offsets[owner]).astype(np.int32)
    gap = step_ms[owner] * luck.lognormal(0, 0.12, len(owner)) * np.repeat(level, planned) ** 0.2
    hiccup = (preempted[owner] > 0) & (index == planned[owner] // 2) & (index > 0)
    gap = np.where(hiccup, gap + 900, gap)
    gap[index == 0] = 0
    total = np.cumsum(gap)
    at = first[owner] + ((total - total[offsets][owner]) * 1e6).astype(np.int64)
    keep = ~(at > cancel_ns[owner]) & ~rejected[owner]
    owner, index, at, hiccup = owner[keep], index[keep], at[keep], hiccup[keep]

    got = np.bincount(owner, minlength=n).astype(np.int32)
    last = np.full(n, np.nan)
    last[owner] = at
    first_f = np.where(got > 0, first, np.nan)
    status = np.where(rejected, "rejected", np.where(got < planned, "cancelled", "ok"))
    end = np.where(rejected, sent, np.where(status == "cancelled", cancel_ns, last))
    unscheduled = rejected | (scheduled > end)
    lost = np.where(unscheduled | (got <= planned // 2), 0, preempted)

    requests = pd.DataFrame(
        {
            "request_id": [f"r{i:06d}" for i in range(n)],
            "tenant": np.array([t[0] for t in TENANTS])[who],
            "tier": np.array([t[1] for t in TENANTS])[who],
            "kind": np.array([t[2] for t in TENANTS])[who],
            "phase": phase + 1,
            "short": short,
            "measured": True,
            "weight": np.array([t[3] for t in TENANTS])[who],
            "slo_ttft_ms": slo,
            "intended_ns": intended,
            "sent_ns": sent,
            "scheduled_ns": np.where(unscheduled, np.nan, scheduled),
            "first_token_ns": first_f,
            "first_output_ns": first_f,
            "last_token_ns": last,
            "end_ns": end,
            "cancel_ns": cancel_ns,
            "first_chunk_tokens": np.minimum(got, 1),
            "prompt_tokens": prompt,
            "prompt_tokens_counted": np.where(rejected, np.nan, prompt),
            "cached_tokens": np.where(unscheduled, np.nan, cached),
            "output_tokens_planned": planned,
            "output_tokens": got,
            "preemptions": lost,
            "recomputed_tokens": lost * (prompt // 2),
            "status": status,
            "reason": np.where(rejected, "queue_full", ""),
            "retry_after_s": np.where(rejected, 2.0, np.nan),
        }
    )
    for name in requests.columns:
        if name.endswith("_ns"):
            requests[name] = requests[name].round()
    tokens = pd.DataFrame({"request": owner, "index": index, "t_ns": at})
    steps = _steps(intended, requests, span, effect, luck)
    where = np.flatnonzero(hiccup)
    events = pd.DataFrame(
        {
            "t_ns": at[where] - 800_000_000,
            "kind": "preempt",
            "request": owner[where],
            "value": np.nan,
            "detail": "",
        }
    ).sort_values("t_ns", kind="stable")
    frames = {"requests": requests, "tokens": tokens, "steps": steps, "events": events}
    return {name: _arrow(name, frame) for name, frame in frames.items()}


def _slow_level(at: Floats, luck: np.random.Generator) -> Floats:
    """A positive level with mean near 1 that drifts over tens of a phase: neighbours share it."""
    knots = luck.normal(0, 0.12, 64)
    level: Floats = np.exp(np.interp(at, np.linspace(0, 5, 64), knots))
    return level


def _steps(
    intended: npt.NDArray[np.int64],
    requests: pd.DataFrame,
    span: float,
    effect: Effect,
    luck: np.random.Generator,
) -> pd.DataFrame:
    count = int(5 * span / 25e6)
    length = np.repeat((18 + 14 * LOAD) * effect.step, count // 5) * luck.lognormal(0, 0.1, count // 5 * 5)
    start = np.concatenate([[0], np.cumsum(length)[:-1]]) * 1e6 + 1e6
    start = (start[start < 5 * span]).astype(np.int64)
    length = length[: len(start)]
    begin = np.sort(requests["scheduled_ns"].fillna(0).to_numpy())
    done = np.sort(requests["end_ns"].fillna(0).to_numpy())
    waiting = np.searchsorted(intended, start) - np.searchsorted(begin, start)
    running = np.clip(np.searchsorted(begin, start) - np.searchsorted(done, start), 1, 256)
    return pd.DataFrame(
        {
            "t_ns": start - 500_000,
            "start_ns": start,
            "end_ns": start + (length * 0.97e6).astype(np.int64),
            "running": running,
            "waiting": np.maximum(waiting, 0),
            "held": 0,
            "scheduled": running,
            "prefill_tokens": luck.integers(0, 512, len(start)),
            "decode_tokens": running,
            "kv_usage": np.clip(running / 260 + luck.normal(0, 0.02, len(start)), 0, 1),
            "preempted": 0,
            "evicted": luck.integers(0, 9, len(start)),
            "drafted": 0,
            "accepted": 0,
        }
    )


def _arrow(name: str, frame: pd.DataFrame) -> pa.Table:
    schema = arrow_schema(name)
    return pa.table([pa.array(frame[f.name], type=f.type, from_pandas=True) for f in schema], schema=schema)
