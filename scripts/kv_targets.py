"""What the KV patches were to show, and what a run shows: one row a target, from the run's own records.

    bench run --profile tight --arms scripts/kv.toml --phase all --seeds 5 --out results/kv-tight
    python scripts/kv_targets.py results/kv-tight --cache conversation.json synthetic.json --perf perf-20k.json

Arms are found by the patches they enable. An interval is a 95% block bootstrap of that one figure, paired against the
baseline and not corrected for how many there are (those of the report are). Milliseconds of a target are those of a
data-centre GPU; they are multiplied by the profile's SLO factor. `--cache` takes what `bench cache --json` wrote for a
trace (2,500, 5,000 and 10,000 blocks, policies lru and slru, scan mix 0 and 1), `--perf` what `bench perf --json` wrote.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness.atomic import write_json  # noqa: E402
from harness.cache_limits import pooled  # noqa: E402
from harness.errors import UserError, told  # noqa: E402
from harness.metrics.scope import Scope  # noqa: E402
from harness.metrics.switch import Return, returns  # noqa: E402
from harness.records import RunRecord, load_run, read_json  # noqa: E402
from harness.stats.bootstrap import Estimate  # noqa: E402
from harness.stats.compare import ALPHA, difference  # noqa: E402
from reports.evaluated import EvaluatedArm, evaluated  # noqa: E402

ABSENT = "not in this run"
PHASES = ((1,), (2,), (3,), (4,), (5,))
COMPLETIONS, CHAT = "gold-b", "gold-a"
SCOPES = (
    Scope(),
    *(Scope(phase) for phase in PHASES),
    Scope(tenant=COMPLETIONS),
    Scope(tenant=CHAT),
    Scope((2,), tenant=CHAT),
)
SWITCH_PHASE = 2
FAMILY = {"cacheaware", "slru", "shield", "warmup", "tiering", "cancel", "version"}


@dataclass(frozen=True)
class Row:
    """One target: what it is of, what was asked, what is, with which interval, and whether that suffices."""

    what: str
    asked: str
    found: str
    interval: str = ""
    met: bool | None = None


class Run:
    """A finished run, its arms evaluated when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.record: RunRecord = load_run(path)
        self._done: dict[str, EvaluatedArm] = {}

    @cached_property
    def slo_factor(self) -> float:
        """By which a profile's GPU is slower than the targets' one."""
        first = next(records[0] for records in self.record.arms.values() if records)
        return float(first.manifest["workload"]["slo_factor"])

    def named(self, *patches: str, name: str = "") -> str | None:
        """The finished arm with exactly these patches (and that name, where it has none); None without one."""
        for arm in self.record.plan["arms"]:
            right = set(arm["patches"]) == set(patches) and (not name or arm["name"] == name)
            if right and (patches or name) and self.record.arms.get(arm["name"]):
                return str(arm["name"])
        return None

    def arm(self, name: str) -> EvaluatedArm:
        """One arm's figures."""
        if name not in self._done:
            plan = next(arm for arm in self.record.plan["arms"] if arm["name"] == name)
            known = {phase["number"] for phase in self.phases}
            wanted = [s for s in SCOPES if set(s.phases or ()) <= known]
            self._done[name] = evaluated(name, plan, self.record.arms[name], scopes=wanted)
        return self._done[name]

    @property
    def phases(self) -> list[dict[str, Any]]:
        """The measured phases."""
        first = next(records[0] for records in self.record.arms.values() if records)
        return [phase for phase in first.manifest["workload"]["phases"] if phase["measured"]]

    def estimate(self, name: str, metric: str, scope: Scope) -> Estimate | None:
        """A figure; None where it has no value."""
        found = self.arm(name).estimates.get(scope, {}).get(metric)
        return None if found is None or found.value is None else found

    def gauge(self, name: str, patch: str, gauge: str) -> float | None:
        """What a patch counted, averaged over the seeds; None where it did not."""
        told = [r.receipt["metrics"].get(patch, {}).get(gauge) for r in self.arm(name).records]
        values = [float(value) for value in told if value is not None]
        return sum(values) / len(values) if values else None

    def change(self, name: str, metric: str, scope: Scope, base: str) -> tuple[float | None, str]:
        """Against another arm on the same seeds, in percent, and its interval."""
        now, then = self.estimate(name, metric, scope), self.estimate(base, metric, scope)
        if now is None or then is None or not then.value:
            return None, ""
        windows = [p for p in PHASES if scope.phases in (None, p)]
        seeds = len(self.arm(name).records)
        d = difference(now, then, seeds=seeds, blocks_a_phase=max(1, now.blocks // (len(windows) * seeds)))
        assert now.value is not None and then.value is not None
        if not d.testable:
            return 100 * (now.value / then.value - 1), d.reason
        low, high = (d.percent(edge) for edge in d.at(ALPHA))
        shown = "" if low is None or high is None else f"[{low:+.1f}, {high:+.1f}]%"
        return 100 * (now.value / then.value - 1), shown


def rows(run: Run, cache: Sequence[Path] = (), perf: Sequence[Path] = ()) -> list[Row]:
    """All targets of the issue, in its order."""
    out = [
        *_hit_rate(run),
        *_traces(cache),
        *_preemption(run),
        *_switch(run),
        *_completions(run),
        *_cold(run),
        *_tiers(run),
        *_order(run),
        *_cost(perf),
    ]
    return [*out, *_all(run), *_bounds(run)]


def _absent(what: str, asked: str) -> Row:
    return Row(what, asked, ABSENT)


def _versus(
    run: Run,
    what: str,
    asked: str,
    name: str | None,
    metric: str,
    good: Callable[[float], bool],
    *,
    scope: Scope | None = None,
    base: str | None = "tuned",
) -> Row:
    """A target on a change against another arm."""
    if name is None or base is None or base not in run.record.arms or not run.record.arms[base]:
        return _absent(what, asked)
    place = scope or Scope()
    change, interval = run.change(name, metric, place, base)
    now, then = run.estimate(name, metric, place), run.estimate(base, metric, place)
    if change is None:
        zero = then is not None and then.value == 0
        return Row(what, asked, f"{base}'s is 0" if zero else "no value")
    assert now is not None and then is not None
    return Row(what, asked, f"{change:+.1f}% ({then.value:.4g} -> {now.value:.4g})", interval, good(change))


def _below(
    run: Run,
    what: str,
    asked: str,
    name: str | None,
    metric: str,
    good: Callable[[float], bool],
    *,
    scope: Scope | None = None,
    unit: str = " ms",
) -> Row:
    """A target on a value."""
    if name is None:
        return _absent(what, asked)
    found = run.estimate(name, metric, scope or Scope())
    if found is None or found.value is None:
        return Row(what, asked, "no value")
    interval = "" if found.ci95 is None else f"[{found.ci95[0]:.4g}, {found.ci95[1]:.4g}]"
    few = " (few samples)" if found.few_samples else ""
    return Row(what, asked, f"{found.value:.4g}{unit}{few}", interval, good(found.value))


def _hit_rate(run: Run) -> list[Row]:
    name = run.named("slru", "cacheaware", "shield")
    what, asked = "slru,cacheaware,shield: hit rate", "+25% or >= 80% of its clairvoyant bound"
    row = _versus(run, what, asked, name, "prefix_hit_rate", lambda v: v >= 25)
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


def _traces(paths: Sequence[Path]) -> list[Row]:
    what = "slru: hit rate on a trace against LRU"
    if not paths:
        return [
            _absent(what, ">= -1% everywhere, +20% at two sizes, +30% with the scan (bench cache --json)")
        ]
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


def _preemption(run: Run) -> list[Row]:
    shield, tiered = run.named("shield"), run.named("shield", "tiering")
    alone = run.named("tiering")
    metric, limit = "recomputed_tokens", 50 * run.slo_factor
    out = [
        _versus(
            run, "shield: tokens recomputed after preemption", "-60%", shield, metric, lambda v: v <= -60
        ),
        _versus(run, "shield+tiering: the same", "-90%", tiered, metric, lambda v: v <= -90),
        _versus(run, "tiering: the same", "-90%", alone, metric, lambda v: v <= -90),
    ]
    for label, name in (("shield+tiering", tiered), ("tiering", alone)):
        what = f"{label}: recovery beyond queueing, p99"
        row = _below(run, what, f"< {limit:.0f} ms", name, "preempt_restore_ms_p99", lambda v: v < limit)
        told = None if name is None else run.gauge(name, "tiering", "recovery_ms_p99")
        if told is not None:
            # Counted from when it got its blocks, loads included, so it is never less.
            row = Row(
                what,
                row.asked,
                f"{told:.1f} ms with its load, {row.found} without",
                row.interval,
                told < limit,
            )
        out.append(row)
    return out


def _switch(run: Run) -> list[Row]:
    name = run.named("version")
    what = f"version: {CHAT}'s hit rate back to 95% after a switch"
    limit = 500 * run.slo_factor
    out = []
    if name is None or not {1, SWITCH_PHASE} <= {p["number"] for p in run.phases}:
        out.append(_absent(what, "< 5 s"))
    else:
        found, then = (_returns(run, arm) for arm in (name, "tuned"))
        worst = max(found, key=lambda one: one.back_s)
        shown = f"{_times(found)} (tuned {_times(then)}); before: {worst.before:.3f}"
        out.append(Row(what, "< 5 s", shown, "seeds pooled", worst.back and worst.back_s < 5))
    for who, scope in ((f"{CHAT} ", Scope((2,), tenant=CHAT)), ("", Scope((2,)))):
        what = f"version: {who}TTFT p99, phase 2"
        row = _below(run, what, f"< {limit:.0f} ms", name, "ttft_ms_p99", lambda v: v < limit, scope=scope)
        if name is not None and run.record.arms.get("tuned"):
            base = run.estimate("tuned", "ttft_ms_p99", scope)
            if base is not None:
                row = Row(row.what, row.asked, f"{row.found} (tuned {base.value:.4g})", row.interval, row.met)
        out.append(row)
    return out


def _returns(run: Run, name: str) -> list[Return]:
    phases = {phase["number"]: phase for phase in run.phases}
    one, two = (phases[number] for number in (SWITCH_PHASE - 1, SWITCH_PHASE))
    start, end = two["start_ns"] / 1e9, two["end_ns"] / 1e9
    # A tenth of the conversations switch at the phase's start, all of them in its middle.
    switches = [start, (start + end) / 2]
    frames = [record.requests for record in run.record.arms.get(name, ())]
    return returns(frames, CHAT, one["start_ns"] / 1e9, switches, end) if frames else []


def _times(found: Sequence[Return]) -> str:
    return ", ".join(f"{one.back_s:.2f} s" if one.back else "never" for one in found) or "no value"


def _completions(run: Run) -> list[Row]:
    name, scope, limit = run.named("cancel"), Scope(tenant=COMPLETIONS), 50 * run.slo_factor
    out = [
        _below(
            run,
            f"cancel: {COMPLETIONS}'s hit rate",
            "> 0.85",
            name,
            "prefix_hit_rate",
            lambda v: v > 0.85,
            scope=scope,
            unit="",
        ),
        _below(
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


def _cold(run: Run) -> list[Row]:
    name, what = run.named("warmup"), "warmup: TTFT of the first 10 s"
    metric = "cold_ttft_ms_p99"
    if name is not None:
        found = run.estimate(name, metric, Scope())
        if found is not None and found.few_samples:
            metric = "cold_ttft_ms_p90"
    out = [_versus(run, f"{what}, {metric[-3:]}", "-40%", name, metric, lambda v: v <= -40)]
    beside = None if name is None else run.gauge(name, "warmup", "own_traffic_steps")
    asked = "no real request delayed"
    if beside is None:
        return [*out, _absent("warmup: passes with traffic that held a prompt of its own", asked)]
    longest = run.gauge(name or "", "warmup", "own_longest_chunk_tokens") or 0
    shown = f"{beside:.1f} a seed; at most {longest:.0f} tokens in one of them"
    return [
        *out,
        Row("warmup: passes with traffic that held a prompt of its own", asked, shown, "", beside == 0),
    ]


def _tiers(run: Run) -> list[Row]:
    name, base = run.named("tiering"), run.named(name="tuned-offload")
    what = "tiering against tuned-offload"
    return [
        _versus(run, f"{what}: bytes moved", "lower", name, "tier_bytes_moved", lambda v: v < 0, base=base),
        _versus(run, f"{what}: hit rate", "no lower", name, "prefix_hit_rate", lambda v: v >= 0, base=base),
    ]


def _order(run: Run) -> list[Row]:
    name = run.named("cacheaware")
    what = "cacheaware: most overtakes of one request"
    wait = _versus(
        run,
        "cacheaware: the longest wait",
        "<= 1.1 times tuned's",
        name,
        "queue_wait_ms_max",
        lambda v: v <= 10,
    )
    if name is None:
        return [_absent(what, "<= its cap"), wait]
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


def _cost(paths: Sequence[Path]) -> list[Row]:
    what, asked = "all KV patches: schedule + update against stock", "<= 1.25 times"
    if not paths:
        return [_absent(what, f"{asked} (bench perf --blocks N --json)")]
    out = []
    for path in paths:
        told = read_json(path)
        where = f"{told['running']} running, {told['waiting']:,} waiting"
        if told.get("blocks"):
            where += f", {told['blocks']:,} blocks"
        ratio = float(told["ratio"])
        out.append(Row(f"{what}, {where}", asked, f"{ratio:.3f} times", "", ratio <= 1.25))
    return out


def _all(run: Run) -> list[Row]:
    """No targets of the issue: what the patches do together."""
    arms = [
        arm
        for arm in run.record.plan["arms"]
        if set(arm["patches"]) >= FAMILY and run.record.arms.get(arm["name"])
    ]
    if not arms:
        return [_absent("all of them: the same figures", "")]
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
        row = _versus(run, f"{name}: {metric}, {scope}", "", name, metric, bool, scope=scope)
        out.append(replace(row, met=None))
    return out


def _bounds(run: Run) -> list[Row]:
    """No target: what was left, arm by arm."""
    out = []
    for name, records in run.record.arms.items():
        bound = pooled([r.manifest["cache_bounds"] for r in records if "cache_bounds" in r.manifest])
        if bound is not None:
            whole = bound["all"]
            shown = ", ".join(f"{key.replace('_', ' ')} {whole[key]:.4f}" for key in whole)
            out.append(Row(f"{name}: hit rate and its bounds", "", shown))
    return out


def main() -> None:
    """Print the targets of one run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a run with arms of scripts/kv.toml")
    parser.add_argument("--cache", type=Path, nargs="*", default=[], help="files of bench cache --json")
    parser.add_argument("--perf", type=Path, nargs="*", default=[], help="files of bench perf --json")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    with told("kv_targets"):
        if not (args.run / "plan.json").is_file():
            raise UserError(f"{args.run} is no run's folder: `bench run` makes one")
        run = Run(args.run)
        if not any(run.record.arms.values()):
            raise UserError(f"{args.run} holds no finished arm yet: run the same `bench run` command again")
        found = rows(run, args.cache, args.perf)
    table = Table(title=f"{args.run.name}: targets against tuned, SLO factor {run.slo_factor:g}")
    for column in ("what", "asked", "found", "95% interval", ""):
        table.add_column(column, overflow="fold")
    for row in found:
        word = "" if row.met is None else "met" if row.met else "NOT met"
        table.add_row(row.what, row.asked, row.found, row.interval, word)
    Console(width=160).print(table)
    judged = [row for row in found if row.met is not None]
    print(f"{sum(bool(row.met) for row in judged)} of {len(judged)} met")
    if args.json:
        with told("kv_targets"):
            write_json(args.json, [vars(row) for row in found])


if __name__ == "__main__":
    main()
