"""What the report says of the ground that verdicts stand on: other assumptions, unmeasured regimes, the profile's error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reports import live, tables, unmeasured
from reports.view import Arm, Cell, Comparison, RunView
from reports.wording import MISSING, SYMBOLS, change

NOT_RECOMPUTED = "Not recomputed under other assumptions: bench sensitivity RUN"
_LIVE = "A live run assumes nothing of step times, so there is nothing to recompute"
_EMULATED = (
    "An emulated run takes minutes an arm: other assumptions are for a virtual run of the same traffic"
)
ERROR_UNKNOWN = "the error of this profile is not known: no measured run"
RULES: tuple[str, ...] = (
    "A verdict has to survive an error of the profile. It is recomputed on fewer seeds under each of the other "
    "assumptions, one at a time, and set against the same difference on the same seeds under the profile itself. "
    "Where the two differ in sign the winner changes, and the verdict is undetermined. Signs are compared, "
    "however small the differences: noise can take a verdict away but never make one, and more seeds "
    "(bench sensitivity --seeds) make that rarer.",
    "A cell says n/a where those seeds alone do not show the verdict, where a figure has too few samples (as a p99 "
    "from fewer than 459), or where the arms served different shares of the load; it takes nothing away. Verdicts "
    "against the other baseline are not recomputed.",
    f"A verdict of an arm of which, or of whose baseline, more than {unmeasured.LIMIT:.0%} of the steps rest on a "
    "regime that the profile has not measured is at most undetermined.",
)


@dataclass(frozen=True, slots=True)
class Recomputed:
    """One verdict beside what became of it: `cells` in the order of the assumptions."""

    row: tables.Row
    before: str
    base: str
    cells: tuple[Cell, ...]

    @property
    def changes(self) -> bool:
        """Whether the winner changes under any assumption."""
        return any(cell.flips for cell in self.cells)


def assumptions(view: RunView) -> list[Mapping[str, Any]]:
    """The assumptions that were tried: name, label, clause and seeds of each."""
    return list(view.recomputed["assumptions"]) if view.recomputed else []


def not_recomputed(view: RunView) -> str:
    """Why there is no table of other assumptions, and what would make one."""
    if live.is_emulated(view):
        return _EMULATED
    return _LIVE if live.is_live(view) else NOT_RECOMPUTED


def profile_title(view: RunView) -> str:
    """What `profile_lines` are about."""
    if live.is_live(view):
        return "Who served, and how the run was conducted"
    return "Where the step times come from, and how far off they are known to be"


def rules(view: RunView) -> tuple[str, ...]:
    """How verdicts are made, beyond what the data say."""
    return (f"{live.STATUS}.",) if live.is_live(view) else RULES


def baseline_of(view: RunView) -> str:
    """The baseline whose verdicts were recomputed; empty where none were."""
    return str(view.recomputed["baseline"]) if view.recomputed else ""


def text_of(cell: Cell) -> str:
    """A cell's change, or n/a; "from 0" where the baseline's value is 0."""
    if cell.reason:
        return "n/a"
    return "from 0" if cell.delta_pct is None else change(cell.delta_pct)


def title_of(cell: Cell) -> str:
    """What a pointer on the cell shows."""
    if cell.reason:
        return cell.reason
    base = "from 0" if cell.base_pct is None else change(cell.base_pct)
    return f"{base} under the profile itself on the same seeds{'; the winner changes' if cell.flips else ''}"


def key_rows(view: RunView, arm: Arm) -> list[Recomputed]:
    """The headlines of an arm as recomputed, those of phase 1 among them."""
    if view.recomputed is None:
        return []
    rows = tables.rows(view, arm, baseline_of(view), (*tables.HEADLINES, *tables.GUARD))
    return [_recomputed(row, row.comparison) for row in rows if row.comparison and row.comparison.cells]


def table(view: RunView, arm: Arm) -> list[Recomputed]:
    """The headlines as recomputed, then every other verdict whose winner changes."""
    found = key_rows(view, arm)
    shown = {one.row.comparison for one in found}
    for c in _of(view, arm):
        if c not in shown and any(cell.flips for cell in c.cells):
            found.append(_recomputed(tables.row(view, arm, c.baseline, c.scope, c.metric), c))
    return found


def _recomputed(row: tables.Row, c: Comparison) -> Recomputed:
    base = next((cell.base_pct for cell in c.cells if cell.base_pct is not None), None)
    return Recomputed(row, c.data_verdict or c.verdict, MISSING if base is None else change(base), c.cells)


def _of(view: RunView, arm: Arm) -> list[Comparison]:
    return [c for c in view.comparisons if c.arm == arm.name and c.cells]


def status(view: RunView, arm: Arm, baseline: str) -> str:
    """One sentence beside the verdicts of an arm against a baseline: whether they were recomputed."""
    found = view.recomputed
    if live.is_live(view):
        return live.status(view)
    if found is None:
        return f"{NOT_RECOMPUTED}."
    if baseline != found["baseline"]:
        return f"Not recomputed under other assumptions; verdicts against {found['baseline']} are."
    mine = _of(view, arm)
    known = [c for c in mine if any(not cell.reason for cell in c.cells)]
    if not mine:
        return "Under other assumptions: no verdict is better or worse, so there is none to recompute."
    lost = sum(any(cell.flips for cell in c.cells) for c in mine)
    tried = len(assumptions(view))
    said = (
        f"Under {tried} other assumption{'s' * (tried != 1)} on {_seeds(view)}: {len(known)} of {len(mine)} verdicts "
        f"against {baseline} recomputed, {lost or 'none'} of them undetermined because the winner changes"
    )
    return f"{said}. {untried(view)}".strip()


def _seeds(view: RunView) -> str:
    seeds = sorted({int(seed) for one in assumptions(view) for seed in one["seeds"]})
    return f"seed{'s' * (len(seeds) != 1)} {', '.join(map(str, seeds))}"


def untried(view: RunView) -> str:
    """Which assumptions were not made, and why where that is known; empty where all were."""
    listed = view.recomputed["untried"] if view.recomputed else []
    parts = [one["label"] + (f" ({one['reason']})" if one["reason"] else "") for one in listed]
    return f"Not tried: {', '.join(parts)}." if parts else ""


def flips(view: RunView, arm: Arm) -> list[str]:
    """A line for each headline whose winner changes, with the assumption that did it."""
    return [
        f"{SYMBOLS[one.row.verdict]} {one.row.label}, {one.row.scope}: {one.row.comparison.reason}"
        for one in key_rows(view, arm)
        if one.changes and one.row.comparison
    ]


def rests_on(view: RunView, arm: Arm) -> str:
    """The share of an arm's steps that rests on unmeasured regimes; empty where none does."""
    shares = arm.raw.get("unmeasured") or _worst(view, arm.name, "unmeasured")
    if not shares.get("any"):
        return ""
    capped = (
        " Verdicts that rest on them are at most undetermined." if shares["any"] > unmeasured.LIMIT else ""
    )
    return (
        f"not measured: {shares['any']:.1%} of the steps (worst seed) rest on what this profile has not measured: "
        f"{unmeasured.regimes_text(shares)}.{capped}"
    )


