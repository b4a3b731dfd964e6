"""Hit rates: of the five phases and their bounds, of the traces, and how far the order of requests may go for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from harness.cache_limits import pooled
from harness.metrics.scope import Scope
from harness.records import read_json
from scripts.kv_rows.run import Row, Run, absent, versus


def hit_rate(run: Run) -> list[Row]:
    name = run.named("slru", "cacheaware", "shield")
    what, asked = "slru,cacheaware,shield: hit rate", "+25% or >= 80% of its clairvoyant bound"
    row = versus(run, what, asked, name, "prefix_hit_rate", lambda v: v >= 25)
    if name is None:
        return [row]
    bound = pooled(
        [r.manifest["cache_bounds"] for r in run.arm(name).records if "cache_bounds" in r.manifest]
    )
    if bound is None or not bound["all"]["clairvoyant"]:
        return [row]
    reached = bound["all"]["hit_rate"] / bound["all"]["clairvoyant"]
    found = f"{row.found}; {100 * reached:.1f}% of the bound {bound['all']['clairvoyant']:.4f}"
    told = [
        r.manifest["cache_bounds"] for r in run.record.arms.get("tuned", ()) if "cache_bounds" in r.manifest
    ]
    if (tuned := pooled(told)) is not None and tuned["all"]["clairvoyant"]:
        found += f" (tuned {100 * tuned['all']['hit_rate'] / tuned['all']['clairvoyant']:.1f}% of its own)"
    return [Row(what, asked, found, row.interval, bool(row.met) or reached >= 0.8)]


def traces(paths: Sequence[Path]) -> list[Row]:
    what = "slru: hit rate on a trace against LRU"
    if not paths:
        return [absent(what, ">= -1% everywhere, +20% at two sizes, +30% with the scan (bench cache --json)")]
    out = []
    for path in paths:
        told = read_json(path)
        rates = {(r["scan_mix"], r["blocks"], r["policy"]): float(r["hit_rate"]) for r in told["rows"]}
        for scan, asked in (
            (0, ">= -1% at every size, +20% at two or more"),
            (1, "+30% under the 1:1 scan mix"),
        ):
            sizes = [b for s, b, policy in rates if s == scan and policy == "lru" and (s, b, "slru") in rates]
            gains = [100 * (rates[scan, b, "slru"] / rates[scan, b, "lru"] - 1) for b in sizes]
            shown = ", ".join(f"{b:,}: {g:+.1f}%" for b, g in zip(sizes, gains, strict=True))
            met = None
            if gains:
                met = min(gains) >= 30 if scan else min(gains) >= -1 and sum(g >= 20 for g in gains) > 1
            out.append(Row(f"{what}, {told['trace']}", asked, shown or "no value", "exact", met))
    return out


def order(run: Run) -> list[Row]:
    name = run.named("cacheaware")
    what = "cacheaware: most overtakes of one request"
    wait = versus(
        run,
        "cacheaware: the longest wait",
        "<= 1.1 times tuned's",
        name,
        "queue_wait_ms_max",
        lambda v: v <= 10,
    )
    if name is None:
        return [absent(what, "<= its cap"), wait]
    knobs = run.arm(name).plan["knobs"].get("cacheaware", {})
    caps = [float(value) for knob, value in knobs.items() if "overtake" in knob]
    told = run.gauge(name, "cacheaware", "cacheaware_overtakes_max")
    seen = run.estimate(name, "overtakes_max", Scope())
    tuned = run.estimate("tuned", "overtakes_max", Scope()) if run.record.arms.get("tuned") else None
    mine, theirs = (None if one is None else one.value for one in (seen, tuned))
    shown = (
        f"by its own count {_or_none(told)}; in the records, of one priority, {_or_none(mine)} "
        f"(tuned {_or_none(theirs)})"
    )
    met = None if told is None or not caps else told <= caps[0]
    return [Row(what, f"<= its cap ({caps[0]:.0f})" if caps else "<= its cap", shown, "", met), wait]


def _or_none(value: float | None) -> str:
    return "not told" if value is None or math.isnan(value) else f"{value:.0f}"


def bounds(run: Run) -> list[Row]:
    """No target: what was left, arm by arm."""
    out = []
    for name, records in run.record.arms.items():
        bound = pooled([r.manifest["cache_bounds"] for r in records if "cache_bounds" in r.manifest])
        if bound is not None:
            whole = bound["all"]
            shown = ", ".join(f"{key.replace('_', ' ')} {whole[key]:.4f}" for key in whole)
            out.append(Row(f"{name}: hit rate and its bounds", "", shown))
    return out
