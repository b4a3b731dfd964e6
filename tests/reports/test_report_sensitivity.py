"""What becomes of a verdict when the profile is off: the rule, on made-up runs, and how the outputs say it.

The runs under other assumptions are made up as well: `tests/run/test_sensitivity_run.py` makes real ones.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.assumptions import Assumptions
from harness.atomic import write_json
from harness.metrics.scope import Scope
from harness.records import find_runs, load, load_run, read_json
from reports import html, markdown, robustness, terminal
from reports.comparisons import compare_arms
from reports.evaluated import evaluated
from reports.fingerprint import inputs_digest
from reports.sensitivity import decisive, judge
from reports.summary import build_summary, current_summary, write_summary
from reports.unmeasured import LIMIT
from reports.view import RunView, load_view
from tests.synthetic import Effect, make_run

ARMS = ("stock", "tuned", "qos")
FAST = Effect(step=0.7, short_queue=0.1, long_queue=0.4)
SLOW = Effect(step=1.3, short_queue=0.9, long_queue=1.6)
Row = dict[str, Any]
# One seed of a run this small has fewer than the 459 samples that a p99 needs; both together have more.
SIZE: dict[str, Any] = {"n": 380, "phase_s": 12.0}


def assume(run: Path, name: str, seeds: tuple[int, ...] = (0,), **effects: Effect) -> Path:
    """Add a made-up recomputation to a run."""
    folder = make_run(run / "sensitivity" / name, ("tuned", "qos"), seeds, effects=effects, **SIZE)
    plan = read_json(folder / "plan.json")
    write_json(folder / "plan.json", {**plan, "assumptions": Assumptions(name).to_json()})
    return folder


def rows_of(summary: dict[str, Any]) -> dict[tuple[str, str, str], Row]:
    """Comparisons by baseline, scope and metric, of the arm qos."""
    return {(r["baseline"], r["scope"], r["metric"]): r for r in summary["comparisons"] if r["arm"] == "qos"}


@pytest.fixture(scope="module", autouse=True)
def few_figures() -> Iterator[None]:
    """Summaries of the whole server alone, with fewer replicates: these tests build many."""
    scopes = [Scope(), Scope(phases=(1,)), Scope(phases=(3, 4, 5))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reports.summary.evaluated", partial(evaluated, scopes=scopes, replicates=100))
        yield


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which qos has the shorter steps, not recomputed."""
    run = make_run(tmp_path_factory.mktemp("plain") / "demo", ARMS, (0, 1), effects={"qos": FAST}, **SIZE)
    write_summary(run)
    return run