def remarks(view: RunView, arm: Arm) -> list[str]:
    """What a reader must know of the step times behind an arm: the shares that no table covers."""
    return [said for said in (rests_on(view, arm), extrapolated(view, arm)) if said]


def extrapolated(view: RunView, arm: Arm) -> str:
    """A remark on the steps whose time was extrapolated; empty where all lie inside the profile's tables."""
    shares = dict(arm.raw.get("extrapolated") or _worst(view, arm.name, "extrapolated"))
    total = shares.pop("any", 0.0)
    if not total:
        return ""
    parts = sorted(((share, name) for name, share in shares.items() if share), reverse=True)
    said = ", ".join(f"{name.replace('_', ' ')} {share:.1%}" for share, name in parts)
    return (
        f"extrapolated: the times of {total:.1%} of the steps (worst seed) lie outside what the profile's tables "
        f"cover{f' ({said})' if said else ''}"
    )


def _worst(view: RunView, arm: str, field: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for (name, _), manifest in view.manifests.items():
        if name == arm:
            for quantity, share in manifest.get(field, {}).items():
                shares[quantity] = max(shares.get(quantity, 0.0), float(share))
    return shares


def profile_lines(view: RunView) -> list[str]:
    """The profile that all step times come from, and how far off it is known to be; a line each.

    Of a run on a real server first: who served, how it was conducted, and its noise.
    """
    said = live.lines(view) if live.is_live(view) else []
    profile = view.profile
    if not profile or (said and not live.is_emulated(view)):
        return said
    parts = [
        f"profile {profile.get('name') or '/'.join(str(profile[k]) for k in ('gpu', 'model') if profile.get(k))}"
    ]
    if "measured" in profile:
        parts.append("measured" if profile["measured"] else "not measured")
    if profile.get("not_measured"):
        regimes = ", ".join(unmeasured.WORDS.get(name, str(name)) for name in profile["not_measured"])
        parts.append(f"without measurements of {regimes}")
    if profile.get("source"):
        parts.append(f"tables from {profile['source']}")
    if profile.get("sha256"):
        parts.append(f"sha256 {str(profile['sha256'])[:12]}")
    beyond = [f"read beyond what was measured: {text}" for text in profile.get("beyond", ())]
    return [*said, ", ".join(parts), *beyond, *_error_lines(profile.get("error") or {})]


def _error_lines(error: Mapping[str, Any]) -> list[str]:
    if not error:
        return [ERROR_UNKNOWN]
    rest = dict(error)
    named = (("step_median_pct", "median"), ("step_p90_pct", "p90"), ("step_bias_pct", "bias"))
    steps = [f"{word} {_pct(rest.pop(key), key)}" for key, word in named if key in rest]
    if "mixed_median_pct" in rest:
        steps.append(f"mixed steps median {_pct(rest.pop('mixed_median_pct'), '')}")
    rows = rest.pop("rows", "")
    lines = [f"error of its step times: {', '.join(steps) or 'not known'}{f' ({rows})' if rows else ''}"]
    loops = rest.pop("closed_loop", [])
    listed: Sequence[Any] = [loops] if isinstance(loops, str) else list(loops)
    lines += [f"error against a measured run: {text}" for text in listed] or [
        "error against a measured run: not known, there is none"
    ]
    command = rest.pop("command", "")
    lines += [f"{key.replace('_', ' ')}: {value}" for key, value in sorted(rest.items())]
    return [*lines, *([f"these errors again: {command}"] if command else [])]


def _pct(value: object, key: str) -> str:
    if not isinstance(value, (int, float)):
        return str(value)
    return f"{value:+.1f}%".replace("-", "−") if "bias" in key else f"{value:.1f}%"
