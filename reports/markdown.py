"""summary.md: the verdicts as a pull request shows them."""

from __future__ import annotations

from collections.abc import Sequence

from reports import admissions, cache, facts, interference, live, robustness, tables
from reports.view import BASELINES, Arm, RunView
from reports.wording import FEW_SAMPLES, SYMBOLS, VERDICTS, Value, change_interval

# GitHub takes 65,536 characters in a comment: a run of many arms shows less of each.
MOST_ROWS = 48
MOST_ARMS = 4
MOST_RECOMPUTED = 16


def render(view: RunView) -> str:
    """The whole text, GitHub-flavoured; equal summaries give equal bytes."""
    parts = [f"## {escape(facts.title(view))}", escape(facts.intro(view))]
    if not view.summary.get("valid", True):
        parts.append("> **This run is INVALID.** Struck-through numbers may not be believed.")
    if len(view.candidates) > 1:
        parts.append(_overview(view))
    for arm in view.candidates[:MOST_ARMS]:
        for baseline in BASELINES:
            if view.arm(baseline):
                parts += _verdicts(view, arm, baseline)
    if len(view.candidates) > MOST_ARMS:
        parts.append(f"The tables of {len(view.candidates) - MOST_ARMS} more arms are in the report.")
    if not view.candidates:
        parts.append("This run has baselines only; there is nothing to judge.")
    parts += _validity(view)
    parts += _recomputed(view)
    parts += _patches(view)
    parts += _tenants(view)
    parts += _cache(view)
    for words, verdict in (("Losses", "worse"), ("Wins", "better")):
        parts += _listed(view, words, verdict)
    if any(FEW_SAMPLES in part for part in parts):
        parts.append(f"{FEW_SAMPLES} from too few samples for a p99; see the p90 in the report.")
    if command := dict(facts.manifest_facts(view)).get("command"):
        parts.append(f"Run again: {_code(command)}")
    return "\n\n".join(parts) + "\n"


def escape(text: object) -> str:
    """Text that a Markdown reader shows as it is: no HTML, no table breaks, no emphasis."""
    out = str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", " ")
    for mark in "\\|*_`[]~":
        out = out.replace(mark, "\\" + mark)
    return out


def _code(text: object) -> str:
    clean = str(text).replace("\n", " ")
    fence = "``" if "`" in clean else "`"
    return f"{fence}{clean}{fence}".replace("|", "\\|")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _value(value: Value, struck: bool) -> str:
    text = escape(value.text)
    return f"~~{text}~~" if struck and value.value is not None else text


def _change(row: tables.Row) -> str:
    if row.comparison is None:
        return "not compared"
    said = row.change
    said = f"~~{said}~~" if row.struck else said
    return f"{said} {escape(change_interval(row.comparison.low, row.comparison.high))}".strip()


def _verdict(row: tables.Row) -> str:
    return f"{SYMBOLS[row.verdict]} {row.verdict}"


def _overview(view: RunView) -> str:
    found = tables.overview(view)
    head = [
        f"against {found.baseline}",
        *(f"{SYMBOLS[v]} {v}" for v in VERDICTS),
        *map(escape, found.columns),
    ]
    rows = []
    for arm in view.candidates:
        cells = [f"{SYMBOLS[row.verdict]} {_change(row)}" for row in found.rows[arm.name]]
        cells += [""] * (len(found.columns) - len(cells))
        rows.append(
            [_code(arm.name), *map(str, tables.counts(view, arm.name, found.baseline).values()), *cells]
        )
    return _table(head, rows)


def _verdicts(view: RunView, arm: Arm, baseline: str) -> list[str]:
    found = tables.counts(view, arm.name, baseline)
    counts = ", ".join(f"{SYMBOLS[v]} {found[v]} {v}" for v in VERDICTS)
    (guard,) = tables.guard_shown(view, arm, [baseline])
    picked = [*tables.rows(view, arm, baseline, tables.HEADLINES), *guard]
    made = [
        [
            f"{row.label}",
            row.scope,
            _value(row.base, row.struck),
            _value(row.value, row.struck),
            _change(row),
            _verdict(row),
        ]
        for row in picked
    ]
    for line in made[-len(guard) :]:
        line[0] += " (must not get worse)"
    head = ("metric", "where", escape(baseline), escape(arm.name), "change and interval", "verdict")
    status = escape(robustness.status(view, arm, baseline))
    return [f"### {_code(arm.name)} against {baseline}", f"{counts}. {status}", _table(head, made)]


def _validity(view: RunView) -> list[str]:
    said = [f"- {_code(a.name)}: INVALID" for a in view.arms if not a.valid]
    said += [f"- {_code(a.name)}: {escape(r)}" for a in view.arms for r in a.reasons]
    said += [
        f"- {_code(a.name)}: patch {_code(p)} never fired; its effect is unknown, not nil"
        for a in view.arms
        for p in a.never_fired
    ]
    said += [f"- {_code(a.name)}: {escape(r)}" for a in view.arms for r in robustness.remarks(view, a)]
    said += [f"- {escape(r)}" for r in facts.run_reasons(view)]
    profile = "\n".join(f"- {escape(line)}" for line in robustness.profile_lines(view))
    return ["### Validity", "\n".join(said) or "All arms are valid.", *([profile] if profile else [])]


