"""Bounds on recovery after a switch: what an infinite cache finds of conversations, by hand and on the workload."""

from __future__ import annotations

import numpy as np
import pandas as pd

from harness.metrics.switch import returns
from harness.switch_limits import Known, limited
from workloads.five_phase import build
from workloads.request import PlannedRequest, Segment, Workload

S = 1_000_000_000


def _request(number: int, version: str, *turns: int) -> PlannedRequest:
    """A prompt of 32 tokens (v1) or 48 (v2), then 16 tokens a turn; the answer is the next turn's beginning."""
    system = {"v1": [1] * 32, "v2": [2] * 48}[version]
    prompt = np.array(system + [token for turn in turns for token in [turn] * 16], np.int32)
    return PlannedRequest(
        index=number,
        request_id=f"r{number}",
        tenant="gold-a",
        phase=2,
        intended_ns=number * S,
        prompt=prompt,
        output=np.array([9] * 4, np.int32),
        segments=(Segment("system", version, len(system)), Segment("turn", "t", len(prompt) - len(system))),
    )


def _workload(*requests: PlannedRequest) -> Workload:
    return Workload("five_phase", 0, (), (), requests, "", "")


def _table(workload: Workload, cached: list[float]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "request_id": [one.request_id for one in workload.requests],
            "tenant": [one.tenant for one in workload.requests],
            "scheduled_ns": [float(one.intended_ns) for one in workload.requests],
            "prompt_tokens": [len(one.prompt) for one in workload.requests],
            "cached_tokens": cached,
        }
    )


def test_what_an_infinite_cache_finds_after_a_switch() -> None:
    workload = _workload(
        _request(0, "v1", 5),
        _request(1, "v1", 5, 6),
        _request(2, "v2", 5, 6, 7),
        _request(3, "v2", 8, 6),
        _request(4, "v2", 5, 6, 7, 4),
    )
    table = _table(workload, [0.0, 0.0, 0.0, 0.0, 0.0])
    prompts = limited(workload, table, "gold-a", 2.0, Known.PROMPTS)["cached_tokens"].tolist()
    # Until 2 s as measured; then the new prompt, and, once it was seen under it, the conversation.
    assert prompts == [0, 0, 48, 48, 48 + 48]
    conversations = limited(workload, table, "gold-a", 2.0, Known.CONVERSATIONS)["cached_tokens"].tolist()
    assert conversations == [0, 0, 48 + 32, 48, 48 + 48]
    # One that was never admitted tells nothing, and nobody finds less than was measured.
    table = _table(workload, [float("nan"), float("nan"), 64.0, 0.0, 0.0])
    assert limited(workload, table, "gold-a", 2.0, Known.CONVERSATIONS)["cached_tokens"].tolist()[2:] == [
        64,
        48,
        96,
    ]


def test_conversations_that_begin_with_a_phase_bound_every_recovery() -> None:
    """In the five phases conversations do not outlive a phase: at its start even an infinite cache knows none."""
    workload = build(3, phases="1,2", rate_scale=0.5)
    table = _table(workload, [0.0] * len(workload.requests))
    whole = limited(workload, table, "gold-a", 0.0, Known.CONVERSATIONS)
    cold = limited(workload, table, "gold-a", 60.0, Known.PROMPTS)
    start, middle = returns([whole], "gold-a", 0.0, [60.0, 90.0], 120.0)
    assert start.back_s > 2
    assert middle.back_s == 0
    # A conversation that goes over is computed again unless somebody did so before.
    mine = table["tenant"] == "gold-a"
    after = mine & (table["scheduled_ns"] >= 90 * S)
    same = mine & (table["scheduled_ns"] >= 60 * S) & ~after
    assert cold["cached_tokens"][after].sum() < whole["cached_tokens"][after].sum()
    # Before it, canaries keep theirs: at most a block differs, in which a prompt ends and what all say first begins.
    assert (whole["cached_tokens"][same] - cold["cached_tokens"][same]).between(0, 16).all()
    assert (cold["cached_tokens"][~mine] == 0).all()
