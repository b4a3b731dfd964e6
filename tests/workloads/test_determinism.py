"""The trace is a function of its arguments alone. Guards against hash order, clocks and hidden state."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workloads.five_phase import RatePlan, build
from workloads.request import PlannedRequest, Workload

# Any change of the traffic changes this: do so knowingly, for results before and after do not compare.
GOLDEN = (
    "97cfdf4661ca49f4c4fc6fbc160ffae3dd350673c01743b86f01cf5f44e0bc05",
    "fa950c4711aefbe84ed1178beea90b45295e54e20b9c5c541965b6ddd918b1be",
)

_SCRIPT = """
import sys
from workloads.five_phase import build
built = build(3, phases="1,2", rate_scale=0.05)
print(built.sha256, built.corpus_sha256, "vllm" in sys.modules, "torch" in sys.modules)
"""


def _in_a_process(root: Path, hash_seed: str) -> list[str]:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_same_bytes_whatever_the_hash_seed_and_without_importing_vllm(root: Path) -> None:
    first, second = _in_a_process(root, "0"), _in_a_process(root, "4242")
    assert first == second
    assert first[2:] == ["False", "False"]
    here = build(3, phases="1,2", rate_scale=0.05)
    assert first[:2] == [here.sha256, here.corpus_sha256]


def test_the_traffic_is_the_one_that_results_were_made_with() -> None:
    built = build(0, phases="1", rate_scale=0.02)
    assert (built.sha256, built.corpus_sha256) == GOLDEN


def test_another_seed_is_another_trace(thin: Workload) -> None:
    assert build(1, rate_scale=0.1).sha256 != thin.sha256
    assert build(0, rate_scale=0.1).sha256 == thin.sha256


def _same(one: PlannedRequest, other: PlannedRequest) -> bool:
    fields = ("index", "request_id", "intended_ns", "cancel_ns", "session", "segments", "phase")
    tokens = one.prompt.tolist() == other.prompt.tolist() and one.output.tolist() == other.output.tolist()
    return tokens and all(getattr(one, name) == getattr(other, name) for name in fields)


@pytest.mark.parametrize(
    ("selection", "last", "measured"), [("3", 3, [3]), ("2,4", 4, [2, 4]), ("1", 1, [1])]
)
def test_a_phase_is_the_same_whoever_asks_for_it(
    thin: Workload, selection: str, last: int, measured: list[int]
) -> None:
    chosen = build(0, phases=selection, rate_scale=0.1)
    expected = [request for request in thin.requests if request.phase <= last]
    assert len(chosen.requests) == len(expected) > 0
    assert all(map(_same, chosen.requests, expected))
    assert [phase.number for phase in chosen.phases] == list(range(1, last + 1))
    assert [phase.number for phase in chosen.phases if phase.measured] == measured


def test_a_profile_that_changes_one_phase_leaves_the_others_alone(thin: Workload) -> None:
    changed = build(0, rate_scale=0.1, rates=RatePlan((1, 1, 1, 1, 3)))
    for number in range(1, 6):
        before = [request for request in thin.requests if request.phase == number]
        after = [request for request in changed.requests if request.phase == number]
        if number < 5:
            assert all(map(_same, before, after))
        else:
            assert len(after) > 2.5 * len(before)


def test_shorter_phases_keep_the_times_between_requests(thin: Workload) -> None:
    short = build(0, phases="1", rate_scale=0.1, time_scale=0.5)
    poisson = [tenant.name for tenant in thin.tenants if tenant.kind != "completion"]
    for name in poisson:
        sent = [request.intended_ns for request in short.requests if request.tenant == name]
        whole = [r.intended_ns for r in thin.requests if r.tenant == name and r.phase == 1]
        assert sent == [time_ns for time_ns in whole if time_ns < 30_000_000_000]
