"""`bench workload` on a terminal of 80 columns, as JSON and as a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from harness.commands import workload_cmd
from harness.errors import UserError
from workloads.five_phase import TENANTS
from workloads.trace_parquet import load

SMALL = ["workload", "--phase", "2", "--rate-scale", "0.05"]


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    workload_cmd.register(app)
    # A second command, for typer drops the name of an only one.
    app.command("nothing")(lambda: None)
    return app


def test_describe_fits_80_columns(app: typer.Typer, tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*SMALL, "--describe", "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80
    for tenant in TENANTS:
        assert result.output.count(tenant.name) == 2
    written = json.loads(out.read_text())
    assert written["sha256"] in result.output
    assert len(written["rows"]) == 14
    assert written["totals"]["requests"] == sum(row["requests"] for row in written["rows"])
    assert [row["measured"] for row in written["rows"]] == [False] * 7 + [True] * 7


def test_export(app: typer.Typer, tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    result = CliRunner().invoke(app, [*SMALL, "--seed", "4", "--export", str(path)])
    assert result.exit_code == 0, result.output
    trace = load(path)
    assert trace.seed == 4
    assert result.output == f"{len(trace.requests)} requests written to {path}\n"


def test_list(app: typer.Typer, tmp_path: Path) -> None:
    out = tmp_path / "phases.json"
    result = CliRunner().invoke(app, ["workload", "--phase", "list", "--json", str(out)])
    assert "gold-a burst" in result.output
    assert [row["phase"] for row in json.loads(out.read_text())["phases"]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "arguments",
    [["--phase", "9"], ["--mode", "pd"], ["--json", "/proc/none/load.json"], ["--profile", "abacus/llama"]],
)
def test_bad_arguments(app: typer.Typer, arguments: list[str]) -> None:
    result = CliRunner().invoke(app, [*SMALL, *arguments])
    assert isinstance(result.exception, UserError)


@pytest.mark.parametrize("arguments", [["--seed", "x"], ["--seed", "-1"], ["--rate-scale", "0"]])
def test_wrong_numbers(app: typer.Typer, arguments: list[str]) -> None:
    assert CliRunner().invoke(app, [*SMALL, *arguments]).exit_code == 2


def test_a_profile_brings_its_rates_and_slos(app: typer.Typer, tmp_path: Path) -> None:
    from harness.profiles import load_profile

    out = tmp_path / "load.json"
    name = "rtx4090-24g/llama-3.1-8b"
    result = CliRunner().invoke(app, ["workload", "--profile", name, "--phase", "1", "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["slo_factor"] == load_profile(name).five_phase.slo_factor
