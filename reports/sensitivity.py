"""Does a verdict hold when the profile is off? Compares what `bench sensitivity` has recomputed.

The rule. A verdict is recomputed on fewer seeds than it was made on, so its fair comparator is the same
difference on those same seeds under the profile itself. The winner changes under an assumption when the
recomputed difference has the other sign than that one; then the verdict is undetermined. The signs of two
numbers are compared, however small they are, and no test is made: noise can only take a verdict away, never
make one, and more seeds make that rarer. A cell says nothing, and takes nothing away, where

- those seeds alone contradict the verdict under the profile itself already: they are too few for it;
- the figure has too few samples or blocks of time there, or one of the arms is not valid there;
- the two arms served different shares of what was offered there, so that their latencies are not ranked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from harness.assumptions import FOLDER, LEFT_OUT, VARIATIONS, Assumptions, variation
from harness.metrics.scope import Scope
from harness.papers import Json
from harness.records import PLAN, ArmRecord, is_complete, load_arm, read_json, read_plan
from harness.stats.compare import Difference
from reports.comparisons import BASELINES, compare_one
from reports.evaluated import EvaluatedArm, evaluated
from reports.wording import change


@dataclass(frozen=True, slots=True)
class Recomputed:
    """One assumption that was tried: its folder, and the seeds of each arm that are complete there."""

    assumed: Assumptions
    folder: Path
    seeds: Mapping[str, tuple[int, ...]]


def main_baseline(arms: Sequence[str]) -> str:
    """The baseline that claims are made over: tuned, or stock where tuned was not run."""
    return "tuned" if "tuned" in arms else "stock"


def decisive(rows: Sequence[Json], arms: Sequence[str]) -> list[Json]:
    """The comparisons to recompute: those of patched arms with the main baseline that are better or worse.

    A verdict that a recomputation has taken back counts by what it was before.
    """
    main = main_baseline(arms)
    mine = [row for row in rows if row["baseline"] == main and row["arm"] not in BASELINES]
    return [row for row in mine if _before(row) in ("better", "worse")]


def _before(row: Json) -> str:
    return str(row.get("data_verdict", row["verdict"]) if "sensitivity" in row else row["verdict"])


def judge(
    run_dir: Path, arms: Sequence[EvaluatedArm], rows: Sequence[Json]
) -> tuple[list[Json], Json | None]:
    """The comparisons with what was recomputed of them, and the summary's entry; None where nothing was.

    Args:
        arms: those of the run itself, evaluated in every scope.
        rows: its comparisons, not judged before.
    """
    names = [arm.name for arm in arms]
    tried = [one for one in _tried(run_dir, names) if len(one.seeds) > 1]
    if not tried:
        return list(rows), None
    wanted = decisive(rows, names)
    cells = _Cells(arms, {str(row["scope"]) for row in wanted})
    found = {_key(row): [cells.of(row, one) for one in tried] for row in wanted}
    entry = {
        "baseline": main_baseline(names),
        "assumptions": [_described(one) for one in tried],
        "untried": _untried(run_dir, arms, {one.assumed.name for one in tried}),
        "verdicts": len(found),
        "recomputed": sum(any("reason" not in cell for cell in row) for row in found.values()),
        "changed": sum(any(cell["flips"] for cell in row) for row in found.values()),
    }
    return [_judged(row, found.get(_key(row))) for row in rows], entry


def _key(row: Json) -> tuple[str, ...]:
    return row["arm"], row["baseline"], row["scope"], row["metric"]


def _tried(run_dir: Path, arms: Sequence[str]) -> list[Recomputed]:
    """What lies beside the run, in the order in which assumptions are listed."""
    order = {one.name: i for i, one in enumerate(VARIATIONS)}
    found = []
    for path in sorted(run_dir.glob(f"{FOLDER}/*/{PLAN}")):
        raw = read_plan(path.parent).get("assumptions")
        if raw is None:
            continue
        assumed, seeds = Assumptions.from_json(raw), {arm: _complete(path.parent / arm) for arm in arms}
        found.append(Recomputed(assumed, path.parent, {arm: done for arm, done in seeds.items() if done}))
    return sorted(found, key=lambda one: (order.get(one.assumed.name, len(order)), one.assumed.name))


def _complete(folder: Path) -> tuple[int, ...]:
    numbers = [place.name.removeprefix("seed-") for place in folder.glob("seed-*") if is_complete(place)]
    return tuple(sorted(int(number) for number in numbers if number.isdecimal()))


def _described(one: Recomputed) -> Json:
    known = variation(one.assumed.name)
    label, clause = (
        (known.label, known.clause) if known else (one.assumed.name, f"{one.assumed.name} is assumed")
    )
    seeds = sorted({seed for seeds in one.seeds.values() for seed in seeds})
    return {**one.assumed.to_json(), "label": label, "clause": clause, "seeds": seeds}


def _untried(run_dir: Path, arms: Sequence[EvaluatedArm], tried: set[str]) -> list[Json]:
    """Assumptions that were not made, each with the reason where there is one."""
    path = run_dir / FOLDER / LEFT_OUT
    why = read_json(path) if path.is_file() else {}
    manifests = [record.manifest for arm in arms for record in arm.records]
    cpu_us = float(manifests[0].get("profile", {}).get("cpu_step_us", 0.0))
    missing = [one for one in VARIATIONS if one.name not in tried and one.cpu_step_us != cpu_us]
    return [{"name": one.name, "label": one.label, "reason": str(why.get(one.name, ""))} for one in missing]


class _Cells:
    """Differences on a few seeds; each arm is evaluated once under each assumption."""

    def __init__(self, arms: Sequence[EvaluatedArm], scopes: set[str]) -> None:
        self._arms = {arm.name: arm for arm in arms}
        self._scopes = {str(scope): scope for arm in arms for scope in arm.estimates if str(scope) in scopes}
        self._known: dict[tuple[str, str, tuple[int, ...]], EvaluatedArm] = {}

    def of(self, row: Json, under: Recomputed) -> Json:
        """One verdict under one assumption: both changes, percent, or in `reason` why they say nothing."""
        out: Json = {"assumption": under.assumed.name, "base_pct": None, "delta_pct": None, "flips": False}
        names, scope = (str(row["arm"]), str(row["baseline"])), self._scopes[str(row["scope"])]
        ran = [set(under.seeds.get(name, ())) & {r.seed for r in self._arms[name].records} for name in names]
        seeds = tuple(sorted(ran[0] & ran[1]))
        if not seeds:
            return {**out, "reason": "this arm was not recomputed"}
        base = self._difference(names, seeds, scope, row["metric"], None)
        there = self._difference(names, seeds, scope, row["metric"], under)
        out["base_pct"], out["delta_pct"] = _percent(base), _percent(there)
        for found, where in ((base, "on these seeds"), (there, "under this assumption")):
            if found.change is None or found.reason:
                return {**out, "reason": f"{where}: {found.reason}"}
        assert base.change is not None and there.change is not None
        whole = row["delta_pct"] if row["delta_pct"] is not None else row.get("delta", 0.0)
        if base.change * whole <= 0:
            return {**out, "reason": "these seeds alone do not show the verdict; recompute it on more"}
        return {**out, "flips": base.change * there.change < 0}

    def _difference(
        self,
        names: tuple[str, str],
        seeds: tuple[int, ...],
        scope: Scope,
        metric: str,
        under: Recomputed | None,
    ) -> Difference:
        ours, theirs = (self._evaluated(name, seeds, under) for name in names)
        return compare_one(ours, theirs, scope, metric)

    def _evaluated(self, name: str, seeds: tuple[int, ...], under: Recomputed | None) -> EvaluatedArm:
        key = ("" if under is None else under.assumed.name, name, seeds)
        if key not in self._known:
            whole = self._arms[name]
            own = {record.seed: record for record in whole.records}
            records = [
                own[seed] if under is None else load_arm(under.folder / name / f"seed-{seed}")
                for seed in seeds
            ]
            scopes = [scope for scope in self._scopes.values() if scope in whole.estimates]
            made = evaluated(name, whole.plan, tuple(records), scopes=scopes, replicates=0)
            self._known[key] = replace(made, records=tuple(map(_without_tables, made.records)))
        return self._known[key]


def _without_tables(record: ArmRecord) -> ArmRecord:
    """A run has many arms and assumptions: their tables together would not fit into memory."""
    none = pd.DataFrame()
    return replace(record, requests=none, tokens=none, steps=none, events=none)


def _percent(found: Difference) -> float | None:
    return None if found.change is None else found.percent(found.change)


def _judged(row: Json, cells: list[Json] | None) -> Json:
    if cells is None:
        return row
    flips = [cell for cell in cells if cell["flips"]]
    if not flips:
        return {**row, "sensitivity": cells}
    reason = "the winner changes " + " and ".join(map(_flip_text, flips))
    taken = {"verdict": "undetermined", "data_verdict": row["verdict"], "reason": reason}
    return {**row, **taken, "sensitivity": cells}


def _flip_text(cell: Json) -> str:
    known = variation(cell["assumption"])
    when = known.clause if known else f"{cell['assumption']} is assumed"
    return f"when {when} ({_change(cell['delta_pct'])} instead of {_change(cell['base_pct'])})"


def _change(percent: float | None) -> str:
    return "a change from 0" if percent is None else change(percent)
