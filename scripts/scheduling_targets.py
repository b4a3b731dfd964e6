"""What the scheduling patches were to show, and what a run shows: one row a target, from the run's own summary.

    bench run --profile rich --arms scripts/scheduling.toml --phase all --seeds 5 --out results/scheduling-rich
    python scripts/scheduling_targets.py results/scheduling-rich
    python scripts/scheduling_targets.py results/scheduling-ends --arms

With `--arms` it prints an arm a row instead, for any run: the figures of which one is had at the cost of another.
Milliseconds of a target are those of a data-centre GPU; they are multiplied by the profile's SLO factor.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness.errors import UserError, told  # noqa: E402

TIERS = ("gold", "silver", "bronze")
# Jitter, preemptions and the like: the phases that load the machine.
BUSY = ("4", "5")


@dataclass(frozen=True)
class Figures:
    """A run's summary, by arm and place."""

    summary: dict[str, Any]
    slo_factor: float

    def arm(self, name: str) -> dict[str, Any]:
        """One arm's part; UserError where the run has none of that name."""
        for arm in self.summary["arms"]:
            if arm["name"] == name:
                found: dict[str, Any] = arm
                return found
        raise UserError(f"the run has no arm {name}; run scripts/scheduling.toml")

    def value(self, name: str, metric: str, phase: str = "", tier: str = "") -> float | None:
        """A figure; None where it has no value."""
        arm = self.arm(name)
        if tier:
            table = arm["by_scope"][f"tier:{tier}" + (f"/phase:{phase}" if phase else "")]
        else:
            table = arm["by_phase"][phase] if phase else arm["metrics"]
        value = table[metric]
        return value["value"] if isinstance(value, dict) else value

    def change(self, name: str, metric: str, phase: str, base: str = "tuned") -> float | None:
        """Against another arm, in percent."""
        now, then = self.value(name, metric, phase), self.value(base, metric, phase)
        return None if now is None or not then else 100 * (now / then - 1)

    def interval(self, name: str, metric: str, scope: str) -> str:
        """The corrected interval against tuned, where the report compares it."""
        for row in self.summary["comparisons"]:
            if (row["arm"], row["baseline"], row["metric"], row["scope"]) == (name, "tuned", metric, scope):
                if row["ci95"] is None:
                    return row["verdict"]
                return f"[{row['ci95'][0]:+.1f}, {row['ci95'][1]:+.1f}] {row['verdict']}"
        return ""


@dataclass(frozen=True)
class Row:
    """One target: what it is of, what was asked, what is, and whether that suffices (None: not to be said)."""

    what: str
    asked: str
    found: str
    met: bool | None


def rows(f: Figures) -> list[Row]:
    """All targets, in the order of LANDING_PLAN.md."""
    return [*_tails(f), *_fairness(f), *_budget(f), *_together(f), *_overload(f), *_nobody_worse(f)]


def _row(what: str, asked: str, value: float | None, show: str, good: Callable[[float], bool]) -> Row:
    if value is None:
        return Row(what, asked, "no value", None)
    return Row(what, asked, show.format(value), good(value))


def _at_most(limit: float) -> Callable[[float], bool]:
    return lambda value: value <= limit


def _at_least(limit: float) -> Callable[[float], bool]:
    return lambda value: value >= limit


def _tails(f: Figures) -> list[Row]:
    ttft, jitter = "short_ttft_ms_p99", "short_tpot_jitter_ms"
    arm, pair = "qos+mlfq+wfq", "ratelimit+prefillbudget"
    preempted = {name: _sum(f, name, "preemptions") for name in ("stock", "tuned", "watermark")}
    return [
        _row(
            f"{arm}: short TTFT p99, 3-5",
            "-40%",
            f.change(arm, ttft, "3-5"),
            "{:+.1f}% " + f.interval(arm, ttft, "phase:3-5"),
            lambda v: v <= -40,
        ),
        _row(
            f"{arm}: output tok/s, 3-5",
            "within 3%",
            f.change(arm, "output_tok_per_s", "3-5"),
            "{:+.1f}% " + f.interval(arm, "output_tok_per_s", "phase:3-5"),
            lambda v: abs(v) <= 3,
        ),
        _row(
            f"{pair}: short TPOT jitter, 4",
            "-40%",
            f.change(pair, jitter, "4"),
            "{:+.1f}%",
            lambda v: v <= -40,
        ),
        _row(
            f"{pair}: bronze E2E p99, 4",
            "+20% at most",
            _tier_change(f, pair, "e2e_ms_p99", "4", "bronze"),
            "{:+.1f}%",
            lambda v: v <= 20,
        ),
        Row(
            "watermark: preemptions, 4-5 (stock, tuned, watermark)",
            "-50% against stock, no more than tuned",
            f"{preempted['stock']:.0f}, {preempted['tuned']:.0f}, {preempted['watermark']:.0f}",
            preempted["watermark"] <= min(preempted["stock"] / 2, preempted["tuned"]),
        ),
        *(
            _row(
                f"watermark: TTFT p99, {phase}",
                "no worse than tuned",
                f.change("watermark", "ttft_ms_p99", phase),
                "{:+.1f}%",
                lambda v: v <= 2,
            )
            for phase in BUSY
        ),
    ]