@pytest.fixture(scope="module")
def shaken(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, recomputed: with fewer KV blocks qos has the longer steps, on a slower GPU all is as before."""
    run = tmp_path_factory.mktemp("shaken") / "demo"
    shutil.copytree(plain, run)
    assume(run, "kv-20", qos=SLOW)
    assume(run, "efficiency-15", qos=FAST)
    write_summary(run)
    return run


@pytest.fixture(scope="module")
def view(shaken: Path) -> RunView:
    return load_view(shaken, current_summary(shaken))


def test_a_winner_that_changes_takes_the_verdict_back(plain: Path, shaken: Path) -> None:
    before = rows_of(current_summary(plain))["tuned", "all", "tpot_ms_p50"]
    after = rows_of(current_summary(shaken))["tuned", "all", "tpot_ms_p50"]
    assert before["verdict"] == "better"
    assert "sensitivity" not in before
    assert (after["verdict"], after["data_verdict"]) == ("undetermined", "better")
    assert (after["delta_pct"], after["ci95"]) == (before["delta_pct"], before["ci95"])
    slower, fewer = after["sensitivity"]
    assert [slower["assumption"], fewer["assumption"]] == ["efficiency-15", "kv-20"]
    assert (slower["flips"], fewer["flips"]) == (False, True)
    assert fewer["base_pct"] < 0 < fewer["delta_pct"]
    assert slower["base_pct"] == slower["delta_pct"] == fewer["base_pct"]
    assert after["reason"].startswith("the winner changes when KV blocks are 20% fewer (+")
    assert " instead of −" in after["reason"]


def test_only_verdicts_against_the_main_baseline_are_recomputed(shaken: Path) -> None:
    summary = current_summary(shaken)
    kept = [
        r for r in summary["comparisons"] if r["baseline"] == "stock" and r["verdict"] in ("better", "worse")
    ]
    assert kept
    assert all("sensitivity" not in r and "data_verdict" not in r for r in kept)
    for row in rows_of(summary).values():
        assert ("sensitivity" in row) == (row in decisive(summary["comparisons"], ARMS))
        assert row["verdict"] == "undetermined" or not any(c["flips"] for c in row.get("sensitivity", ()))
    entry = summary["sensitivity"]
    assert entry["baseline"] == "tuned"
    assert [one["name"] for one in entry["assumptions"]] == ["efficiency-15", "kv-20"]
    assert [one["seeds"] for one in entry["assumptions"]] == [[0], [0]]
    assert {one["name"] for one in entry["untried"]} == {
        "efficiency+15",
        "mixed-1x",
        "mixed-2x",
        "cpu-2ms",
        "kv+20",
    }
    assert 0 < entry["changed"] <= entry["recomputed"] <= entry["verdicts"]


def test_without_a_change_of_winner_all_verdicts_stay(plain: Path, tmp_path: Path) -> None:
    run = tmp_path / "demo"
    shutil.copytree(plain, run)
    assume(run, "mixed-2x", qos=FAST)
    before, after = rows_of(current_summary(plain)), rows_of(current_summary(run))
    assert {key: row["verdict"] for key, row in before.items()} == {
        key: row["verdict"] for key, row in after.items()
    }
    assert any("sensitivity" in row for row in after.values())


def test_a_p99_of_too_few_samples_says_nothing_and_takes_nothing_away(shaken: Path) -> None:
    rows = rows_of(current_summary(shaken))
    row = rows["tuned", "all", "ttft_ms_p99"]
    assert row["verdict"] == "better"
    assert not any(cell["flips"] for cell in row["sensitivity"])
    assert all("459" in cell["reason"] for cell in row["sensitivity"])


def test_seeds_that_contradict_the_verdict_themselves_are_no_flip(shaken: Path) -> None:
    run = load_run(shaken)
    arms = [evaluated(name, {"patches": []}, records, scopes=[Scope()]) for name, records in run.arms.items()]
    made = [row for row in compare_arms(arms) if row["metric"] == "tpot_ms_p50" and row["arm"] == "qos"]
    # as if seed 1 alone had decided the verdict, against what seed 0 shows
    rows = [{**row, "verdict": "worse", "delta_pct": 3.0} for row in made if row["baseline"] == "tuned"]
    (row,), entry = judge(shaken, arms, rows)
    assert row["verdict"] == "worse"
    slower, fewer = row["sensitivity"]
    assert fewer["base_pct"] < 0 < fewer["delta_pct"]
    assert not slower["flips"] and not fewer["flips"]
    assert (
        slower["reason"]
        == fewer["reason"]
        == "these seeds alone do not show the verdict; recompute it on more"
    )
    assert entry is not None and (entry["recomputed"], entry["changed"]) == (0, 0)


def test_more_seeds_are_used_where_they_are_there(plain: Path, tmp_path: Path) -> None:
    run = tmp_path / "demo"
    shutil.copytree(plain, run)
    assume(run, "kv-20", (0, 1), qos=FAST)
    row = rows_of(current_summary(run))["tuned", "all", "ttft_ms_p99"]
    (cell,) = row["sensitivity"]
    assert cell["base_pct"] == row["delta_pct"]
    assert "reason" not in cell


def test_an_arm_that_is_not_recomputed_or_not_valid_keeps_its_verdicts(plain: Path, tmp_path: Path) -> None:
    run = tmp_path / "demo"
    shutil.copytree(plain, run)
    folder = assume(run, "kv-20", qos=SLOW)
    path = folder / "qos/seed-0/manifest.json"
    write_json(path, {**read_json(path), "validity": {"valid": False, "reasons": []}})
    cells = rows_of(current_summary(run))["tuned", "all", "tpot_ms_p50"]["sensitivity"]
    assert "not valid" in cells[0]["reason"]
    shutil.rmtree(folder / "qos")
    assert "sensitivity" not in current_summary(run)


def test_the_recomputed_runs_are_no_runs_of_their_own_and_no_arms(shaken: Path) -> None:
    assert find_runs(shaken.parent) == [shaken]
    assert set(load(shaken).requests["arm"]) == set(ARMS)
    assert [arm["name"] for arm in current_summary(shaken)["arms"]] == list(ARMS)


def test_a_summary_is_stale_when_something_is_recomputed(shaken: Path, tmp_path: Path) -> None:
    run = tmp_path / "demo"
    shutil.copytree(shaken, run)
    before = inputs_digest(run)
    for place in ("sensitivity/kv-20/qos/seed-0", "sensitivity/kv-20"):
        shutil.move(run / place, tmp_path / "aside")
        assert inputs_digest(run) != before
        shutil.move(tmp_path / "aside", run / place)
        assert inputs_digest(run) == before
    write_json(run / "sensitivity/left_out.json", {"cpu-2ms": "because"})
    assert inputs_digest(run) != before
    untried = {one["name"]: one["reason"] for one in current_summary(run)["sensitivity"]["untried"]}
    assert untried["cpu-2ms"] == "because"
    assert untried["kv+20"] == ""


def test_equal_inputs_give_equal_summaries(shaken: Path) -> None:
    assert json.dumps(build_summary(shaken)) == json.dumps(build_summary(shaken))


@pytest.mark.parametrize(("share", "capped"), [(0.63, True), (LIMIT, False), (0.0, False)])
def test_verdicts_that_rest_on_unmeasured_steps_are_undetermined(
    plain: Path, tmp_path: Path, share: float, capped: bool
) -> None:
    run = tmp_path / "demo"
    shutil.copytree(plain, run)
    path = run / "tuned/seed-1/manifest.json"
    write_json(path, {**read_json(path), "unmeasured": {"any": share, "mixed": share, "decode": 0.0}})
    before, after = current_summary(plain), build_summary(run)
    lost = 0
    for old, new in zip(before["comparisons"], after["comparisons"], strict=True):
        if capped and "tuned" in (new["arm"], new["baseline"]) and old["verdict"] != "undetermined":
            lost += 1
            assert (new["verdict"], new["data_verdict"]) == ("undetermined", old["verdict"])
            assert (
                new["reason"] == "rests on mixed steps (63.0% of steps), which this profile has not measured"
            )
        else:
            assert new == old
    assert bool(lost) == capped
    told = load_view(run, after)
    said = "rest on what this profile has not measured: mixed steps (63.0% of steps)"
    for text in (html.render(told), markdown.render(told), printed(told)):
        assert (said in " ".join(text.split())) == capped


def printed(view: RunView) -> str:
    console = Console(file=io.StringIO(), width=400, color_system=None)
    terminal.print_summary(view.summary, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_outputs_name_the_assumption_that_did_it(view: RunView) -> None:
    arm = view.arm("qos")
    assert arm is not None
    changed = [one for one in robustness.table(view, arm) if one.changes]
    assert changed
    page = html.render(view)
    assert page.count('class="n flip"') == sum(cell.flips for one in changed for cell in one.cells)
    assert "KV blocks −20%" in page
    assert "the winner changes when KV blocks are 20% fewer" in page
    text = markdown.render(view)
    assert "| same seeds | efficiency −15% | KV blocks −20% |" in text
    assert "Bold: the winner changes" in text
    for said in (page, text, printed(view)):
        assert "Under 2 other assumptions on seed 0: " in said
        assert "Not tried: efficiency +15%, mixed ×1, mixed ×2, CPU 2 ms, KV blocks +20%." in said
    assert "the winner changes when KV blocks are 20% fewer" in printed(view)


def test_outputs_say_when_nothing_was_recomputed(plain: Path) -> None:
    told = load_view(plain, current_summary(plain))
    for text in (html.render(told), markdown.render(told), printed(told)):
        assert "Not recomputed under other assumptions: bench sensitivity RUN" in text


def test_outputs_show_the_error_of_the_profile(plain: Path) -> None:
    known_run = load_view(plain, current_summary(plain))

    def told(error: dict[str, Any]) -> RunView:
        profile = {**known_run.summary["profile"], "error": error}
        return replace(known_run, summary={**known_run.summary, "profile": profile})

    for text in (printed(told({})), markdown.render(told({})), html.render(told({}))):
        assert "the error of this profile is not known: no measured run" in text
    known = {
        "step_median_pct": 1.23,
        "step_p90_pct": 4.0,
        "step_bias_pct": -0.31,
        "mixed_median_pct": 1.7,
        "rows": "held out",
        "closed_loop": ["<b>run</b>: TTFT mean +0.8%"],
        "command": "bench validate RUN",
        "other": 3,
    }
    lines = robustness.profile_lines(told(known))
    assert lines[1:] == [
        "error of its step times: median 1.2%, p90 4.0%, bias −0.3%, mixed steps median 1.7% (held out)",
        "error against a measured run: <b>run</b>: TTFT mean +0.8%",
        "other: 3",
        "these errors again: bench validate RUN",
    ]
    assert lines[0].startswith("profile rtx4090-24g/llama-3.1-8b, tables from synthetic, sha256 abababababab")
    assert "<b>run" not in html.render(told(known)) and "<b>run" not in markdown.render(told(known))
    assert "not known, there is none" in robustness.profile_lines(told({"step_median_pct": 1.0}))[2]
