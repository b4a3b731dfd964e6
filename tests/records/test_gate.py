"""`bench compare`: a gate fails on what got worse beyond margin and chance, and on what it cannot check."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from harness.atomic import write_json
from harness.commands import compare_cmd
from harness.errors import GateFailed, UserError
from harness.records import read_json
from reports.gate import Gate, check, read_gates, read_side
from reports.summary import write_summary
from tests.synthetic import Effect, make_run

GATES = """
[[gate]]
metric = "tpot_ms_p50"
margin_pct = 3
[[gate]]
metric = "output_tok_per_s"
scope = "phase:3-5"
arm = "plain"
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("results")
    made = {}
    for name, step in (("base", 1.0), ("slow", 1.2), ("fast", 0.8)):
        effects = {"plain": Effect(step=step)}
        made[name] = make_run(folder / name, arms=("stock", "plain"), seeds=(0, 1), n=300, effects=effects)
        write_summary(made[name])
    return made


@pytest.fixture
def gates(tmp_path: Path) -> Path:
    path = tmp_path / "gates.toml"
    path.write_text(GATES)
    return path


@pytest.mark.parametrize("records", [True, False])
def test_only_what_got_worse_fails(runs: dict[str, Path], gates: Path, records: bool) -> None:
    """With records the difference is paired; from the summaries alone it is set against both intervals."""

    def states(name: str) -> list[tuple[str, str, str, str]]:
        sides = [runs[n] if records else runs[n] / "summary.json" for n in ("base", name)]
        checked = check(read_side(sides[0]), read_side(sides[1]), read_gates(gates))
        return [(c.arm, c.gate.metric, c.state, c.method) for c in checked]

    method = "paired" if records else "intervals"
    slow = states("slow")
    assert slow[:2] == [("stock", "tpot_ms_p50", "ok", method), ("plain", "tpot_ms_p50", "worse", method)]
    assert {state for *_, state, _ in states("base")} == {state for *_, state, _ in states("fast")} == {"ok"}


def test_a_margin_is_room(runs: dict[str, Path]) -> None:
    for margin, state in ((5.0, "worse"), (40.0, "ok")):
        gate = Gate(metric="tpot_ms_p50", arm="plain", margin_pct=margin)
        assert check(read_side(runs["base"]), read_side(runs["slow"]), [gate])[0].state == state


def test_what_cannot_be_checked_fails(runs: dict[str, Path], tmp_path: Path) -> None:
    summary = read_json(runs["base"] / "summary.json")
    summary["arms"] = [arm for arm in summary["arms"] if arm["name"] != "plain"]
    del summary["arms"][0]["metrics"]["ttft_ms_p50"]
    summary["arms"][0]["metrics"]["e2e_ms_p50"].update(value=None, ci95=None, reason="no samples")
    write_json(tmp_path / "less.json", summary)
    old, new = read_side(runs["base"]), read_side(tmp_path / "less.json")
    gates = [Gate(metric=m) for m in ("ttft_ms_p50", "e2e_ms_p50")]
    found = {(c.gate.metric, c.arm): c for c in check(old, new, gates)}
    assert {c.state for c in found.values()} == {"missing"}
    assert "no arm plain" in found["ttft_ms_p50", "plain"].text
    assert "less.json" in found["ttft_ms_p50", "stock"].text
    assert "no samples" in found["e2e_ms_p50", "stock"].text


def test_an_invalid_arm_fails_its_gates(runs: dict[str, Path], tmp_path: Path) -> None:
    summary = read_json(runs["base"] / "summary.json")
    summary["arms"][1].update(valid=False, reasons=[{"code": "token_mismatch", "text": ""}])
    write_json(tmp_path / "bad.json", summary)
    gate = Gate(metric="ttft_ms_p50", arm="plain")
    found = check(read_side(runs["base"]), read_side(tmp_path / "bad.json"), [gate])[0]
    assert (found.state, "token_mismatch" in found.text) == ("invalid", True)