def _recomputed(view: RunView) -> list[str]:
    assumed = robustness.assumptions(view)
    if not assumed:
        return (
            []
            if not view.candidates or live.is_live(view)
            else ["### Under other assumptions", escape(robustness.NOT_RECOMPUTED)]
        )
    head = ("metric", "where", "verdict", "change", "same seeds", *(escape(one["label"]) for one in assumed))
    parts = ["### Under other assumptions"]
    for arm in view.candidates[:MOST_ARMS]:
        found = robustness.table(view, arm)
        made = [
            [
                one.row.label,
                escape(one.row.scope),
                f"{SYMBOLS[one.before]} {one.before}",
                _change(one.row),
                one.base,
                *(f"**{robustness.text_of(c)}**" if c.flips else robustness.text_of(c) for c in one.cells),
            ]
            for one in found[:MOST_RECOMPUTED]
        ]
        parts.append(
            f"{_code(arm.name)}. {escape(robustness.status(view, arm, robustness.baseline_of(view)))}"
        )
        if made:
            parts.append(_table(head, made))
        if len(found) > MOST_RECOMPUTED:
            parts.append(f"{len(found) - MOST_RECOMPUTED} more in the report.")
    return [*parts, "Bold: the winner changes, so the verdict is undetermined."]


def _patches(view: RunView) -> list[str]:
    made = []
    for patch in facts.patch_facts(view):
        for arm in (a for a in view.candidates if patch.name in a.patches):
            hits = arm.hits(patch.name)
            text = "not recorded" if hits is None else f"{hits:,}" if hits else "**never fired**"
            value = arm.value(patch.mechanism) if patch.mechanism else None
            base = view.arm("tuned")
            made.append(
                [
                    _code(patch.name),
                    _code(arm.name),
                    text,
                    escape(patch.mechanism),
                    _value(base.value(patch.mechanism), not base.valid) if base and patch.mechanism else "",
                    _value(value, not arm.valid) if value else "",
                ]
            )
    head = ("patch", "arm", "hits", "mechanism metric", "tuned", "arm's value")
    return ["### Patches", _table(head, made)] if made else []


def _cache(view: RunView) -> list[str]:
    """Hit rates beside what was to be had under each arm's own schedule."""
    shown = {arm.name for arm in view.arms if arm not in view.candidates[MOST_ARMS:]}
    made = []
    for one in cache.bounds(view):
        if one.arm in shown:
            cells = [f"{100 * rate:.1f}%" for rate in one.rates["all"]]
            made.append(
                [
                    _code(one.arm),
                    *(f"~~{c}~~" if one.struck else c for c in cells),
                    "; ".join(map(escape, one.estimate)),
                ]
            )
    if not made:
        return []
    head = ("arm", "hit rate", "clairvoyant, as served", "whole pool", "infinite", "no bound where")
    return ["Prefix hit rate beside its bounds, all seeds:", _table(head, made)]


def _tenants(view: RunView) -> list[str]:
    """Admission by reason, preemptions and interference, each where there is something to say."""
    shown = [arm for arm in view.arms if arm not in view.candidates[MOST_ARMS:]]
    parts = []
    if admitted := admissions.admissions(view, shown):
        head = (
            "arm",
            "tier",
            "offered",
            "accepted",
            *(f"rejected: {escape(r)}" for r in admitted.reasons),
            "expired",
        )
        made = [
            [_code(d.arm), escape(d.tier), *(_count(n, d.struck) for n in (d.offered, *d.counts))]
            for d in admitted.rows
        ]
        parts += ["Requests by what became of them, all seeds:", _table(head, made)]
    if lost := admissions.victims(view, shown):
        made = [
            [escape(name), *map(_count, counts, lost.struck)]
            for name, counts in (*lost.rows, ("all", lost.totals))
        ]
        parts += ["Preemptions by tenant, all seeds:", _table(("tenant", *map(_code, lost.arms)), made)]
    if alone := interference.interference(view, shown):
        made = [
            [
                escape(name),
                *(
                    f"~~{one.ttft.text} / {one.e2e.text}~~" if struck else f"{one.ttft.text} / {one.e2e.text}"
                    for one, struck in zip(row, alone.struck, strict=True)
                ),
            ]
            for name, row in alone.rows
        ]
        parts += [
            "Interference, times as long as alone on tuned's flags (mean TTFT / mean E2E of the requests served both ways):",
            _table(("tenant", *map(_code, alone.arms)), made),
        ]
    return ["### Tenants", *parts] if parts else []


def _count(n: int, struck: bool) -> str:
    return f"~~{n:,}~~" if struck else f"{n:,}"


def _listed(view: RunView, words: str, verdict: str) -> list[str]:
    found = tables.with_verdict(view, verdict)
    if not found:
        return [f"### {words}", "None."]
    # A few of each arm and baseline, so that no arm hides another's.
    shown, taken = [], dict[tuple[str, str], int]()
    most = max(
        1, MOST_ROWS // len({(r.comparison.arm, r.comparison.baseline) for r in found if r.comparison})
    )
    for row in found:
        assert row.comparison is not None
        key = (row.comparison.arm, row.comparison.baseline)
        taken[key] = taken.get(key, 0) + 1
        if taken[key] <= most:
            shown.append(row)
    made = [
        [
            _code(row.comparison.arm) if row.comparison else "",
            row.comparison.baseline if row.comparison else "",
            row.label,
            escape(row.scope),
            _value(row.base, row.struck),
            _value(row.value, row.struck),
            _change(row),
        ]
        for row in shown
    ]
    head = ("arm", "baseline", "metric", "where", "baseline's", "arm's", "change and interval")
    text = _table(head, made)
    more = len(found) - len(shown)
    if more:
        text += f"\n\n{more} more in the report."
    return [
        f"### {words} ({len(found)})",
        f"<details{' open' if len(shown) <= 12 else ''}><summary>{len(shown)} rows</summary>\n\n{text}\n\n</details>",
    ]
