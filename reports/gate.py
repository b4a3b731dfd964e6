"""Does a candidate run keep what a base run had? The gates of a TOML file, checked arm by arm.

    [[gate]]
    metric = "short_ttft_ms_p99"
    scope = "phase:3-5"        # default: all
    arm = "qos+mlfq+slru"      # default: every arm of the base
    margin_pct = 5.0           # how much worse it may get
    better = "lower"           # only for a figure whose direction the project does not know

A figure fails if it is worse by more than the margin and by more than chance explains. Where both
sides hold records of the same traces the difference is paired, block by block, and corrected over the
gates; otherwise it is set against both summaries' intervals.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.errors import UserError
from harness.metrics.evaluate import evaluate
from harness.metrics.pool import pool_of, windows_of
from harness.metrics.registry import METRICS
from harness.metrics.scope import Scope, parse_scope
from harness.papers import Json, Summary, checked
from harness.records import PLAN, SUMMARY, ArmRecord, arm_dir, is_complete, load_run, read_json, read_plan
from harness.stats.blocks import BlockGrid
from harness.stats.bootstrap import Weights
from harness.stats.compare import Difference, difference, outcomes
from reports.summary import current_summary

State = Literal["ok", "worse", "missing", "invalid"]


class Gate(BaseModel):
    """One line that a candidate may not cross."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str = Field(description="name of the metric")
    scope: str = Field(
        default="all", description="all, phase:3, tier:gold, tenant:silver-0, or two joined by /"
    )
    arm: str | None = Field(default=None, description="name of the arm; every arm of the base if left out")
    margin_pct: float = Field(default=2.0, ge=0, description="how much worse it may get, percent")
    better: Literal["lower", "higher"] | None = Field(default=None, description="the good direction")


class GateFile(BaseModel):
    """A file of gates."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gate: list[Gate] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs: its summary, and its records where there are any."""

    path: Path
    summary: Json
    run_dir: Path | None

    def arm(self, name: str) -> Mapping[str, Any] | None:
        """The summary's arm of that name."""
        return next((arm for arm in self.summary["arms"] if arm["name"] == name), None)


@dataclass(frozen=True, slots=True)
class Checked:
    """One gate on one arm. `change_pct` and `ci95` are relative to the base; how they came about is `method`."""

    gate: Gate
    arm: str
    state: State
    base: float | None
    candidate: float | None
    change_pct: float | None
    ci95: tuple[float, float] | None
    method: str
    text: str

    def json(self) -> Json:
        """As `bench compare --json` writes it."""
        return {
            "arm": self.arm,
            "metric": self.gate.metric,
            "scope": self.gate.scope,
            "margin_pct": self.gate.margin_pct,
            "state": self.state,
            "base": self.base,
            "candidate": self.candidate,
            "change_pct": self.change_pct,
            "ci95": self.ci95,
            "method": self.method,
            "text": self.text,
        }


def read_gates(path: Path) -> list[Gate]:
    """The gates of a TOML file; UserError saying what is wrong with it."""
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(
            f"gate file {path} cannot be read: {(error.strerror or str(error)).lower()}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"gate file {path} is no TOML: {error}") from None
    try:
        gates = GateFile.model_validate(raw).gate
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"gate file {path}, {where}: {first['msg'].lower()}; see `bench compare --help`"
        ) from None
    for gate in gates:
        parse_scope(gate.scope)
        direction_of(gate)
    return gates


def direction_of(gate: Gate) -> str:
    """The good direction of a gated metric; UserError where nobody says it."""
    known = METRICS.get(gate.metric)
    if gate.better is not None:
        return gate.better
    if known is None:
        raise UserError(
            f'gate on {gate.metric}: not a metric of the report; if a patch counts it, add better = "lower"'
        )
    if known.better == "neither":
        raise UserError(
            f'gate on {gate.metric}: neither direction is a win for it; add better = "lower" or "higher"'
        )
    return known.better


def read_side(path: Path) -> Side:
    """A run's folder or a summary.json.

    A summary beside records is made anew where it does not fit them; one without records is taken as it is.

    Raises:
        UserError: there is neither, or a file is damaged.
    """
    if path.is_dir():
        if (path / PLAN).is_file() and (_has_records(path) or not (path / SUMMARY).is_file()):
            return Side(path, current_summary(path), path)
        if (path / SUMMARY).is_file():
            return Side(path, _summary(path / SUMMARY), None)
        raise UserError(
            f"{path} is no run (neither {SUMMARY} nor {PLAN}): name a run's folder or a {SUMMARY}"
        )
    return Side(path, _summary(path), None)


