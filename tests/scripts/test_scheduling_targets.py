"""Guards `scripts/scheduling_targets.py`: each target is judged by the right figure, and arms stand beside each other.

On a summary made by hand. Not here: the figures themselves (tests/metrics).
"""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from scripts.scheduling_targets import Figures, arms_table, rows

ARMS = (
    "stock",
    "tuned",
    "qos+mlfq+wfq",
    "ratelimit+prefillbudget",
    "watermark",
    "wfq+tenant",
    "prefillbudget",
    "overload+admission+edf",
    "all",
)
PHASES = ("1", "2", "3", "4", "5")
METRICS: dict[str, float] = {
    "short_ttft_ms_p99": 100.0,
    "ttft_ms_p99": 1000.0,
    "e2e_ms_p99": 20_000.0,
    "short_tpot_jitter_ms": 5.0,
    "output_tok_per_s": 1000.0,
    "preemptions": 10.0,
    "jain_index": 0.9,
    "slo_attainment": 0.5,
    "offered": 200.0,
    "rejected": 0.0,
    "expired": 0.0,
    "goodput_rps": 4.0,
}


def figures(**changes: float) -> Figures:
    """All arms alike, but for what is said as `arm__metric__phase`; a + in an arm's name is written as _."""
    arms: list[dict[str, Any]] = []
    for name in ARMS:
        by_phase = {phase: dict(METRICS) for phase in (*PHASES, "3-5")}
        by_scope = {
            f"tier:{tier}/phase:{phase}": dict(METRICS)
            for tier in ("gold", "silver", "bronze")
            for phase in PHASES
        }
        for key, value in changes.items():
            arm, metric, phase = key.split("__")
            if arm != name.replace("+", "_"):
                continue
            tables = [by_phase[phase]] if phase in by_phase else []
            tables += [by_scope[scope] for scope in by_scope if scope.endswith(f":{phase}")]
            for table in tables:
                table[metric] = value
        arms.append({"name": name, "by_phase": by_phase, "by_scope": by_scope, "metrics": dict(METRICS)})
    return Figures({"arms": arms, "comparisons": []}, 2.0)


def met(f: Figures) -> dict[str, bool | None]:
    """Whether each target is."""
    return {row.what: row.met for row in rows(f)}


@pytest.mark.parametrize(
    ("what", "bad", "good"),
    [
        ("qos+mlfq+wfq: short TTFT p99, 3-5", {}, {"qos_mlfq_wfq__short_ttft_ms_p99__3-5": 59.0}),
        ("watermark: TTFT p99, 5", {"watermark__ttft_ms_p99__5": 1030.0}, {}),
        (
            "wfq+tenant: silver TTFT p99, 3",
            {"wfq_tenant__ttft_ms_p99__3": 1001.0},
            {"wfq_tenant__ttft_ms_p99__3": 999.0},
        ),
        ("all: short TTFT p99, 4", {"all__short_ttft_ms_p99__4": 159.0}, {}),
        ("overload+admission+edf: goodput, 5", {}, {"overload_admission_edf__goodput_rps__5": 5.3}),
        ("all: rejected or expired, 5", {"all__rejected__5": 36.0}, {"all__rejected__5": 34.0}),
        ("all: attainment against tuned, 2, points", {"all__slo_attainment__2": 0.47}, {}),
    ],
)
def test_a_target_is_judged_by_its_own_figure(
    what: str, bad: dict[str, float], good: dict[str, float]
) -> None:
    before, after = met(figures(**bad)), met(figures(**good))
    assert (before[what], after[what]) == (False, True)
    assert {name for name in before if before[name] != after[name]} == {what}


def test_an_arm_has_a_row_of_the_figures_that_exclude_each_other() -> None:
    console = Console(width=150, record=True, quiet=False)
    console.print(arms_table(figures(all__rejected__5=40.0, watermark__preemptions__4=1.0), "run"))
    lines = console.export_text().splitlines()
    (mine,) = [line for line in lines if "all " in line]
    assert "0.50 0.50 0.50" in mine and "20.0" in mine and "0.90, 0.90" in mine
    assert [line for line in lines if "watermark " in line and " 11 " in line]
    assert sum("100, 100" in line for line in lines) == len(ARMS)
