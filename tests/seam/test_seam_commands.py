"""`bench patches|explain|plan|doctor`, the pages of the patches, and `new_patch.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from harness import doctor
from harness.commands import patches_cmd
from harness.errors import RunFailed, UserError
from scripts import new_patch, patch_docs

REVERSE = "tests.seam.toys.reverse"


def bench(*arguments: str) -> Result:
    app = typer.Typer(rich_markup_mode=None)
    patches_cmd.register(app)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80", "TERM": "dumb"})


def test_patches_lists_all_29_within_80_columns(tmp_path: Path) -> None:
    path = tmp_path / "patches.json"
    result = bench("patches", "--json", str(path))
    assert result.exit_code == 0
    assert max(len(line.rstrip()) for line in result.output.splitlines()) <= 80
    rows = json.loads(path.read_text())["patches"]
    assert len(rows) == 29
    assert all(row["name"] in result.output for row in rows)


def test_explain_says_everything(tmp_path: Path) -> None:
    path = tmp_path / "explain.json"
    result = bench("explain", REVERSE, "--json", str(path))
    assert result.exit_code == 0
    for text in (
        "why",
        "how",
        "bucket_requests",
        "requests that share",
        "request_key",
        "10",
        "measured against",
    ):
        assert text in result.output
    data = json.loads(path.read_text())
    assert data["knobs"][0] == {
        "name": "bucket_requests",
        "type": "int",
        "unit": "requests",
        "default": 1,
        "description": "requests that share one place in the order",
    }


def test_plan_prints_the_order_and_writes_what_the_environment_takes(tmp_path: Path) -> None:
    path, knobs = tmp_path / "plan.json", tmp_path / "knobs.toml"
    knobs.write_text("[reverse]\nbucket_requests = 3\n")
    result = bench(
        "plan", "--enable", f"tests.seam.toys.longfirst,{REVERSE}", "--knobs", str(knobs), "--json", str(path)
    )
    assert result.exit_code == 0
    assert "reverse (10) > longfirst (20)" in result.output
    data = json.loads(path.read_text())
    assert data["knobs"]["reverse"] == {"bucket_requests": 3}
    assert json.loads(data["plan"])["schema"] == 1
    # --set wins over the file.
    result = bench("plan", "--enable", REVERSE, "--knobs", str(knobs), "--set", "reverse.bucket_requests=4")
    assert "bucket_requests=4" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "qosss"], "did you mean qos"),
        (["plan", "--enable", REVERSE, "--set", "reverse.bucket_requests=x"], "int in requests"),
        (["plan", "--enable", REVERSE, "--knobs", "nowhere.toml"], "nowhere.toml: No such file"),
    ],
)
def test_wrong_input_is_a_user_error(arguments: list[str], message: str) -> None:
    result = bench(*arguments)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


def test_knobs_that_are_not_toml(tmp_path: Path) -> None:
    path = tmp_path / "knobs.toml"
    path.write_text("not toml")
    with pytest.raises(UserError, match="not TOML"):
        patches_cmd.read_knobs(path)


def test_doctor_reports_each_check_and_fails_on_a_required_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "doctor.json"
    result = bench("doctor", "--json", str(path))
    data = json.loads(path.read_text())
    assert (result.exit_code == 0) == data["ok"]
    names = [check["name"] for check in data["checks"]]
    assert names[:5] == ["python", "vllm", "upstream.lock", "entry point", "torch"]
    assert all(check["ok"] or check["fix"] for check in data["checks"])
    monkeypatch.setattr(
        doctor, "python", lambda: doctor.Check("python", False, True, "2.7", "install a newer one")
    )
    result = bench("doctor")
    assert isinstance(result.exception, RunFailed)
    assert "install a newer one" in result.output


# pages


def test_pages_are_fresh() -> None:
    assert patch_docs.stale(patch_docs.FOLDER, patch_docs.pages()) == []


def test_stale_missing_and_left_over_pages_are_named(tmp_path: Path) -> None:
    wanted = {"README.md": "index\n", "a.md": "a\n", "b.md": "b\n"}
    patch_docs.write(tmp_path, wanted)
    assert patch_docs.stale(tmp_path, wanted) == []
    (tmp_path / "a.md").write_text("edited\n")
    (tmp_path / "b.md").unlink()
    (tmp_path / "c.md").write_text("old\n")
    assert patch_docs.stale(tmp_path, wanted) == [
        "a.md: stale",
        "b.md: missing",
        "c.md: belongs to no built patch",
    ]
    patch_docs.write(tmp_path, wanted)
    assert patch_docs.stale(tmp_path, wanted) == []


def test_page_of_a_patch_holds_its_knobs_and_seams() -> None:
    from tests.seam.toys.reverse import PATCH

    page = patch_docs.page(PATCH)
    assert "| `bucket_requests` | int | requests | `1` | requests that share one place in the order |" in page
    assert "| `request_key` | key | 10 |" in page


# new_patch


def test_new_patch_makes_three_files_that_work(tmp_path: Path, root: Path) -> None:
    assert new_patch.main(["round_robin", "scheduling", "--root", str(tmp_path)]) == 0
    module = tmp_path / "patches" / "scheduling" / "round_robin.py"
    assert (tmp_path / "tests" / "scheduling" / "test_round_robin.py").is_file()
    assert (tmp_path / "docs" / "patches" / "round_robin.md").is_file()
    code = (
        f"import runpy; patch = runpy.run_path({str(module)!r})['PATCH']\n"
        "assert patch.name == 'round_robin' and patch.area == 'scheduling'\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)
    ruff = [sys.executable, "-m", "ruff", "check", "--config", str(root / "pyproject.toml")]
    files = sorted(str(p) for p in tmp_path.rglob("*.py"))
    assert subprocess.run([*ruff, *files], cwd=root, capture_output=True).returncode == 0
    # Nothing that exists is overwritten.
    module.write_text("mine")
    assert new_patch.main(["round_robin", "scheduling", "--root", str(tmp_path)]) == 2
    assert module.read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "area", "message"),
    [
        ("Bad-Name", "kv", "no name for a patch"),
        ("fine", "gpu", "no area"),
        ("wfq", "kv", "S6 of the catalogue"),
    ],
)
def test_new_patch_refuses(name: str, area: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        new_patch.plan(name, area, "", tmp_path)


def test_new_patch_takes_the_catalogues_number_and_summary(tmp_path: Path) -> None:
    (module, *_), *_ = [list(new_patch.plan("wfq", "scheduling", "", tmp_path).values())]
    assert 'number="S6"' in module
    assert "weighted fair queueing" in module