def check(base: Side, candidate: Side, gates: Sequence[Gate]) -> list[Checked]:
    """Check all gates; without `arm`, a gate is checked on every arm of the base.

    Raises:
        UserError: a gate's scope is in neither run.
    """
    for gate in gates:
        _check_scope(base, candidate, gate)
    pairs = [
        (gate, name)
        for gate in gates
        for name in ([gate.arm] if gate.arm else [str(arm["name"]) for arm in base.summary["arms"]])
    ]
    paired = _paired(base, candidate, pairs)
    return [_check(base, candidate, gate, name, paired.get((gate, name))) for gate, name in pairs]


def _has_records(run: Path) -> bool:
    plan = read_plan(run)
    return any(is_complete(arm_dir(run, arm["name"], seed)) for arm in plan["arms"] for seed in plan["seeds"])


def _summary(path: Path) -> Json:
    return checked(Summary, read_json(path), path, "make it anew with `bench report`")


def _check_scope(base: Side, candidate: Side, gate: Gate) -> None:
    arms = [arm for side in (base, candidate) for arm in side.summary["arms"]]
    scope = parse_scope(gate.scope)
    if any(_figures(arm, scope) for arm in arms):
        return
    known = [f"phase:{name}" for arm in arms for name in arm["by_phase"]]
    known += [name for arm in arms for name in arm["by_scope"] if "/" not in name]
    known += [f"tenant:{name}" for arm in arms for name in arm["by_tenant"]]
    raise UserError(
        f"gate on {gate.metric}: scope {gate.scope} is in neither run; they have all, "
        f"{', '.join(dict.fromkeys(known))}"
    )


def _check(base: Side, candidate: Side, gate: Gate, name: str, paired: tuple[float, float] | None) -> Checked:
    ours, theirs = candidate.arm(name), base.arm(name)

    def done(state: State, text: str, method: str = "none", **values: Any) -> Checked:
        known = {"base": None, "candidate": None, "change_pct": None, "ci95": None}
        return Checked(gate, name, state, method=method, text=text, **{**known, **values})

    for arm, side in ((theirs, base), (ours, candidate)):
        if arm is None:
            return done("missing", f"no arm {name} in {side.path}")
        if not arm.get("valid", True):
            why = ", ".join(str(reason.get("code", reason)) for reason in arm.get("reasons", []))
            return done("invalid", f"arm {name} in {side.path} is invalid: {why}")
    assert ours is not None and theirs is not None
    old, new = _value(theirs, gate), _value(ours, gate)
    if old is None and new is None:
        return done("missing", f"{gate.metric} in {gate.scope} is in neither run")
    for value, side in ((old, base), (new, candidate)):
        if value is None:
            return done("missing", f"{gate.metric} in {gate.scope} is not in {side.path}")
    assert old is not None and new is not None
    before, after = old["value"], new["value"]
    if before is None and after is None:
        return done("ok", f"no value in either run: {new.get('reason', '')}")
    if before is None or after is None:
        side, value = (base, old) if before is None else (candidate, new)
        return done(
            "missing", f"no value in {side.path}: {value.get('reason', '')}", base=before, candidate=after
        )
    interval, method = (paired, "paired") if paired else (_unpaired(old, new), "intervals")
    return _judged(gate, name, before, after, interval, method)


def _judged(
    gate: Gate, name: str, before: float, after: float, interval: tuple[float, float], method: str
) -> Checked:
    """`interval` holds the lowest and highest believable change, in the metric's unit."""
    low, high = interval
    sign = 1.0 if direction_of(gate) == "lower" else -1.0
    beyond_chance = low > 0 if sign > 0 else high < 0
    allowed = gate.margin_pct / 100 * abs(before)
    worse = beyond_chance and sign * (after - before) > allowed
    percent = None if before == 0 else 100 * (after - before) / abs(before)
    ci = None if before == 0 else (100 * low / abs(before), 100 * high / abs(before))
    moved = f"{before:.6g} -> {after:.6g}" + ("" if percent is None else f" ({percent:+.1f}%)")
    text = f"{moved}, worse than the margin of {gate.margin_pct:g}% allows" if worse else moved
    return Checked(gate, name, "worse" if worse else "ok", before, after, percent, ci, method, text)


