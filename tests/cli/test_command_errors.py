"""Guards what a user sees of a mistake: one line that says what to type, the right exit code, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli import _run
from patches.catalogue import CATALOGUE


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("run --enable qoss", "qos"),
        *((f"run --enable {one.name}", "not built") for one in CATALOGUE if not one.built),
        ("run --enable no_such_pkg.patch", "no_such_pkg"),
        ("run --enable qos,qos", "twice"),
        ("run --enable qos --set qos.short_prompt_tokens=many", "short_prompt_tokens"),
        ("run --enable qos --set qos.short_prompt_token=5", "short_prompt_tokens"),
        ("run --enable qos --set mlfq.level0_tokens=5", "mlfq"),
        ("run --enable mlfq --set mlfq.level0_tokens=9999", "level0_tokens"),
        ("run --enable qos --set qos=5", "patch.knob=value"),
        ("run --phase 9", "9"),
        ("run --phase 0", "0"),
        ("run --phase 1,x", "x"),
        ("run --seeds x", "--seeds"),
        ("run --seeds 0", "--seeds"),
        ("run --profile h900/llama", "profile"),
        ("run --mode pd", "pd"),
        ("run --engine emulated --vllm-flag=--seed=1", "--engine live"),
        ("run --engine emulated --recalibrate", "the profile's"),
        ("run --engine emulated --jobs 2", "one server at a time"),
        ("run --engine emulated --sensitivity", "--engine emulated"),
        ("run --base best", "tuned"),
        ("run --only-arms nobody", "stock, tuned"),
        ("run --arms {tmp}/missing.toml", "missing.toml"),
        ("run --arms {tmp}/broken.toml", "broken.toml"),
        ("run --arms {tmp}/odd.toml", "colour"),
        ("run --arms {tmp}/flag.toml", "max_num_sequences"),
        ("run --arms {tmp}/name.toml", "../up"),
        ("run --arms {tmp}/type.toml", "max_num_seqs"),
        ("run --knobs {tmp}/knobs.toml --enable qos", "short"),
        ("run --rate-scale 0", "--rate-scale"),
        ("run --out {tmp}", "not empty"),
        ("run --no-such-flag", "--no-such-flag"),
        ("report {tmp}", "bench run"),
        ("report {tmp}/nowhere", "nowhere"),
        ("explain qoss", "qos"),
        ("plan --enable qos,slruu", "slru"),
        ("workload --describe --phase 7", "7"),
        ("workload --describe --seed x", "--seed"),
        ("validate {tmp}/nowhere", "nowhere"),
        ("validate {tmp}", "requests.jsonl"),
        ("compare {tmp}/a {tmp}/b --gate {tmp}/missing.toml", "missing.toml"),
        ("cache {tmp}/missing.jsonl --blocks 10", "missing.jsonl"),
        ("cache {tmp}/odd.toml --blocks 10", "odd.toml"),
        ("perf --enable ,", "--enable"),
        ("patches --json {tmp}", "it is a folder"),
        ("explain qos --json {tmp}/odd.toml/x.json", "odd.toml/x.json: not a directory"),
        ("plan --enable qos --json /proc/no/x.json", "/proc/no/x.json"),
        ("doctor --json {tmp}", "it is a folder"),
        ("workload --describe --json {tmp}", "it is a folder"),
        ("validate {tmp} --json {tmp}", "it is a folder"),
        ("capacity --json {tmp}", "it is a folder"),
        ("cache {tmp}/missing.jsonl --json {tmp}", "it is a folder"),
        ("compare {tmp}/a {tmp}/b --gate {tmp}/missing.toml --json {tmp}", "it is a folder"),
        ("compare {tmp}/a {tmp}/b --gate {tmp}/missing.toml --markdown {tmp}", "it is a folder"),
        ("report {tmp} --json {tmp}", "bench run"),
        ("nonsense", "nonsense"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.toml").write_text("arm = [\n")
    (tmp_path / "odd.toml").write_text('[[arm]]\nname = "a"\ncolour = "red"\n')
    (tmp_path / "flag.toml").write_text('[[arm]]\nname = "a"\n[arm.engine_flags]\nmax_num_sequences = 5\n')
    (tmp_path / "type.toml").write_text('[[arm]]\nname = "a"\n[arm.engine_flags]\nmax_num_seqs = "many"\n')
    (tmp_path / "name.toml").write_text('[[arm]]\nname = "../up"\n')
    (tmp_path / "knobs.toml").write_text("[qos]\nshort = 5\n")
    before = sorted(tmp_path.rglob("*"))
    code = _run(arguments.format(tmp=tmp_path).split())
    shown = capsys.readouterr()
    assert code == 2, shown.err
    assert len(shown.err.strip().splitlines()) == 1, shown.err
    assert says in shown.err
    assert "Traceback" not in shown.err
    assert sorted(tmp_path.rglob("*")) == before


def test_help_says_that_figures_can_be_had_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (
        "run",
        "report",
        "compare",
        "patches",
        "plan",
        "doctor",
        "workload",
        "validate",
        "perf",
        "cache",
    ):
        assert _run([command, "--help"]) == 0
        assert "--json" in capsys.readouterr().out, command


def test_the_phases_can_be_listed_by_run_and_by_workload(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for command in (["run", "--phase", "list"], ["workload", "--phase", "list"]):
        assert _run(command) == 0
        texts.append(capsys.readouterr().out)
    assert all("overload" in text and "prompt switch" in text for text in texts)
