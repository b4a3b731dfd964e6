"""Plans, the registry, knob values, the catalogue: what a user may type, and what is said when it is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from patches.catalogue import CATALOGUE
from patches.seam import registry
from patches.seam.patch import Hooks
from patches.seam.plan import PatchPlan, resolve
from tests.seam.toys import toy

REVERSE, LONGFIRST = "tests.seam.toys.reverse", "tests.seam.toys.longfirst"


def write_patch(folder: Path, name: str, **fields: Any) -> str:
    """A patch module in a package of its own below `folder`; its import path."""
    package = folder / f"outside_{name}"
    package.mkdir()
    (package / "__init__.py").write_text("")
    seams = fields.pop("seams", ("on_add",))
    (package / "patch.py").write_text(
        "from patches.seam.patch import Hooks\n"
        "from tests.seam.toys import toy\n"
        f"PATCH = toy({name!r}, lambda k, c: Hooks(), *{seams!r}, **{fields!r})\n"
    )
    return f"outside_{name}.patch"


def test_the_catalogue_has_all_29_once() -> None:
    assert len(CATALOGUE) == 29
    assert len({entry.name for entry in CATALOGUE}) == 29
    assert [entry.number for entry in CATALOGUE] == [
        f"{letter}{i}"
        for letter, n in (("S", 8), ("K", 5), ("D", 5), ("P", 6), ("F", 5))
        for i in range(1, n + 1)
    ]
    assert all(entry.state in ("built", "planned") for entry in CATALOGUE)


def test_every_built_patch_agrees_with_the_catalogue() -> None:
    for entry in CATALOGUE:
        if entry.built:
            patch = registry.find(entry.name)
            assert (patch.name, patch.number, patch.area) == (entry.name, entry.number, entry.area)


def test_empty_plan_is_stock() -> None:
    plan = resolve("")
    assert plan.label == "stock"
    assert plan.order() == {}
    assert plan.targets() == ()


def test_order_comes_from_ranks_not_from_the_command_line() -> None:
    for enable in (f"{REVERSE},{LONGFIRST}", f"{LONGFIRST}, {REVERSE}", [LONGFIRST, REVERSE]):
        plan = resolve(enable)
        assert plan.names == ("longfirst", "reverse")
        assert plan.label == "longfirst+reverse"
        assert plan.on_seam("request_key") == ("reverse", "longfirst")
        assert plan.order() == {"request_key": ("reverse", "longfirst")}
        assert plan.sha256() == resolve(f"{REVERSE},{LONGFIRST}").sha256()


def test_plan_travels_as_json() -> None:
    plan = resolve([REVERSE, LONGFIRST], ["reverse.bucket_requests=4"])
    again = PatchPlan.from_json(plan.to_json())
    assert again == plan
    assert again.sha256() == plan.sha256() != resolve([REVERSE, LONGFIRST]).sha256()
    assert again.knobs == {"longfirst": {}, "reverse": {"bucket_requests": 4}}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 2, "patches": []}', '{"schema": 1, "patches": [3]}']
)
def test_text_that_is_no_plan_is_one_clear_line(text: str) -> None:
    with pytest.raises(UserError, match="not a patch plan"):
        PatchPlan.from_json(text)


def test_knobs_from_a_table_and_from_set_which_wins() -> None:
    plan = resolve(REVERSE, ["reverse.bucket_requests=7"], {"reverse": {"bucket_requests": 3}})
    assert plan.knobs["reverse"]["bucket_requests"] == 7
    assert (
        resolve(REVERSE, knobs={"reverse": {"bucket_requests": 3}}).knobs["reverse"]["bucket_requests"] == 3
    )


@pytest.mark.parametrize(
    ("sets", "parts"),
    [
        (
            ["reverse.bucket_requests=many"],
            ["reverse.bucket_requests='many'", "int in requests", "bench explain"],
        ),
        (["reverse.bucket_requests=5s"], ["reverse.bucket_requests='5s'", "int in requests"]),
        (["reverse.bucket_requests=2.5"], ["reverse.bucket_requests='2.5'", "int in requests"]),
        (["reverse.bucket_requests=0"], ["greater than or equal to 1"]),
        (["reverse.bucket_request=5"], ["no knob 'bucket_request'", "did you mean reverse.bucket_requests?"]),
        (["reverse.x=5"], ["no knob 'x'", "its knobs: bucket_requests"]),
        (["qos.short_prompt_tokens=5"], ["'qos' is not enabled", "enabled: reverse"]),
        (["reverse"], ["expected patch.knob=value"]),
        (["reverse=5"], ["expected patch.knob=value"]),
        (["=5"], ["expected patch.knob=value"]),
    ],
)
def test_wrong_knobs_are_one_clear_line(sets: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        resolve(REVERSE, sets)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_knobs_must_be_a_table() -> None:
    with pytest.raises(UserError, match="must be a table"):
        resolve(REVERSE, knobs={"reverse": 5})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("enable", "parts"),
    [
        ("qoss", ["unknown patch 'qoss'", "did you mean qos"]),
        ("zzzzzz", ["unknown patch 'zzzzzz'", "bench patches"]),
        ("fleet", ["P6", "planned, not built yet"]),
        ("tests.seam.toys", ["is no patch", "PATCH = Patch(...)"]),
        ("no_such_package.patch", ["cannot import", "no_such_package", "PYTHONPATH"]),
        ("tests.seam.toys.nothere", ["cannot import", "nothere"]),
        ("bad path.x", ["not an import path"]),
        (f"{REVERSE},{REVERSE}", ["'reverse' is enabled twice"]),
    ],
)
def test_wrong_names_are_one_clear_line(enable: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        resolve(enable)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_patches_that_do_not_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    needs = write_patch(tmp_path, "needs", requires=("reverse",))
    hates = write_patch(tmp_path, "hates", conflicts=("reverse",))
    same = write_patch(tmp_path, "same", seams=("request_key",), rank=10)
    owner = write_patch(tmp_path, "owner", seams=("eviction_owner",))
    other = write_patch(tmp_path, "other", seams=("eviction_owner",))
    late, later = (write_patch(tmp_path, n, seams=("expire",), rank=10) for n in ("late", "later"))
    for enable, message in (
        ([needs], "requires 'reverse'; add it: --enable needs,reverse"),
        ([hates, REVERSE], "'hates' and 'reverse' conflict"),
        ([REVERSE, hates], "conflict"),
        ([REVERSE, same], "both declare rank 10 on the seam request_key"),
        ([owner, other], "both own the seam eviction_owner"),
        ([late, later], "both declare rank 10 on the seam expire"),
    ):
        with pytest.raises(UserError) as caught:
            resolve(enable)
        assert message in str(caught.value)
    assert resolve([needs, REVERSE]).names == ("needs", "reverse")


def test_package_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    monkeypatch.chdir(tmp_path)
    assert resolve(write_patch(tmp_path, "here")).names == ("here",)


def test_module_that_fails_or_is_wrongly_defined_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "outside_broken.py").write_text("1 / 0\n")
    (tmp_path / "outside_pkg").mkdir()
    (tmp_path / "outside_pkg" / "broken.py").write_text("1 / 0\n")
    with pytest.raises(UserError, match="fails when imported: ZeroDivisionError"):
        resolve("outside_pkg.broken")
    wrong = write_patch(tmp_path, "wrong", area="gpu")
    with pytest.raises(UserError, match="area: 'gpu'"):
        resolve(wrong)


def test_patch_metadata_cannot_be_changed_afterwards() -> None:
    patch = toy("fixed", lambda k, c: Hooks(), "request_key")
    with pytest.raises(AttributeError):
        patch.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        patch.ranks["request_key"] = 1  # type: ignore[index]


def test_plan_json_holds_no_path() -> None:
    data = json.loads(resolve(REVERSE).to_json())
    assert data["patches"] == [{"source": REVERSE, "knobs": {"bucket_requests": 1}}]


def test_a_wrong_value_of_a_table_names_type_and_default_in_plain_words() -> None:
    """Bounds inside a type, and a default that is made anew each time, are no reason to show pydantic's own words."""
    with pytest.raises(UserError) as wrong:
        resolve("wfq", ["wfq.tenant_weight=x"])
    assert "expected dict[str, float]" in str(wrong.value) and "default {}" in str(wrong.value)
    with pytest.raises(UserError, match="greater than 0"):
        resolve("wfq", ['wfq.tenant_weight={"a": -1}'])
