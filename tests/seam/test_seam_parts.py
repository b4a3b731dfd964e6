"""Composition of hooks, definition checks, the ledger, the receipt. No vLLM engine is built here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from patches.seam import kinds
from patches.seam.ledger import Ledger, LedgerError
from patches.seam.patch import Hooks, Knobs, PatchDefinitionError
from patches.seam.receipt import PatchTally, Tallies, write_receipt
from patches.seam.seams import KINDS, SEAMS
from tests.seam.toys import toy


def bound(*hooks: Any) -> list[kinds.Bound]:
    return [(f"p{i}", hook, PatchTally()) for i, hook in enumerate(hooks)]


# kinds


@given(st.lists(st.tuples(st.integers(), st.none() | st.floats(1, 99)), min_size=1, max_size=4))
def test_key_concatenates_parts_and_expires_with_the_first(parts: list[tuple[int, float | None]]) -> None:
    hooks = bound(*[lambda r, now, part=part: part for part in parts])
    values, until = kinds.compile_key(hooks)("request", 0.0)
    assert values == tuple(value for value, _ in parts)
    assert until == min((u for _, u in parts if u is not None), default=None)
    assert [tally.hits for _, _, tally in hooks] == [1] * len(parts)


@given(st.lists(st.integers(0, 50), max_size=4), st.integers(1, 50))
def test_cap_is_the_minimum_and_counts_those_that_cut(limits: list[int], asked: int) -> None:
    hooks = bound(*[lambda r, c, n, now, limit=limit: limit for limit in limits])
    assert kinds.compile_cap(hooks)("request", 0, asked, 0.0) == min([*limits, asked])
    assert [tally.hits for _, _, tally in hooks] == [int(limit < asked) for limit in limits]


@given(st.lists(st.integers(-3, 3), max_size=4))
def test_score_adds_hints_and_counts_those_that_say_something(hints: list[int]) -> None:
    hooks = bound(*[lambda r, hint=hint: hint for hint in hints])
    assert kinds.compile_score(hooks, "victim_hint")("request") == sum(hints)
    assert [tally.hits for _, _, tally in hooks] == [int(hint != 0) for hint in hints]


def test_score_refuses_nan() -> None:
    with pytest.raises(kinds.HookError, match="'p0'"):
        kinds.compile_score(bound(lambda r: float("nan")), "victim_hint")("request")


def test_gates_count_refusals_only() -> None:
    hooks = bound(lambda r, now: None, lambda r, now: "full")
    assert [gate("request", 0.0) for gate in kinds.compile_gates(hooks)] == [None, "full"]
    assert [tally.by_hook for _, _, tally in hooks] == [{}, {"waiting_gate": 1}]


def test_expiry_is_a_union_whose_first_rank_gives_the_reason() -> None:
    hooks = bound(
        lambda now: iter([("a", "late"), ("b", "late")]),
        lambda now: [("b", "shed"), ("c", "shed"), ("c", "again")],
        lambda now: [("a", "more")],
    )
    named = kinds.compile_expiry(hooks)(1.0)
    assert list(named.items()) == [("a", "late"), ("b", "late"), ("c", "shed")]
    assert [tally.by_hook for _, _, tally in hooks] == [{"expire": 2}, {"expire": 1}, {}]


def test_every_seam_is_a_hook_and_the_other_way_round() -> None:
    assert set(SEAMS) == set(Hooks.__dataclass_fields__)
    assert {seam.kind for seam in SEAMS.values()} <= set(KINDS)


# definition


class Undescribed(Knobs):
    wait_s: float = 1.0


class Required(Knobs):
    wait_s: float = Field(description="no default")


class Unitless(Knobs):
    wait: float = Field(1.0, description="of what unit?")


class WithUnits(Knobs):
    wait_s: float = Field(1.0, description="seconds")
    rate_tokens_per_s: float = Field(1.0, description="a rate")
    level_tokens: tuple[int, ...] = Field((1, 2), description="several")
    gain: float = Field(1.0, description="unit given apart", json_schema_extra={"unit": "dB"})
    enabled: bool = Field(True, description="needs no unit")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "Bad"}, "lower case"),
        ({"name": "a__b"}, "lower case"),
        ({"area": "gpu"}, "is not one of"),
        ({"why": " "}, "must not be empty"),
        ({"ranks": {}}, "needs a rank"),
        ({"ranks": {"request_key": 1, "token_cap": 2}}, "not a ranked seam"),
        ({"requires": ("x",), "conflicts": ("x",)}, "is in both"),
        ({"requires": ("bad",), "name": "bad"}, "itself"),
        ({"knobs": Undescribed}, "no description"),
        ({"knobs": Required}, "no default"),
        ({"knobs": Unitless}, "unit"),
    ],
)
def test_wrong_definitions_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PatchDefinitionError, match=message):
        toy(fields.pop("name", "good"), lambda k, c: Hooks(), "request_key", **dict(fields))


def test_unknown_and_repeated_seams_are_refused() -> None:
    for seams, message in (((), "at least one"), (("on_add", "on_add"), "twice")):
        with pytest.raises(PatchDefinitionError, match=message):
            toy("good", lambda k, c: Hooks(), *seams)
    with pytest.raises(PatchDefinitionError, match="not a seam"):
        toy("good", lambda k, c: Hooks(), "nowhere", ranks={})


def test_units_come_from_names() -> None:
    patch = toy("good", lambda k, c: Hooks(), "on_add", knobs=WithUnits)
    units = [patch.unit(name) for name in WithUnits.model_fields]
    assert units == ["s", "tokens/s", "tokens", "dB", ""]


# ledger


class Base:
    def inherited(self) -> str:
        return "base"


class Owner(Base):
    def first(self) -> str:
        return "first"

    @staticmethod
    def second() -> str:
        return "second"

    @classmethod
    def third(cls) -> str:
        return "third"


def test_undo_restores_raw_entries_and_their_order() -> None:
    before = list(vars(Owner).items())
    ledger = Ledger()
    ledger.replace(Owner, "second", lambda: "changed")
    ledger.replace(Owner, "first", lambda self: "changed")
    ledger.replace(Owner, "first", lambda self: "changed again")
    ledger.replace(Owner, "third", None)
    ledger.replace(Owner, "inherited", lambda self: "shadowed")
    assert Owner.second() == "changed"
    assert Owner().inherited() == "shadowed"
    ledger.undo()
    after = list(vars(Owner).items())
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(a is b for (_, a), (_, b) in zip(after, before, strict=True))
    assert "inherited" not in vars(Owner)


def test_undo_refuses_to_trample_on_a_later_change() -> None:
    ledger = Ledger()
    original = vars(Owner)["first"]
    ours = lambda self: "ours"  # noqa: E731
    ledger.replace(Owner, "second", lambda: "changed")
    ledger.replace(Owner, "first", ours)
    Owner.first = lambda self: "theirs"  # type: ignore[method-assign]
    with pytest.raises(LedgerError, match=r"Owner\.first"):
        ledger.undo()
    assert Owner.second() == "changed"
    Owner.first = ours  # type: ignore[method-assign]
    ledger.undo()
    assert vars(Owner)["first"] is original


# receipt


def test_receipt_counts_and_asks_gauges_when_written(tmp_path: Path) -> None:
    tallies = Tallies(["a", "b"])
    level = {"now": 1.0}
    tallies["a"].add("request_key", 3)
    tallies["a"].add("promoted")
    tallies["a"].gauges["level"] = lambda: level["now"]
    level["now"] = 2.0
    path = tmp_path / "deep" / "receipt.json"
    write_receipt(path, tallies.receipt("abc"))
    receipt = json.loads(path.read_text())
    assert receipt.pop("pid") > 0
    assert receipt == {
        "schema": 1,
        "plan_sha256": "abc",
        "hooks": {
            "a": {"hits": 4, "by_hook": {"promoted": 1, "request_key": 3}},
            "b": {"hits": 0, "by_hook": {}},
        },
        "metrics": {"a": {"level": 2.0}, "b": {}},
    }
    assert tallies.never_fired() == ("b",)
    assert [p.name for p in path.parent.iterdir()] == ["receipt.json"]
    tallies.reset()
    assert tallies.never_fired() == ("a", "b")
