"""Completions, the first seconds, cost, and all patches together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.metrics.scope import Scope
from harness.records import read_json
from scripts.kv_rows.run import COMPLETIONS, Row, Run, absent, below, versus

FAMILY = {"cacheaware", "slru", "shield", "warmup", "tiering", "cancel", "version"}


def completions(run: Run) -> list[Row]:
    name, scope, limit = run.named("cancel"), Scope(tenant=COMPLETIONS), 50 * run.slo_factor
    out = [
        below(
            run,
            f"cancel: {COMPLETIONS}'s hit rate",
            "> 0.85",
            name,
            "prefix_hit_rate",
            lambda v: v > 0.85,
            scope=scope,
            unit="",
        ),
        below(
            run,
            "cancel: TTFT p50 of the keystroke that was finished",
            f"< {limit:.0f} ms",
            name,
            "finished_ttft_ms_p50",
            lambda v: v < limit,
            scope=scope,
        ),
    ]
    if name is None or not run.record.arms.get("tuned"):
        return out
    bases = [run.estimate("tuned", metric, scope) for metric in ("prefix_hit_rate", "finished_ttft_ms_p50")]
    return [
        row if base is None else replace(row, found=f"{row.found} (tuned {base.value:.4g})")
        for row, base in zip(out, bases, strict=True)
    ]


def cost(paths: Sequence[Path]) -> list[Row]:
    what, asked = "all KV patches: schedule + update against stock", "<= 1.25 times"
    if not paths:
        return [absent(what, f"{asked} (bench perf --blocks N --json)")]
    out = []
    for path in paths:
        told = read_json(path)
        where = f"{told['running']} running, {told['waiting']:,} waiting"
        if told.get("blocks"):
            where += f", {told['blocks']:,} blocks"
        ratio = float(told["ratio"])
        out.append(Row(f"{what}, {where}", asked, f"{ratio:.3f} times", "", ratio <= 1.25))
    return out


def together(run: Run) -> list[Row]:
    """No targets: what the patches do together."""
    arms = [
        arm
        for arm in run.record.plan["arms"]
        if set(arm["patches"]) >= FAMILY and run.record.arms.get(arm["name"])
    ]
    if not arms:
        return [absent("all of them: the same figures", "")]
    name, out = str(arms[0]["name"]), []
    for metric, scope in (
        ("prefix_hit_rate", Scope()),
        ("prefix_hit_rate", Scope(tenant=COMPLETIONS)),
        ("recomputed_tokens", Scope()),
        ("ttft_ms_p99", Scope((2,))),
        ("cold_ttft_ms_p90", Scope()),
        ("finished_ttft_ms_p50", Scope(tenant=COMPLETIONS)),
        ("queue_wait_ms_max", Scope()),
        ("slo_attainment", Scope()),
        ("output_tok_per_s", Scope()),
    ):
        row = versus(run, f"{name}: {metric}, {scope}", "", name, metric, bool, scope=scope)
        out.append(replace(row, met=None))
    return out
