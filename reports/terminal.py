"""The table that `bench report` prints: verdicts first, within 80 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reports import facts, robustness, tables
from reports.view import BASELINES, Arm, RunView, view_of_summary
from reports.wording import FEW_SAMPLES, SYMBOLS, VERDICTS, Value

STYLES = {"better": "bold blue", "worse": "bold dark_orange3", "same": "", "undetermined": "dim"}


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    """Print the verdicts of a summary as `build_summary` makes it."""
    show(view_of_summary(summary), console)


def show(view: RunView, console: Console) -> None:
    """Print the verdicts of one run."""
    console.print(Text(facts.title(view), style="bold"))
    if not view.summary.get("valid", True):
        console.print(Text("INVALID: struck-through numbers may not be believed", style="bold dark_orange3"))
    for arm in view.candidates:
        console.print()
        console.print(Text(arm.name, style="bold"))
        console.print(arm_table(view, arm))
        for baseline in BASELINES:
            if view.arm(baseline):
                console.print(_counts(view, arm, baseline))
        for line in _ground(view, arm):
            console.print(Text(line))
    if not view.candidates:
        console.print(_baselines(view))
    for line in _remarks(view):
        console.print(Text(line))


def arm_table(view: RunView, arm: Arm) -> Table:
    """Headlines of one arm beside both baselines, a line each; the symbols are those of `_counts`."""
    present = [b for b in BASELINES if view.arm(b)]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), collapse_padding=True, pad_edge=False)
    table.add_column("metric", overflow="fold")
    for b in reversed(present):
        table.add_column(b, justify="right", overflow="fold")
    table.add_column("arm", justify="right", overflow="fold")
    for b in present:
        table.add_column(f"vs {b}", justify="right", overflow="fold")
    guards = tables.guard_shown(view, arm, present)
    by_baseline = [
        [*tables.rows(view, arm, b, tables.HEADLINES), *guard]
        for b, guard in zip(present, guards, strict=True)
    ]
    place = ""
    for same_row in zip(*by_baseline, strict=True):
        first = same_row[0]
        where = first.scope.rpartition(", ")[2] if "phase" in first.scope else first.scope
        who = first.scope.removesuffix(where).removesuffix(", ")
        if where != place:
            place = where
            table.add_row(Text(place, style="dim italic"))
        label = f"{first.label.removeprefix('SLO ')}, {who.removesuffix(' tier')}" if who else first.label
        cells = [Text(f"  {label}")]
        cells += [_value(row.base, row.struck) for row in reversed(same_row)]
        cells.append(_value(first.value, not arm.valid))
        cells += [_verdict(row) for row in same_row]
        table.add_row(*cells)
    return table


def _value(value: Value, struck: bool) -> Text:
    return Text(value.text, style="strike dim" if struck and value.value is not None else "")


def _verdict(row: tables.Row) -> Text:
    if row.comparison is None:
        return Text("–", style="dim")
    style = STYLES[row.verdict]
    text = Text(f"{SYMBOLS[row.verdict]} ", style=style)
    return text.append(row.change, style=f"{style} strike" if row.struck else style)


def _counts(view: RunView, arm: Arm, baseline: str) -> Text:
    found = tables.counts(view, arm.name, baseline)
    line = Text(f"with {baseline}: ")
    for i, verdict in enumerate(VERDICTS):
        line.append(", " if i else "").append(
            f"{SYMBOLS[verdict]} {found[verdict]} {verdict}", style=STYLES[verdict]
        )
    return line


def _ground(view: RunView, arm: Arm) -> list[str]:
    """Whether the verdicts were recomputed, and which of those in the table another assumption took back."""
    baseline = robustness.baseline_of(view) or next((b for b in BASELINES if view.arm(b)), "")
    return [robustness.status(view, arm, baseline), *robustness.flips(view, arm)] if baseline else []


def _baselines(view: RunView) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("metric")
    for arm in view.arms:
        table.add_column(arm.name, justify="right")
    for metric in dict.fromkeys(m for m, _ in tables.HEADLINES):
        values = [arm.value(metric) for arm in view.arms]
        if any(v.value is not None for v in values):
            table.add_row(
                values[0].metric, *(_value(v, not a.valid) for v, a in zip(values, view.arms, strict=True))
            )
    return table


def _remarks(view: RunView) -> list[str]:
    said = [f"{a.name}: {r}" for a in view.arms for r in a.reasons]
    said += [f"{a.name}: patch {p} never fired" for a in view.arms for p in a.never_fired]
    said += [f"{a.name}: {r}" for a in view.arms for r in robustness.remarks(view, a)]
    said += facts.run_reasons(view)
    values = [v for a in view.candidates for m, s in tables.HEADLINES for v in [a.value(m, s)]]
    if any(v.few for v in values):
        said.append(f"{FEW_SAMPLES} a p99 from too few samples; the report shows the p90 beside it")
    return said + robustness.profile_lines(view)