def test_the_command(runs: dict[str, Path], gates: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    compare_cmd.register(app)
    app.command("other")(lambda: None)
    out = ["--json", str(tmp_path / "o.json"), "--markdown", str(tmp_path / "o.md")]
    bad = CliRunner().invoke(
        app, ["compare", str(runs["base"]), str(runs["slow"]), "--gate", str(gates), *out]
    )
    assert isinstance(bad.exception, GateFailed)
    assert bad.exception.exit_code == 3
    assert "\n" not in str(bad.exception)
    written = read_json(tmp_path / "o.json")
    assert not written["passed"]
    assert [g["state"] for g in written["gates"]][1] == "worse"
    table = (tmp_path / "o.md").read_text()
    assert table in bad.output
    assert table.splitlines()[4].startswith("| worse | plain | tpot_ms_p50")
    good = CliRunner().invoke(app, ["compare", str(runs["base"]), str(runs["base"]), "--gate", str(gates)])
    assert good.exit_code == 0
    assert "All 3 gates hold" in good.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[gate]\n", "no TOML"),
        ("", "gate"),
        ("[[gate]]\nmetric = 'ttft_ms_p50'\nmargin = 2\n", "margin"),
        ("[[gate]]\nmetric = 'ttft_ms_p50'\nmargin_pct = 'x'\n", "margin_pct"),
        ("[[gate]]\nmetric = 'nope'\n", "nope"),
        ("[[gate]]\nmetric = 'offered'\n", "neither"),
        ("[[gate]]\nmetric = 'ttft_ms_p50'\nscope = 'gold'\n", "scope 'gold'"),
    ],
)
def test_gate_files_that_say_nothing_clear(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "gates.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_gates(path)


def test_a_scope_that_neither_run_has_is_bad_input(runs: dict[str, Path], tmp_path: Path) -> None:
    base, slow = read_side(runs["base"]), read_side(runs["slow"])
    for scope in ("phase:99", "phase:1-2", "tier:golden", "tenant:gold-a/phase:9"):
        with pytest.raises(UserError, match=f"{scope} is in neither run; they have all, phase:1"):
            check(base, slow, [Gate(metric="ttft_ms_p50", scope=scope)])
    # in one of them it is a missing figure
    summary = read_json(runs["base"] / "summary.json")
    for arm in summary["arms"]:
        del arm["by_phase"]["2"]
    write_json(tmp_path / "less.json", summary)
    found = check(base, read_side(tmp_path / "less.json"), [Gate(metric="ttft_ms_p50", scope="phase:2")])
    assert {c.state for c in found} == {"missing"}


def test_a_stale_summary_is_not_compared(runs: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "base"
    shutil.copytree(runs["base"], run)
    (run / "summary.json").write_text("{}")
    assert [arm["name"] for arm in read_side(run).summary["arms"]] == ["stock", "plain"]
    # without its records it is all there is
    shutil.copy(runs["base"] / "summary.json", run)
    for arm in ("stock", "plain"):
        shutil.rmtree(run / arm)
    side = read_side(run)
    assert (side.run_dir, side.summary["valid"]) == (None, True)


@pytest.mark.parametrize(
    ("summary", "field"),
    [
        ({"schema": 1, "arms": 3}, "run: field required"),
        (
            {"schema": 1, "run": "x", "valid": True, "reasons": [], "arms": 3},
            "arms: input should be a valid list",
        ),
        ({"schema": 1, "run": "x", "valid": True, "reasons": [], "arms": [{}]}, "arms.0.name"),
        ({}, "schema: field required"),
    ],
)
def test_damaged_summaries_are_named(tmp_path: Path, summary: dict[str, object], field: str) -> None:
    path = tmp_path / "s.json"
    write_json(path, summary)
    with pytest.raises(UserError, match=f"s.json, {field}"):
        read_side(path)
    path.rename(tmp_path / "summary.json")
    with pytest.raises(UserError, match=f"summary.json, {field}"):
        read_side(tmp_path)


def test_paths_that_are_no_runs(tmp_path: Path, runs: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_side(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is no run"):
        read_side(tmp_path)
    write_json(tmp_path / "x.json", {"schema": 2})
    with pytest.raises(UserError, match="schema: input should be 1"):
        read_side(tmp_path / "x.json")
    # a run that has no summary yet is summed up on the spot
    copy = tmp_path / "copy"
    shutil.copytree(runs["base"], copy)
    (copy / "summary.json").unlink()
    assert read_side(copy).summary["run"] == "base"
