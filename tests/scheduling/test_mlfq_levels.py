"""Guards `mlfq`'s gauges of waiting requests by level: at every moment what counting the queue would say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.drive import make_config, make_request, make_scheduler
from tests.scheduling.clocked import patched, prompt, serve
from tests.scheduling.mlfq_policy import Policy

KNOBS = {"mlfq": {"level0_tokens": 64, "level1_tokens": 128, "level2_tokens": 256}}


def levels(gauges: dict[str, Any]) -> list[int]:
    """What the four gauges say."""
    return [int(gauges[f"mlfq_waiting_level_{n}"]()) for n in range(4)]


def test_they_follow_arrival_admission_preemption_and_end() -> None:
    policy = Policy()
    gauges = policy.context.gauges
    small, large = policy.add("small", 10), policy.add("large", 5000)
    cancelled = policy.add("cancelled", 600)
    assert levels(gauges) == [1, 0, 1, 1]
    policy.finish(cancelled)
    policy.admit(large)
    assert levels(gauges) == [1, 0, 0, 0]
    policy.preempt(large)  # lifted by one level
    assert levels(gauges) == [1, 0, 1, 0]
    policy.admit(large, resumed=True)
    policy.admit(small)
    assert levels(gauges) == [0, 0, 0, 0]
    policy.serve(small=200)
    policy.preempt(small)
    policy.finish(large)
    assert levels(gauges) == [1, 0, 0, 0]
    policy.finish(small)
    assert levels(gauges) == [0, 0, 0, 0]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_on_a_real_scheduler_short_of_blocks(async_scheduling: bool) -> None:
    """Requests grow until some are preempted, and two are cancelled; the keys say each one's level."""
    config = make_config(max_num_seqs=5, max_num_batched_tokens=128, async_scheduling=async_scheduling)
    seen: set[tuple[int, ...]] = set()
    with patched("mlfq", KNOBS) as (installation, clock):
        gauges: Any = installation.tallies["mlfq"].gauges
        sizes = [40, 300, 100, 60, 400, 200, 90, 30, 120, 240]
        requests = [
            make_request(config, f"r{i}", prompt(i, size), max_tokens=60, arrival_time=1.0 + i)
            for i, size in enumerate(sizes)
        ]

        def check(sched: Any) -> None:
            waiting = [*sched.waiting, *sched.kv_holding_waiting]
            counted = Counter(int(r.patchbench_ticket.key[0]) for r in waiting)
            said = levels(gauges)
            assert said == [counted[n] for n in range(4)]
            seen.add(tuple(said))

        arrivals = [(3 * i, r) for i, r in enumerate(requests)]
        served = serve(make_scheduler(config, 40), clock, arrivals, [(12, "r4"), (20, "r1")], check=check)
        metrics = installation.receipt()["metrics"]["mlfq"]
    assert set(served.cancelled) <= {"r1", "r4"}
    assert metrics["mlfq_promotions"] > 0
    assert levels(gauges) == [0, 0, 0, 0]
    assert all(any(said[n] for said in seen) for n in range(4))
