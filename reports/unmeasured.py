"""Verdicts that rest on kernels which nobody has timed are at most undetermined.

A profile names the regimes of which it holds no measurement (see `harness.profiles`), and a run counts the
steps that rested on them. A verdict needs the step times of both its arms, so the larger share of the two
decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.papers import Json

# A share of steps. One ordinary step in a hundred, even were it free or cost double, moves the time that all
# steps take by 1%: half of the margin within which two arms count as the same.
LIMIT = 0.01
WORDS: Mapping[str, str] = {
    "decode": "decodes",
    "prefill": "prefills",
    "context": "prefills behind cached tokens",
    "mixed": "mixed steps",
    "communication": "the exchange between GPUs",
}

Shares = Mapping[str, float]


def cap(rows: Sequence[Json], shares: Mapping[str, Shares]) -> list[Json]:
    """The comparisons, with every better, worse or same that rests on unmeasured steps made undetermined.

    Args:
        rows: comparisons as the summary holds them.
        shares: by arm, the share of its steps that rests on each unmeasured regime, and on `any`.
    """
    return [_capped(row, shares) for row in rows]


def _capped(row: Json, shares: Mapping[str, Shares]) -> Json:
    if row["verdict"] not in ("better", "worse", "same"):
        return row
    worst: dict[str, float] = {}
    for arm in (row["arm"], row["baseline"]):
        for regime, share in shares.get(arm, {}).items():
            worst[regime] = max(worst.get(regime, 0.0), share)
    if worst.get("any", 0.0) <= LIMIT:
        return row
    reason = f"rests on {regimes_text(worst)}, which this profile has not measured"
    return {**row, "verdict": "undetermined", "data_verdict": row["verdict"], "reason": reason}


def regimes_text(shares: Shares) -> str:
    """ "mixed steps (63.0% of steps) and prefills (2.0%)": the regimes above the limit, or else the largest."""
    listed = sorted(((share, name) for name, share in shares.items() if name != "any"), reverse=True)
    kept = [pair for pair in listed if pair[0] > LIMIT] or listed[:1]
    if not kept:
        return f"{shares['any']:.1%} of its steps"
    parts = [f"{WORDS.get(name, name)} ({share:.1%})" for share, name in kept]
    parts[0] = parts[0].removesuffix(")") + " of steps)"
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
