"""`scripts/prompt_list.py`: what an earlier run's requests had in common, the most asked first. Not here: what it is worth."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harness.atomic import write_json
from harness.errors import UserError
from harness.plan import RunPlan, WorkloadChoice
from harness.profiles import load_profile
from harness.records import ArmRecord, RunRecord
from harness.worker import build_workload
from patches.kv.prompt_list import read_prompt_list
from scripts import prompt_list
from scripts.prompt_list import asked_prefixes, observed
from workloads.request import PlannedRequest, Segment

HALF_MINUTE = 30_000_000_000
SYSTEM = [1] * 20


def _request(at: int, *parts: tuple[str, list[int]]) -> PlannedRequest:
    """Sent in that half minute: the system prompt, these parts, and a question of its own."""
    whole = [("system", SYSTEM), *parts, ("question", [at % 1000, 7])]
    return PlannedRequest(
        index=0,
        request_id="r",
        tenant="a",
        phase=1,
        intended_ns=at * HALF_MINUTE,
        prompt=np.array([token for _, tokens in whole for token in tokens], np.int32),
        output=np.array([1], np.int32),
        segments=tuple(Segment("part", name, len(tokens)) for name, tokens in whole),
    )


def test_what_is_asked_for_again_and_again_comes_first() -> None:
    popular, other, once = ("d1", [2] * 100), ("d2", [3] * 50), ("d3", [4] * 10)
    talk = ("t1", [5] * 30)
    seeds = [
        (1, [_request(at, popular) for at in (0, 1, 2)] + [_request(at, other) for at in (0, 0, 0, 3)]),
        # A conversation is asked for many times, within one half minute.
        (2, [_request(4, once)] + [_request(0, talk)] * 9),
    ]
    found = asked_prefixes(seeds, 1000)
    # Whole prefixes, of which none is only another's beginning.
    assert found == [
        ("part system, part d1", SYSTEM + popular[1]),
        ("part system, part d2", SYSTEM + other[1]),
    ]
    # The system prompt is paid for once; what does not fit is left out for what does.
    assert asked_prefixes(seeds, 170) == found
    assert asked_prefixes(seeds, 119) == found[1:]
    assert asked_prefixes(seeds, 25) == [("part system", SYSTEM)]
    assert asked_prefixes(seeds, 5) == []


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    """A run whose arm admitted what was sent in its first half minute; nothing was served."""
    plan = RunPlan(WorkloadChoice(phases="1", rate_scale=3.0), load_profile("tight"), (3,), ())
    workload = build_workload(plan, 3)
    write_json(tmp_path / "plan.json", plan.to_json())
    requests = pd.DataFrame(
        {
            "request_id": [one.request_id for one in workload.requests],
            "phase": [one.phase for one in workload.requests],
            "cached_tokens": [0.0 if one.intended_ns < HALF_MINUTE else np.nan for one in workload.requests],
        }
    )
    none = pd.DataFrame()
    manifest = {"workload": {"sha256": workload.sha256}}
    record = ArmRecord(tmp_path, "tuned", 3, requests, none, none, none, manifest, {})
    return RunRecord(tmp_path, {}, {"tuned": (record,), "stock": ()}, ())


def test_what_a_run_admitted_is_made_again(run: RunRecord, tmp_path: Path) -> None:
    ((seed, requests),) = observed(run, "tuned", [], [])
    assert seed == 3
    assert requests
    assert all(one.intended_ns < HALF_MINUTE for one in requests)
    assert observed(run, "tuned", [3], [2]) == [(3, [])]
    for arm, seeds, said in (
        ("stock", [], "no finished arm 'stock'; it has tuned"),
        ("tuned", [4], "no seed 4"),
    ):
        with pytest.raises(UserError, match=said):
            observed(run, arm, seeds, [])
    run.arms["tuned"][0].manifest["workload"]["sha256"] = "other"
    with pytest.raises(UserError, match="seed 3 cannot be made again"):
        observed(run, "tuned", [], [])


def test_the_command_lists_the_system_prompts(tmp_path: Path, root: Path) -> None:
    out = tmp_path / "list.jsonl"
    script = root / "scripts" / "prompt_list.py"
    subprocess.run([sys.executable, str(script), str(out)], check=True)
    assert [one.name for one in read_prompt_list(out)][:2] == ["gold-a", "gold-b"]
    for words in (["--run", str(tmp_path)], ["--tokens", "0"], ["--run", str(tmp_path), "--seeds", "x"]):
        bad = subprocess.run([sys.executable, str(script), str(out), *words], capture_output=True, text=True)
        assert bad.returncode == 2, bad.stderr
        assert len(bad.stderr.splitlines()) == 1


def test_what_another_extends_comes_before_it_whatever_their_digests() -> None:
    """Asked for equally often: parts whose digests sort either way."""
    for number in range(8):
        parts = [(f"d{i}", [100 * number + i] * 10) for i in range(6)]
        found = asked_prefixes([(1, [_request(at, *parts) for at in (0, 1)])], 1000)
        assert found == [
            (
                ", ".join(f"part {name}" for name in ["system", *[name for name, _ in parts]]),
                SYSTEM + [token for _, tokens in parts for token in tokens],
            )
        ]


def test_a_seed_that_is_named_twice_counts_once(run: RunRecord) -> None:
    assert [seed for seed, _ in observed(run, "tuned", [3, 3], [])] == [3]


def test_a_list_without_prompts_is_not_written(
    run: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "list.jsonl"
    monkeypatch.setattr(prompt_list, "load_run", lambda path: run)
    # The run admitted what was sent in one half minute: nothing was asked for in two.
    monkeypatch.setattr(sys, "argv", ["prompt_list", str(out), "--run", str(tmp_path)])
    with pytest.raises(UserError, match=r"no prefix of at most 20000 tokens .* raise --tokens"):
        prompt_list._write()
    assert not out.exists()
