"""summary.md, the terminal's table and the wording that all outputs share."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from reports import html, markdown, robustness, tables, terminal
from reports.view import RunView
from reports.wording import change, metric_label, quantity, scope_label
from tests.reports.hostile import ARM, arm_of

Alter = Callable[[Callable[[dict[str, Any]], None]], RunView]


def printed(view: RunView, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    terminal.show(view, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_fits_80_columns_and_cuts_nothing_off(view: RunView) -> None:
    said = printed(view)
    assert max(map(len, said.splitlines())) <= 80
    assert "…" not in said
    for baseline in ("tuned", "stock"):
        found = tables.counts(view, ARM, baseline)
        counts = ", ".join(f"{s} {found[v]} {v}" for s, v in zip("▲▼=?", found, strict=True))
        assert f"with {baseline}: {counts}" in said
    assert "phase 1" in said


def test_the_summary_alone_is_enough_for_the_table(view: RunView) -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    terminal.print_summary(view.summary, console)
    assert isinstance(console.file, io.StringIO)
    assert "short TTFT p99" in console.file.getvalue()


def test_a_run_of_baselines_alone_prints_their_values(altered: Alter) -> None:
    def baselines(summary: dict[str, Any]) -> None:
        summary["arms"] = [a for a in summary["arms"] if a["name"] != ARM]
        summary["comparisons"] = []

    only = altered(baselines)
    assert "short_ttft_ms_p99" in printed(only)
    assert "nothing to judge" in markdown.render(only)


def test_markdown_has_whole_tables_and_no_markup_of_names(view: RunView) -> None:
    text = markdown.render(view)
    assert markdown.render(view) == text
    assert "<img" not in text and "<script" not in text
    widths: list[int] = []
    for line in text.splitlines():
        if line.startswith("|"):
            widths.append(len(re.findall(r"(?<!\\)\|", line)))
            assert widths[-1] == widths[-2] if len(widths) > 1 else True
        else:
            widths = []
    assert "must not get worse" in text


def test_markdown_says_losses_invalidity_and_silence(altered: Alter) -> None:
    def bad(summary: dict[str, Any]) -> None:
        arm = arm_of(summary)
        arm["valid"] = summary["valid"] = False
        arm["hooks"]["mlfq"]["hits"] = 0
        for c in summary["comparisons"]:
            c.update(verdict="worse", delta_pct=50.0, ci95=[40.0, 60.0])

    text = markdown.render(altered(bad))
    assert "**This run is INVALID.**" in text
    assert f"`{ARM}`: patch `mlfq` never fired" in text
    assert "~~+50.0%~~" in text
    assert re.search(r"### Losses \(\d+\)", text)
    assert "### Wins\n\nNone." in text


def test_a_change_from_nothing_has_no_percentage(altered: Alter) -> None:
    def from_nothing(summary: dict[str, Any]) -> None:
        for name in ("stock", "tuned"):
            arm_of(summary, name)["by_phase"]["3-5"]["slo_attainment"]["value"] = 0.0
        for c in summary["comparisons"]:
            if c["metric"] == "slo_attainment":
                c.update(
                    delta_pct=None, ci95=None, delta=0.015, reason="the baseline's value is 0: no percentage"
                )

    changed = altered(from_nothing)
    assert "? from 0" in printed(changed) or "▲ from 0" in printed(changed)
    assert "no percentage" in html.render(changed)


def test_no_loss_in_phase_1_is_left_out(view: RunView, altered: Alter) -> None:
    def lost(summary: dict[str, Any]) -> None:
        for c in summary["comparisons"]:
            here = c["scope"].endswith("phase:1") and (c["metric"], c["baseline"]) in (
                ("ttft_ms_p99", "tuned"),
                ("ttft_ms_p90", "stock"),
            )
            c.update(verdict="worse" if here else "better", delta_pct=12.0, ci95=[5.0, 20.0])

    wanted = [("ttft_ms_p99", "phase:1"), ("ttft_ms_p90", "tier:bronze/phase:1")]
    assert set(wanted) <= set(tables.GUARD)
    changed = altered(lost)
    arm = changed.arm(ARM)
    assert arm is not None
    for both in tables.guard_shown(changed, arm, ("tuned", "stock")):
        assert [row.metric for row in both] == ["short_ttft_ms_p99", "ttft_ms_p99", "ttft_ms_p90"]
    said = printed(changed).splitlines()
    below = said[next(i for i, line in enumerate(said) if line.strip() == "phase 1") :]
    assert [line.split("  ")[1].strip() for line in below[1:4]] == [
        "short TTFT p99",
        "TTFT p99",
        "TTFT p90, bronze",
    ]
    assert "▼" in below[2] and "▼" in below[3]
    assert max(map(len, said)) <= 80
    text = markdown.render(changed)
    assert "| TTFT p99 (must not get worse) | phase 1 |" in text
    assert "| TTFT p90 (must not get worse) | bronze tier, phase 1 |" in text


def test_extrapolated_steps_are_told(view: RunView) -> None:
    manifest = {"extrapolated": {"any": 0.031, "context": 0.031, "chunk": 0.0}}
    told = RunView(view.path, view.summary, view.plan, {**view.manifests, (ARM, 1): manifest}, {})
    before, after = view.arm(ARM), told.arm(ARM)
    assert before is not None and after is not None
    assert robustness.extrapolated(view, before) == ""
    assert "3.1% of the steps" in robustness.extrapolated(told, after)
    assert "context 3.1%" in markdown.render(told)
    assert "3.1% of the steps" in html.render(told)


@pytest.mark.parametrize(
    ("metric", "value", "unit", "text"),
    [
        ("ttft_ms_p99", 57_554.0, "ms", "57.6 s"),
        ("ttft_ms_p99", 485.2, "ms", "485 ms"),
        ("tpot_ms_p50", 14.63, "ms", "14.6 ms"),
        ("slo_attainment", 0.8234, "ratio", "82.3%"),
        ("jain_index", 0.8234, "ratio", "0.823"),
        ("preemptions", 1234.0, "count", "1,234"),
        ("goodput_rps", 0.0, "req/s", "0 req/s"),
        ("ttft_ms_p99", None, "ms", "–"),
    ],
)
def test_quantities(metric: str, value: float | None, unit: str, text: str) -> None:
    assert quantity(metric, value, unit) == text


def test_changes_and_names() -> None:
    assert [change(x) for x in (-41.04, 0.0, 250.0, 2500.0, None)] == ["−41.0%", "+0.0%", "+250%", "×26", "–"]
    assert metric_label("short_ttft_ms_p99") == "short TTFT p99"
    assert scope_label("tenant:silver-0/phase:3-5") == "silver-0, phases 3–5"
    assert scope_label("all") == "whole run"