def _fairness(f: Figures) -> list[Row]:
    arm = "wfq+tenant"
    out = []
    for phase in ("3", "5"):
        stock = f.value("stock", "jain_index", phase)
        beside = "no value" if stock is None else f"{stock:.3f}"
        out.append(
            _row(
                f"{arm}: Jain, {phase} (stock: {beside})",
                "> 0.95",
                f.value(arm, "jain_index", phase),
                "{:.3f}",
                lambda v: v > 0.95,
            )
        )
    limit = 500 * f.slo_factor
    out.append(
        _row(
            f"{arm}: silver TTFT p99, 3",
            f"< {limit:.0f} ms",
            f.value(arm, "ttft_ms_p99", "3", "silver"),
            "{:.0f} ms",
            lambda v: v < limit,
        )
    )
    return out


def _budget(f: Figures) -> list[Row]:
    arm, limit = "prefillbudget", 200 * f.slo_factor
    mine, tuned = (f.value(name, "slo_attainment", "4", "bronze") for name in (arm, "tuned"))
    return [
        _row(
            f"{arm}: short TTFT p99, 4",
            f"< {limit:.0f} ms",
            f.value(arm, "short_ttft_ms_p99", "4"),
            "{:.0f} ms",
            lambda v: v < limit,
        ),
        Row(
            f"{arm}: bronze attainment, 4 (tuned {tuned or 0:.3f})",
            "2 times tuned's",
            f"{mine or 0:.3f}",
            (mine or 0) >= 2 * (tuned or 0),
        ),
    ]


def _together(f: Figures) -> list[Row]:
    """Beyond both naive combinations of the trial: A's latency, more bronze than B, no more rejected than either."""
    out = []
    for phase, limit, gold, silver, bronze, refused in (
        ("4", 79.0, 0.98, 0.98, 0.60, 12.0),
        ("5", 91.0, 0.98, 0.98, 0.32, 17.0),
    ):
        ms = limit * f.slo_factor
        out.append(
            _row(
                f"all: short TTFT p99, {phase}",
                f"{ms:.0f} ms",
                f.value("all", "short_ttft_ms_p99", phase),
                "{:.0f} ms",
                _at_most(ms),
            )
        )
        for tier, least in (("gold", gold), ("silver", silver), ("bronze", bronze)):
            out.append(
                _row(
                    f"all: attainment {tier}, {phase} (tuned {f.value('tuned', 'slo_attainment', phase, tier) or 0:.3f})",
                    f">= {least}",
                    f.value("all", "slo_attainment", phase, tier),
                    "{:.3f}",
                    _at_least(least),
                )
            )
        share = _refused(f, "all", phase)
        out.append(
            _row(
                f"all: rejected or expired, {phase}",
                f"<= {refused:.0f}%",
                share,
                "{:.1f}%",
                _at_most(refused),
            )
        )
    return out


def _overload(f: Figures) -> list[Row]:
    arm, limit = "overload+admission+edf", 800 * f.slo_factor
    return [
        _row(
            f"{arm}: accepted TTFT p99, 5",
            f"< {limit:.0f} ms",
            f.value(arm, "ttft_ms_p99", "5"),
            "{:.0f} ms",
            lambda v: v < limit,
        ),
        _row(f"{arm}: rejected or expired, 5", "<= 40%", _refused(f, arm, "5"), "{:.1f}%", lambda v: v <= 40),
        _row(
            f"{arm}: goodput, 5",
            "1.3 times tuned",
            _ratio(f, arm, "goodput_rps", "5"),
            "{:.2f} times",
            lambda v: v >= 1.3,
        ),
    ]


