"""The report's section on tenants, against records small enough to count by hand.

Service over time, Jain's index, the queue by level and reason, admission, victims, slack and interference. How the
records come about (gauges: tests/engines, tenants run alone: tests/run) is not for here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from harness.atomic import write_json
from harness.records import arm_dir, read_json, write_arm
from harness.schema import HELD
from reports import admissions, html, interference, markdown, queues, service, slack
from reports.figures import STEP_BINS
from reports.summary import build_summary
from reports.view import RunView, load_view
from tests.hand_records import S, papers, plan, request, tables_of

TIERS = {"gold-a": "gold", "silver-0": "silver", "bronze-0": "bronze"}
Rows = Sequence[dict[str, Any]]


def of(tenant: str, **values: Any) -> dict[str, Any]:
    """A request of this tenant."""
    return request(tenant=tenant, tier=TIERS[tenant], **values)


def write(
    run: Path,
    arm: str,
    rows: Rows,
    seed: int = 0,
    events: Rows = (),
    gauges: Sequence[tuple[int, str, str, float]] = (),
    window_s: float = 20.0,
) -> None:
    """One arm and seed."""
    tables: dict[str, Any] = dict(tables_of(rows, events=events))
    if gauges:
        tables["gauges"] = pd.DataFrame(gauges, columns=["t_ns", "patch", "gauge", "value"])
    write_arm(arm_dir(run, arm, seed), tables, *papers(arm, seed, window_s))


def view_of(run: Path, arms: Mapping[str, bool], seeds: Sequence[int] = (0,)) -> RunView:
    """A view of what was written; `arms` says of each whether it is valid."""
    plan(run, {arm: [] if arm == "stock" else [arm] for arm in arms}, seeds)
    listed = [
        {"name": arm, "patches": [] if arm == "stock" else [arm], "seeds": list(seeds), "valid": valid}
        for arm, valid in arms.items()
    ]
    return load_view(run, {"run": "demo", "arms": listed, "valid": True})


# fairness over time


def served(tenant: str, *, sent: float, scheduled: float, tokens: int, weight: int) -> dict[str, Any]:
    """Waits from one to the other (ms), and gets all of its tokens 100 ms later; nothing of its prompt is new."""
    chunks = [(scheduled + 100.0, tokens)]
    return of(
        tenant, intended_ms=sent, chunks=chunks, scheduled_ms=scheduled, weight=weight, cached_tokens=100
    )


@pytest.fixture
def contended(tmp_path: Path) -> RunView:
    """Windows 0 and 1: gold and bronze both wait throughout; in window 2 only bronze does; nobody in window 3."""
    rows = [
        served("gold-a", sent=0, scheduled=2000, tokens=400, weight=4),
        served("gold-a", sent=0, scheduled=7000, tokens=200, weight=4),
        served("gold-a", sent=0, scheduled=10_500, tokens=40, weight=4),
        served("bronze-0", sent=0, scheduled=3000, tokens=100, weight=1),
        served("bronze-0", sent=0, scheduled=8000, tokens=150, weight=1),
        served("bronze-0", sent=0, scheduled=15_500, tokens=10, weight=1),
        # came and went at once
        served("silver-0", sent=6000, scheduled=6000, tokens=20, weight=2),
    ]
    write(tmp_path, "stock", rows)
    return view_of(tmp_path, {"stock": True})


def test_service_is_tokens_over_weight_with_a_dot_where_backlogged(contended: RunView) -> None:
    made = service.service_figures(contended)
    assert set(made) == {"fig-fair-0", "fig-jain"}
    traces = {trace["name"]: trace for trace in made["fig-fair-0"]["data"]}
    assert traces["gold-a"]["x"] == [2.5, 7.5, 12.5, 17.5]
    # tokens / weight / 5 s
    assert traces["gold-a"]["y"] == [20.0, 10.0, 2.0, 0.0]
    assert traces["bronze-0"]["y"] == [20.0, 30.0, 0.0, 2.0]
    assert traces["silver-0"]["y"] == [0.0, 2.0, 0.0, 0.0]
    dots = {name: [size > 0 for size in trace["marker"]["size"]] for name, trace in traces.items()}
    assert dots == {
        "gold-a": [True, True, False, False],
        "bronze-0": [True, True, True, False],
        "silver-0": [False] * 4,
    }
    (jain,) = made["fig-jain"]["data"]
    # equal shares; 10 against 30 (not silver's 2); fewer than two backlogged
    assert jain["y"] == [1.0, 0.8, None, None]


def test_without_two_backlogged_tenants_there_is_no_index(tmp_path: Path) -> None:
    write(tmp_path, "stock", [served("gold-a", sent=0, scheduled=9000, tokens=5, weight=4)])
    assert set(service.service_figures(view_of(tmp_path, {"stock": True}))) == {"fig-fair-0"}


def test_a_run_shorter_than_a_window_has_no_figure(tmp_path: Path) -> None:
    write(tmp_path, "stock", [of("gold-a", chunks=[(5, 1)])], window_s=4.0)
    assert service.service_figures(view_of(tmp_path, {"stock": True})) == {}


# queues


def test_a_mean_over_time_weighs_each_value_by_how_long_it_held() -> None:
    edges = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    found = queues.mean_in_bins(np.array([0.5, 0.75, 2.0]), np.array([4.0, 8.0, 1.0]), edges)
    assert found.tolist() == [0.5 * 0 + 0.25 * 4 + 0.25 * 8, 8.0, 1.0, 1.0]


def test_levels_and_reasons_come_from_the_gauges(tmp_path: Path) -> None:
    quarter = 5 * S
    gauges = [
        (0, "mlfq", "mlfq_waiting_level_0", 4.0),
        (0, "mlfq", "mlfq_waiting_level_1", 0.0),
        (0, "mlfq", "mlfq_demotions", 77.0),
        (quarter, "mlfq", f"{HELD}level 3 is prefilling", 3.0),
        (2 * quarter, "mlfq", "mlfq_waiting_level_1", 2.0),
        (2 * quarter, "mlfq", f"{HELD}level 3 is prefilling", 0.0),
        (3 * quarter, "tenant", f"{HELD}<b>x</b>", 1.0),
    ]
    rows = [of("gold-a", chunks=[(5, 1)])]
    write(tmp_path, "stock", rows)
    write(tmp_path, "mlfq", rows, gauges=gauges)
    made = queues.queue_figures(view_of(tmp_path, {"stock": True, "mlfq": True}))
    assert set(made) == {"fig-level-1", "fig-held-1"}
    first, second = made["fig-level-1"]["data"]
    assert (first["name"], second["name"]) == ("level 0", "level 1")
    fourth = STEP_BINS // 4
    assert [first["y"][i * fourth] for i in range(4)] == [4.0] * 4
    assert [second["y"][i * fourth] for i in range(4)] == [0.0, 0.0, 2.0, 2.0]
    assert made["fig-level-1"]["layout"]["yaxis"]["range"] == [0, 6.24]
    held = {trace["name"]: [trace["y"][i * fourth] for i in range(4)] for trace in made["fig-held-1"]["data"]}
    assert held == {
        "mlfq: level 3 is prefilling": [0.0, 3.0, 0.0, 0.0],
        "tenant: &lt;b&gt;x&lt;/b&gt;": [0.0, 0.0, 0.0, 1.0],
    }


def test_many_reasons_are_summed_up(tmp_path: Path) -> None:
    gauges = [(0, "tenant", f"{HELD}reason {i}", float(20 - i)) for i in range(9)]
    write(tmp_path, "tenant", [of("gold-a", chunks=[(5, 1)])], gauges=gauges)
    data = queues.queue_figures(view_of(tmp_path, {"tenant": True}))["fig-held-0"]["data"]
    assert [trace["name"] for trace in data] == [
        *(f"tenant: reason {i}" for i in range(queues.REASONS_SHOWN)),
        queues.OTHERS,
    ]
    assert data[-1]["y"][0] == 14.0 + 13.0 + 12.0


# admission and victims


def test_admission_counts_every_offered_request_once(tmp_path: Path) -> None:
    refused = {"status": "rejected"}
    write(tmp_path, "stock", [of("gold-a", chunks=[(5, 1)]), of("bronze-0", chunks=[(5, 1)])])
    write(
        tmp_path,
        "admission",
        [
            of("gold-a", chunks=[(5, 1)]),
            of("bronze-0", reason="kv_red", **refused),
            of("bronze-0", reason="kv_red", measured=False, **refused),
            of("bronze-0", reason="overload", **refused),
            of("bronze-0", status="expired", reason="deadline_expired"),
            of("bronze-0", status="cancelled"),
            of("gold-a", reason="", **refused),
        ],
    )
    write(tmp_path, "stock", [of("gold-a", chunks=[(5, 1)])], seed=1)
    write(tmp_path, "admission", [of("bronze-0", reason="kv_red", **refused)], seed=1)
    view = view_of(tmp_path, {"stock": True, "admission": False}, seeds=(0, 1))
    found = admissions.admissions(view)
    assert found is not None
    assert found.reasons == ("kv_red", admissions.UNNAMED, "overload")
    rows = {(d.arm, d.tier): (d.offered, *d.counts) for d in found.rows}
    assert rows == {
        ("stock", "gold"): (2, 2, 0, 0, 0, 0),
        ("stock", "silver"): (0, 0, 0, 0, 0, 0),
        ("stock", "bronze"): (1, 1, 0, 0, 0, 0),
        ("admission", "gold"): (2, 1, 0, 1, 0, 0),
        ("admission", "silver"): (0, 0, 0, 0, 0, 0),
        ("admission", "bronze"): (5, 2, 2, 0, 1, 1),
    }
    assert {d.arm for d in found.rows if d.struck} == {"admission"}
    only = admissions.admissions(view, view.arms[:1])
    assert only is None  # stock alone refused nobody


def test_a_run_that_refuses_nobody_has_no_such_table(tmp_path: Path) -> None:
    write(tmp_path, "stock", [of("gold-a", chunks=[(5, 1)])])
    assert admissions.admissions(view_of(tmp_path, {"stock": True})) is None


def test_victims_are_counted_by_tenant(tmp_path: Path) -> None:
    rows = [of("gold-a", chunks=[(5, 1)]), of("bronze-0", chunks=[(5, 1)]), of("bronze-0", measured=False)]
    events = [
        {"t_ns": 1, "kind": "preempt", "request": 0},
        {"t_ns": 2, "kind": "preempt", "request": 1},
        {"t_ns": 3, "kind": "preempt", "request": 1},
        {"t_ns": 3, "kind": "resume", "request": 1},
        {"t_ns": 4, "kind": "preempt", "request": 2},
    ]
    write(tmp_path, "stock", rows, events=events)
    write(tmp_path, "qos", rows)
    found = admissions.victims(view_of(tmp_path, {"stock": True, "qos": True}))
    assert found is not None
    assert found.arms == ("stock", "qos")
    assert dict(found.rows) == {"gold-a": (1, 0), "silver-0": (0, 0), "bronze-0": (2, 0)}
    assert found.totals == (3, 0)
    write(tmp_path / "none", "stock", rows)
    assert admissions.victims(view_of(tmp_path / "none", {"stock": True})) is None


# slack


def test_slack_is_what_is_left_of_the_promise(tmp_path: Path) -> None:
    def ttft(ms: float, **values: Any) -> dict[str, Any]:
        return of("gold-a", chunks=[(ms, 1)], slo_ttft_ms=1000.0, **values)

    rows = [
        ttft(50),  # 95% left
        ttft(100),  # 90%
        ttft(1000),  # in time, to the millisecond
        ttft(1001),
        ttft(1250),
        ttft(5001),
        ttft(700, status="failed"),
        of("gold-a", status="rejected", slo_ttft_ms=1000.0),
        of("gold-a", status="cancelled", slo_ttft_ms=1000.0, end_ms=9.0),  # censored
        ttft(5, measured=False),
    ]
    write(tmp_path, "stock", rows)
    made = slack.slack_figures(view_of(tmp_path, {"stock": True}))
    assert set(made) == {"fig-slack-0"}
    (bars,) = made["fig-slack-0"]["data"]
    shown = {label: y for label, y in zip(bars["x"], bars["y"], strict=True) if y}
    assert shown == {
        "never served": 25.0,
        "over 400% late": 12.5,
        "0–25% late": 25.0,
        "0–25% left": 12.5,
        "90–100% left": 25.0,
    }
    assert sum(bars["y"]) == 100.0


# interference


def alone(run: Path, tenant: str, rows: Rows, seed: int = 0, **plan_values: Any) -> None:
    """Add a run of this tenant by itself."""
    folder = run / "alone" / tenant
    write(folder, "tuned", rows, seed)
    plan(folder, {"tuned": []}, (seed,))
    raw = read_json(folder / "plan.json")
    workload = {**read_json(run / "plan.json").get("workload", {}), "only_tenant": tenant}
    write_json(folder / "plan.json", {**raw, "workload": workload, **plan_values})


@pytest.fixture
def crowded(tmp_path: Path) -> RunView:
    """Gold waits twice as long in stock and 1.5 times in qos; what one of both did not serve does not count."""

    def gold(first: float, last: float, **values: Any) -> dict[str, Any]:
        return of("gold-a", chunks=[(first, 1), (last, 1)], **values)

    others = [of("bronze-0", chunks=[(9000, 1)], request_id="b0")]
    write(
        tmp_path,
        "stock",
        [
            *others,
            gold(100, 500, request_id="g0"),
            gold(300, 700, request_id="g1"),
            gold(5000, 9000, request_id="g2"),
        ],
    )
    write(
        tmp_path,
        "qos",
        [
            gold(75, 300, request_id="g0"),
            gold(225, 900, request_id="g1", status="cancelled"),
            of("gold-a", status="rejected", request_id="g2"),
            *others,
        ],
    )
    view = view_of(tmp_path, {"stock": True, "qos": False})
    alone(
        tmp_path,
        "gold-a",
        [
            gold(50, 200, request_id="g0"),
            gold(150, 400, request_id="g1"),
            of("gold-a", status="failed", request_id="g2"),
        ],
    )
    return view


def test_slowdowns_are_over_what_was_served_both_ways(crowded: RunView) -> None:
    found = interference.interference(crowded)
    assert found is not None
    assert (found.arms, found.struck, found.seeds) == (("stock", "qos"), (False, True), (0,))
    ((tenant, (stock, qos)),) = found.rows
    assert (tenant, stock.offered, qos.offered) == ("gold-a", 3, 3)
    assert (stock.ttft.n, stock.ttft.beside_ms, stock.ttft.alone_ms) == (2, 200.0, 100.0)
    assert (stock.ttft.text, stock.e2e.text) == ("2.00×", "2.00×")  # 600 / 300
    assert (qos.ttft.text, qos.e2e.n, qos.e2e.text) == ("1.50×", 1, "1.50×")  # 300 / 200
    assert "200 ms instead of 100 ms" in stock.ttft.means
    json.dumps(interference.as_json(crowded), allow_nan=False)


def test_a_tenant_of_other_traffic_is_not_compared(crowded: RunView) -> None:
    path = crowded.path / "alone/gold-a/plan.json"
    raw = read_json(path)
    for change in ({"profile": {"name": "x"}}, {"workload": {"only_tenant": "gold-a", "rate_scale": 2.0}}):
        write_json(path, {**raw, **change})
        assert interference.interference(crowded) is None
    write_json(path, raw)
    assert interference.interference(crowded) is not None


def test_nothing_served_both_ways_is_said(crowded: RunView) -> None:
    alone(crowded.path, "bronze-0", [of("bronze-0", status="failed", request_id="b0")])
    found = interference.interference(crowded)
    assert found is not None
    bronze = dict(found.rows)["bronze-0"]
    assert [one.ttft.text for one in bronze] == ["–", "–"]
    assert bronze[0].ttft.means == "no request was served both ways"


# the page


EVIL = '<img src=x onerror="alert(3)">'


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    """A run with all of it, and a hostile reason."""
    run = tmp_path_factory.mktemp("whole") / "demo"
    rows = [
        served("gold-a", sent=0, scheduled=6000, tokens=400, weight=4),
        served("bronze-0", sent=0, scheduled=7000, tokens=10, weight=1),
        of("silver-0", status="rejected", reason=EVIL),
    ]
    events = [{"t_ns": 1, "kind": "preempt", "request": 1}]
    gauges = [(0, "mlfq", "mlfq_waiting_level_2", 2.0), (0, "mlfq", f"{HELD}{EVIL}", 2.0)]
    for arm in ("stock", "mlfq"):
        write(run, arm, rows, events=events, gauges=gauges if arm == "mlfq" else ())
    plan(run, {"stock": [], "mlfq": ["mlfq"]})
    view = load_view(run, build_summary(run))
    alone(run, "gold-a", [of("gold-a", chunks=[(100, 1)], request_id="r0")])
    return view


def test_the_page_shows_all_of_it_and_runs_none_of_it(whole: RunView) -> None:
    text = html.render(whole)
    body = text.partition('id="tenants"')[2].partition("</section>")[0]
    for heading in (
        "Service over time",
        "Fairness over time",
        "Waiting requests by level",
        "Held requests by reason",
        "Admission by reason",
        "Preemptions by tenant",
        "Deadline slack",
        "Interference",
    ):
        assert f"<h3>{heading}" in body
    assert EVIL not in text
    assert "61.0×" in body  # 6,100 ms instead of 100 ms
    assert html.render(whole) == text
    assert all(id in text for id in ("fig-fair-1", "fig-level-1", "fig-held-1", "fig-slack-2"))
    assert "bench interference" not in body


def test_markdown_shows_the_tables(whole: RunView) -> None:
    text = markdown.render(whole)
    section = text.partition("### Tenants")[2].partition("\n### ")[0]
    assert EVIL not in text
    assert "| `stock` | silver | 1 | 0 | 1 | 0 |" in section
    assert "| bronze-0 | 1 | 1 |" in section
    assert "| gold-a | 61.0× / 61.0× | 61.0× / 61.0× |" in section


def test_a_page_without_such_records_leaves_the_parts_out(tmp_path: Path) -> None:
    write(tmp_path / "demo", "stock", [of("gold-a", chunks=[(5, 1)])])
    plan(tmp_path / "demo", {"stock": []})
    view = load_view(tmp_path / "demo", build_summary(tmp_path / "demo"))
    body = html.render(view).partition('id="tenants"')[2].partition("</section>")[0]
    assert "Service over time" in body
    for absent in ("Held", "by level", "Admission by reason", "Preemptions", "Interference", "Fairness over"):
        assert f"<h3>{absent}" not in body
    assert "### Tenants" not in markdown.render(view)
