"""The first seconds after a start: what `warmup` is worth there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.metrics.pool import COLD_NS
from harness.metrics.scope import Scope
from scripts.kv_rows.run import Row, Run, absent, versus

Floats = npt.NDArray[np.float64]
ASKED = "-40%"
# Of paired samples p99 needs as many as any other.
REPLICATES = 2_000
_SEED = 0xC01D


@dataclass(frozen=True, slots=True)
class Pairs:
    """TTFT of the same requests in two arms, ms; shapes (pairs,). `documents`: which of them are long documents."""

    before: Floats
    after: Floats
    documents: npt.NDArray[np.bool_]

    def part(self, documents: bool) -> Pairs:
        """Only the documents, or all but these."""
        keep = self.documents == documents
        return Pairs(self.before[keep], self.after[keep], self.documents[keep])

    def change(self, percent: int) -> tuple[float, float, float] | None:
        """By how much that percentile changes, in percent, with its 95% interval over draws of pairs; None without pairs."""
        if not len(self.before):
            return None
        rng = np.random.Generator(np.random.PCG64(_SEED))
        drawn = rng.integers(0, len(self.before), (REPLICATES, len(self.before)))

        def changes(before: Floats, after: Floats) -> Floats:
            low, high = (
                np.percentile(each, percent, axis=-1, method="inverted_cdf") for each in (before, after)
            )
            return np.asarray(100 * (high / low - 1), np.float64)

        value = float(changes(self.before, self.after))
        low, high = np.percentile(changes(self.before[drawn], self.after[drawn]), [2.5, 97.5])
        return value, min(float(low), value), max(float(high), value)


def cold_pairs(before: Sequence[pd.DataFrame], after: Sequence[pd.DataFrame], start_ns: int) -> Pairs:
    """The requests of the first 10 s that `before` served without a single hit, as `before` and `after` served them.

    Nobody had computed what they begin with, not even their tenant's system prompt, which a list knows. Those
    without a first token in either are left out.

    Args:
        before, after: each seed's `requests`, in the same order of seeds. start_ns: of the first measured phase.
    """
    parts = []
    for one, two in zip(before, after, strict=True):
        both = one.merge(two, on="request_id", suffixes=("", "_after"), validate="one_to_one")
        early = both["intended_ns"].between(start_ns, start_ns + COLD_NS, inclusive="left")
        parts.append(both[early & both["measured"] & (both["cached_tokens"] == 0)])
    rows = pd.concat(parts, ignore_index=True)
    ttft = [(rows[f"first_token_ns{end}"] - rows[f"intended_ns{end}"]) / 1e6 for end in ("", "_after")]
    served = ttft[0].notna() & ttft[1].notna()
    then, now = (each[served].to_numpy(np.float64) for each in ttft)
    return Pairs(then, now, ~rows["short"][served].to_numpy(bool))


def cold(run: Run) -> list[Row]:
    """TTFT of all that came in the first 10 s, of those that were cold in `tuned`, and what warming cost traffic."""
    name, what = run.named("warmup"), "warmup: TTFT of the first 10 s"
    metric = "cold_ttft_ms_p99"
    if name is not None:
        found = run.estimate(name, metric, Scope())
        if found is not None and found.few_samples:
            metric = "cold_ttft_ms_p90"
    out = [versus(run, f"{what}, {metric[-3:]}", ASKED, name, metric, lambda v: v <= -40)]
    if name is not None:
        out += _paired(run, name)
    beside = None if name is None else run.gauge(name, "warmup", "own_traffic_steps")
    asked = "no real request delayed"
    if beside is None:
        return [*out, absent("warmup: passes with traffic that held a prompt of its own", asked)]
    longest = run.gauge(name or "", "warmup", "own_longest_chunk_tokens") or 0
    shown = f"{beside:.1f} a seed; at most {longest:.0f} tokens in one of them"
    return [
        *out,
        Row("warmup: passes with traffic that held a prompt of its own", asked, shown, "", beside == 0),
    ]


def _paired(run: Run, name: str) -> list[Row]:
    seeds = {record.seed: record.requests for record in run.records("tuned")}
    mine = [record for record in run.records(name) if record.seed in seeds]
    if not mine:
        return []
    pairs = cold_pairs(
        [seeds[record.seed] for record in mine],
        [record.requests for record in mine],
        min(phase["start_ns"] for phase in run.phases),
    )
    what = "warmup: TTFT of what was cold in tuned in the first 10 s (no hit at all)"
    return [
        _row(f"{what}{which}, p{percent}", part, percent, percent == 90 and not which)
        for which, part in (
            ("", pairs),
            (", not documents", pairs.part(False)),
            (", documents", pairs.part(True)),
        )
        for percent in (50, 90)
    ]


def _row(what: str, pairs: Pairs, percent: int, judged: bool) -> Row:
    found = pairs.change(percent)
    if found is None:
        return Row(what, ASKED, "no such request")
    value, low, high = found
    then, now = (np.percentile(each, percent, method="inverted_cdf") for each in (pairs.before, pairs.after))
    shown = f"{value:+.1f}% ({then:.4g} -> {now:.4g}), {len(pairs.before)} pairs"
    return Row(what, ASKED, shown, f"[{low:+.1f}, {high:+.1f}]%", value <= -40 if judged else None)
