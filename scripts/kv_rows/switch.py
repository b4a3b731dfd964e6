"""After a switch of a tenant's prompt: how soon its hits are back, and how soon they could be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pandas as pd

from harness.metrics.scope import Scope
from harness.metrics.switch import WINDOW_S, Return, returns
from harness.switch_limits import Known, limited
from scripts.kv_rows.run import CHAT, Row, Run, absent, below

SWITCH_PHASE = 2
# What happens at each of the two times at which gold-a's prompts change.
MOMENTS = ("a tenth goes over, at the phase's start", "all go over, in its middle")
SOON_S = 15.0
UNSWITCHED = ("silver-0", "silver-1", "silver-2")


def switch(run: Run) -> list[Row]:
    """Recovery after each of the two switches with what bounds it, and TTFT in their phase."""
    name = run.named("version")
    limit = 500 * run.slo_factor
    out = _recoveries(run, name)
    for who, scope in ((f"{CHAT} ", Scope((2,), tenant=CHAT)), ("", Scope((2,)))):
        what = f"version: {who}TTFT p99, phase 2"
        row = below(run, what, f"< {limit:.0f} ms", name, "ttft_ms_p99", lambda v: v < limit, scope=scope)
        if name is not None and run.records("tuned"):
            base = run.estimate("tuned", "ttft_ms_p99", scope)
            if base is not None:
                row = Row(row.what, row.asked, f"{row.found} (tuned {base.value:.4g})", row.interval, row.met)
        out.append(row)
    return out


def _recoveries(run: Run, name: str | None) -> list[Row]:
    what, asked = f"version: {CHAT}'s hit rate back to 95%", "< 5 s"
    if name is None or not {1, SWITCH_PHASE} <= {p["number"] for p in run.phases}:
        return [absent(what, asked)]
    frames, then = _frames(run, name), _frames(run, "tuned")
    found, base = _returns(run, frames), _returns(run, then) if then else []
    limits = {known: _limits(run, name, known) for known in Known}
    least = {known: _returns(run, each) if each else [] for known, each in limits.items()}
    known_all = limits[Known.CONVERSATIONS]
    others = [_returns(run, frames, tenant) for tenant in UNSWITCHED]
    out = []
    for i, moment in enumerate(MOMENTS):
        shown = (
            f"{_time(found[i])}; tuned {_time(base[i]) if base else 'absent'}; before: {found[i].before:.3f}"
        )
        met = found[i].back and found[i].back_s < 5
        out.append(Row(f"{what}, {moment}", asked, shown, _windows(run, frames, i), met))
        bounds = ", ".join(
            f"with all {known.value} known {_time(one[i]) if one else 'not to be told'}"
            for known, one in least.items()
        )
        silver = ", ".join(_time(one[i]) for one in others)
        shares = [_share(run, each, i) for each in (then, frames, known_all)]
        out.append(
            Row(
                f"{what[: what.index(' back')]} in the {SOON_S:g} s after {moment}",
                "",
                "tuned {}, version {}, infinite cache with all conversations known {}".format(*shares),
            )
        )
        text = f"{bounds}; {UNSWITCHED[0]} to -{len(others) - 1}, whose prompts stay: {silver}"
        out.append(Row(f"{what}, {moment}: infinite cache", "", text))
    return out


def _frames(run: Run, name: str) -> list[pd.DataFrame]:
    return [record.requests for record in run.records(name)]


def _moments(run: Run) -> list[float]:
    """The start of the phase before, both switches, and the end of their phase, in seconds."""
    phases = {phase["number"]: phase for phase in run.phases}
    one, two = (phases[number] for number in (SWITCH_PHASE - 1, SWITCH_PHASE))
    start, end = two["start_ns"] / 1e9, two["end_ns"] / 1e9
    return [one["start_ns"] / 1e9, start, (start + end) / 2, end]


def _returns(run: Run, frames: Sequence[pd.DataFrame], tenant: str = CHAT) -> list[Return]:
    begin, *switches, end = _moments(run)
    return returns(frames, tenant, begin, switches, end)


def _limits(run: Run, name: str, known: Known) -> list[pd.DataFrame]:
    """Each seed's requests as the bound has them, under this arm's schedule; none where a workload cannot be made again."""
    since_s = _moments(run)[1]
    limits = []
    for record in run.records(name):
        workload = run.workload(record.seed)
        if workload is None:
            return []
        block_tokens = int(record.manifest["engine_flags"].get("block_size") or 16)
        limits.append(limited(workload, record.requests, CHAT, since_s, known, block_tokens))
    return limits


def _share(run: Run, frames: Sequence[pd.DataFrame], i: int) -> str:
    """The tenant's hit rate soon after that switch, all seeds together."""
    if not frames:
        return "not to be told"
    begin_ns = _moments(run)[1 + i] * 1e9
    rows = pd.concat([frame[frame["tenant"] == CHAT] for frame in frames])
    rows = rows[
        rows["scheduled_ns"].between(begin_ns, begin_ns + SOON_S * 1e9) & rows["cached_tokens"].notna()
    ]
    asked = int(rows["prompt_tokens"].sum())
    return f"{rows['cached_tokens'].sum() / asked:.3f}" if asked else "of no request"


def _windows(run: Run, frames: Sequence[pd.DataFrame], i: int) -> str:
    """How many requests one window of the rule holds after that switch."""
    begin, end = list(pairwise(_moments(run)[1:]))[i]
    rows = pd.concat([frame[frame["tenant"] == CHAT] for frame in frames])
    count = int(rows["scheduled_ns"].between(begin * 1e9, end * 1e9).sum())
    return f"{len(frames)} seeds pooled, {count * WINDOW_S / (end - begin):.1f} requests in {WINDOW_S:g} s"


def _time(one: Return) -> str:
    return f"{one.back_s:.2f} s" if one.back else "never"