def _unpaired(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[float, float]:
    """The change's interval from two independent ones: their arms add up in squares."""
    change = new["value"] - old["value"]
    old_low, old_high = old.get("ci95") or (old["value"], old["value"])
    new_low, new_high = new.get("ci95") or (new["value"], new["value"])
    down = math.hypot(new["value"] - new_low, old_high - old["value"])
    up = math.hypot(new_high - new["value"], old["value"] - old_low)
    return change - down, change + up


def _value(arm: Mapping[str, Any], gate: Gate) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = _figures(arm, parse_scope(gate.scope)).get(gate.metric)
    return found


def _figures(arm: Mapping[str, Any], scope: Scope) -> Mapping[str, Any]:
    """A summary's figures in a scope; empty where it has none."""
    parts = dict(part.partition(":")[::2] for part in str(scope).split("/"))
    if str(scope) == "all":
        values = arm["metrics"]
    elif scope.tier is not None:
        values = arm["by_scope"].get(str(scope), {})
    elif set(parts) == {"tenant", "phase"}:
        values = arm["by_tenant_phase"].get(parts["tenant"], {}).get(parts["phase"], {})
    else:
        ((kind, name),) = parts.items()
        values = arm[f"by_{kind}"].get(name, {})
    found: Mapping[str, Any] = values
    return found


def _paired(
    base: Side, candidate: Side, pairs: Sequence[tuple[Gate, str]]
) -> dict[tuple[Gate, str], tuple[float, float]]:
    """Believable changes by paired blocks, for the arms whose records both sides have."""
    if base.run_dir is None or candidate.run_dir is None:
        return {}
    old_run, new_run = load_run(base.run_dir), load_run(candidate.run_dir)
    labels: list[tuple[Gate, str]] = []
    differences: list[Difference] = []
    for name in dict.fromkeys(name for _, name in pairs):
        old, new = old_run.arms.get(name, ()), new_run.arms.get(name, ())
        gates = [gate for gate, arm in pairs if arm == name and gate.metric in METRICS]
        if not old or not gates or _trace(old) != _trace(new) or windows_of(old[0]) != windows_of(new[0]):
            continue
        scopes = list(dict.fromkeys(parse_scope(gate.scope) for gate in gates))
        weights = Weights.of(BlockGrid(windows_of(old[0]), len(old)))
        before, after = (evaluate(pool_of(records), weights, scopes) for records in (old, new))
        for gate in gates:
            scope = parse_scope(gate.scope)
            if gate.metric in before[scope]:
                labels.append((gate, name))
                differences.append(
                    difference(
                        after[scope][gate.metric],
                        before[scope][gate.metric],
                        seeds=len(old),
                        blocks_a_phase=min(window.blocks for window in windows_of(old[0])),
                    )
                )
    results = outcomes(differences, [direction_of(gate) for gate, _ in labels])
    return {
        label: (result.ci95[0] / 100 * abs(d.base), result.ci95[1] / 100 * abs(d.base))
        for label, d, result in zip(labels, differences, results, strict=True)
        if result.ci95 is not None and d.base != 0
    }


def _trace(records: Sequence[ArmRecord]) -> list[tuple[int, str]]:
    return [(record.seed, str(record.manifest["workload"]["sha256"])) for record in records]


def markdown(base: Side, candidate: Side, checked: Sequence[Checked]) -> str:
    """The result as a Markdown table, failures first."""
    failed = [c for c in checked if c.state != "ok"]
    head = f"{len(failed)} of {len(checked)} gates failed" if failed else f"All {len(checked)} gates hold"
    rows = [
        f"**{head}**: {candidate.summary.get('run', candidate.path)} against {base.summary.get('run', base.path)}.",
        "",
        "| | arm | metric | scope | base | candidate | change | 95% interval | allowed | |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for c in sorted(checked, key=lambda c: c.state == "ok"):
        interval = "–" if c.ci95 is None else f"{c.ci95[0]:+.1f}% to {c.ci95[1]:+.1f}%"
        note = c.method if c.base is not None and c.candidate is not None else c.text
        rows.append(
            f"| {c.state} | {c.arm} | {c.gate.metric} | {c.gate.scope} | {_cell(c.base)} | {_cell(c.candidate)} "
            f"| {'–' if c.change_pct is None else f'{c.change_pct:+.1f}%'} | {interval} | {c.gate.margin_pct:g}% | {note} |"
        )
    return "\n".join(rows) + "\n"


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.5g}"
