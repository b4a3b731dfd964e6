"""`bench trace` on a terminal and elsewhere, and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from harness.commands import trace_cmd
from harness.errors import UserError
from tests.workloads import trace_files as files
from workloads.traces import FORMATS


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    trace_cmd.register(app)
    # A second command, for typer drops the name of an only one.
    app.command("nothing")(lambda: None)
    return app


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_summed_up_in_80_columns(app: typer.Typer, tmp_path: Path, name: str) -> None:
    path = files.write(tmp_path / "trace.txt", files.SMALL[name])
    out = tmp_path / "out.json"
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["trace", str(path), "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert f"({name})" in result.output
    assert "one tenant, 'trace'" in " ".join(result.output.split())
    written = json.loads(out.read_text())
    assert written["format"] == name
    assert len(written["sha256"]) == 64
    assert written["assumed"]
    assert sum(written["figures"]["tenants"].values()) == written["rows"]
    named = name in ("mooncake", "bailian", "timed_trace")
    assert (written["figures"]["prefix_sharing"] is not None) == named
    assert ("not known: the trace names no blocks" in result.output) == (not named)


def test_the_figures_of_mooncake(app: typer.Typer, tmp_path: Path) -> None:
    path = files.write(tmp_path / "t", files.lines(*reversed(files.MOONCAKE)))
    out = tmp_path / "out.json"
    assert CliRunner().invoke(app, ["trace", str(path), "--json", str(out)]).exit_code == 0
    written = json.loads(out.read_text())
    figures = written["figures"]
    assert (written["rows"], written["out_of_order"], written["block_tokens"]) == (3, 2, 512)
    assert (figures["span_s"], figures["mean_rps"], figures["burstiness"]) == (3.0, 1.0, 0.0)
    assert figures["input_tokens"] == {
        "total": 3000,
        "mean": 1000,
        "p50": 1100,
        "p90": 1200,
        "p99": 1200,
        "max": 1200,
    }
    assert (figures["blocks"], figures["shared_blocks"]) == (8, 3)
    assert figures["peak_rps"] is None
    assert any("2 rows earlier than the row before" in said for said in written["assumed"])


def test_bailian_ids_are_shared_as_prefixes_only(app: typer.Typer, tmp_path: Path) -> None:
    path = files.write(tmp_path / "t", files.SMALL["bailian"])
    out = tmp_path / "out.json"
    assert CliRunner().invoke(app, ["trace", str(path), "--json", str(out)]).exit_code == 0
    figures = json.loads(out.read_text())["figures"]
    # The second chat has blocks 11 and 12 too, but not behind block 10.
    assert (figures["blocks"], figures["shared_blocks"], figures["sessions"]) == (10, 2, 2)


def test_a_map_a_window_and_a_profile(app: typer.Typer, tmp_path: Path) -> None:
    rows = [
        *files.MOONCAKE,
        {"timestamp": 5000, "input_length": 40_000, "output_length": 5, "hash_ids": list(range(79))},
    ]
    path = files.write(tmp_path / "t", files.lines(*rows))
    (tmp_path / "map.toml").write_text(
        '[[tenant]]\nname = "long"\nmin_input_tokens = 1150\n[[tenant]]\nname = "short"\n'
    )
    out = tmp_path / "out.json"
    arguments = ["trace", str(path), "--tenants", str(tmp_path / "map.toml"), "--json", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--profile", "rtx4090-24g/llama-3.1-8b"])
    assert result.exit_code == 0, result.output
    figures = json.loads(out.read_text())["figures"]
    assert figures["tenants"] == {"long": 2, "short": 2}
    assert figures["too_long"] == 1
    assert "1 requests, for the 32,768 tokens" in " ".join(result.output.split())
    result = CliRunner().invoke(app, [*arguments, "--from", "1", "--seconds", "3"])
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["figures"]["tenants"] == {"short": 2}
    assert "figures of 1 to 4 s of 5.0 s" in result.output


@pytest.mark.parametrize(
    "arguments",
    [["--format", "moon"], ["--from", "99"], ["--profile", "abacus/llama"], ["--tenants", "none.toml"]],
)
def test_bad_arguments(app: typer.Typer, tmp_path: Path, arguments: list[str]) -> None:
    path = files.write(tmp_path / "t", files.SMALL["mooncake"])
    result = CliRunner().invoke(app, ["trace", str(path), *arguments])
    assert isinstance(result.exception, UserError)