def _nobody_worse(f: Figures) -> list[Row]:
    out = []
    for phase in ("1", "2", "3", "4", "5"):
        found = {
            tier: (
                f.value("tuned", "slo_attainment", phase, tier),
                f.value("all", "slo_attainment", phase, tier),
            )
            for tier in TIERS
        }
        points = {tier: 100 * ((now or 0) - (then or 0)) for tier, (then, now) in found.items()}
        shown = ", ".join(f"{tier} {value:+.1f}" for tier, value in points.items())
        out.append(
            Row(
                f"all: attainment against tuned, {phase}, points",
                "none below -2",
                shown,
                min(points.values()) >= -2,
            )
        )
    return out


def _refused(f: Figures, name: str, phase: str) -> float | None:
    offered = f.value(name, "offered", phase)
    if not offered:
        return None
    return 100 * sum(f.value(name, how, phase) or 0 for how in ("rejected", "expired")) / offered


def _sum(f: Figures, name: str, metric: str) -> float:
    return sum(f.value(name, metric, phase) or 0 for phase in BUSY)


def _ratio(f: Figures, name: str, metric: str, phase: str) -> float | None:
    now, then = f.value(name, metric, phase), f.value("tuned", metric, phase)
    return None if now is None or not then else now / then


def _tier_change(f: Figures, name: str, metric: str, phase: str, tier: str) -> float | None:
    now, then = f.value(name, metric, phase, tier), f.value("tuned", metric, phase, tier)
    return None if now is None or not then else 100 * (now / then - 1)


def arms_table(f: Figures, title: str) -> Table:
    """An arm a row: tails, promises kept, preemptions and fairness, of which one is had at the cost of another."""
    table = Table(title=title)
    for column in (
        "arm",
        "short TTFT p99 4, 5 ms",
        "TTFT p99 4, 5 s",
        "in time 4: g s b",
        "in time 5: g s b",
        "bronze E2E p99 4 s",
        "preempted 4-5",
        "refused 5 %",
        "Jain 3, 5",
    ):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm in f.summary["arms"]:
        name = arm["name"]
        met = [
            " ".join(_show(f.value(name, "slo_attainment", phase, tier), "{:.2f}") for tier in TIERS)
            for phase in BUSY
        ]
        table.add_row(
            name,
            ", ".join(_show(f.value(name, "short_ttft_ms_p99", phase), "{:.0f}") for phase in BUSY),
            ", ".join(_show(f.value(name, "ttft_ms_p99", phase), "{:.1f}", 1e-3) for phase in BUSY),
            *met,
            _show(f.value(name, "e2e_ms_p99", "4", "bronze"), "{:.1f}", 1e-3),
            f"{_sum(f, name, 'preemptions'):.0f}",
            _show(_refused(f, name, "5"), "{:.1f}"),
            ", ".join(_show(f.value(name, "jain_index", phase), "{:.2f}") for phase in ("3", "5")),
        )
    return table


def _show(value: float | None, how: str, factor: float = 1.0) -> str:
    return "-" if value is None else how.format(value * factor)


def read(run: Path) -> Figures:
    """A finished run; UserError where there is no summary."""
    try:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        manifest = json.loads(next(run.glob("tuned/seed-*/manifest.json")).read_text(encoding="utf-8"))
    except (OSError, ValueError, StopIteration):
        raise UserError(f"{run}: no summary of a finished run; type `bench report {run}` first") from None
    return Figures(summary, float(manifest["workload"]["slo_factor"]))


def main() -> None:
    """Print the targets of one run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a run with the arms of scripts/scheduling.toml")
    parser.add_argument("--arms", action="store_true", help="print an arm a row, whatever arms there are")
    args = parser.parse_args()
    with told("scheduling_targets"):
        figures = read(args.run)
        if args.arms:
            Console(width=150).print(arms_table(figures, args.run.name))
            return
        found = rows(figures)
    table = Table(title=f"{args.run.name}: targets against tuned")
    for column in ("what", "asked", "found", ""):
        table.add_column(column, overflow="fold")
    for row in found:
        table.add_row(
            row.what, row.asked, row.found, "" if row.met is None else "met" if row.met else "NOT met"
        )
    Console(width=140).print(table)
    print(f"{sum(bool(row.met) for row in found)} of {len(found)} met")


if __name__ == "__main__":
    main()
