"""`warmup` and `version` in whole virtual engines: records, times, and the bound of what a request may wait for ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.engines.flags import EngineFlags
from harness.engines.virtual.engine import VirtualEngine, VirtualRun
from harness.profiles import model_dir
from tests.engines.traffic import ConstantStep, request, workload
from tests.scheduling.clocked import installed

STEP_US, TOKEN_US = 20_000.0, 100.0
SHARED = 320


def run(
    traffic: list[Any], enable: str, knobs: dict[str, Any], blocks: int = 800
) -> tuple[VirtualRun, dict[str, Any], int]:
    """The run, the metrics of each patch, and how long the start took, ns."""
    flags = EngineFlags(max_model_len=4096, max_num_batched_tokens=512, max_num_seqs=8)
    with installed(enable, knobs) as installation:
        engine = VirtualEngine(model_dir("llama-3.1-8b"), flags, ConstantStep(STEP_US, TOKEN_US), blocks)
        try:
            made = engine.run(workload(traffic))
        finally:
            engine.shutdown()
        return made, installation.receipt()["metrics"], engine.device.starting_ns


def column(made: VirtualRun, table: str, name: str) -> Any:
    return np.array(made.tables[table].column(name).to_pylist())


@pytest.fixture
def listed(tmp_path: Path) -> str:
    """A list with what all requests of these tests share."""
    path = tmp_path / "list.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": list(range(SHARED))}) + "\n", encoding="utf-8")
    return str(path)


def test_the_start_is_before_the_clock_and_nobody_is_later_for_it(listed: str) -> None:
    traffic = [request(i, 0.4 * i, prompt=400, output=6, shared=SHARED) for i in range(12)]
    stock, _, none = run(traffic, "", {})
    warm, metrics, starting_ns = run(traffic, "warmup", {"warmup": {"list_file": listed}})
    again, _, _ = run(traffic, "warmup", {"warmup": {"list_file": listed}})
    assert none == 0
    # One step of 320 tokens; the clock stood still.
    assert starting_ns == round((STEP_US + SHARED * TOKEN_US) * 1000)
    assert column(warm, "requests", "request_id").tolist() == [each.request_id for each in traffic]
    assert column(warm, "requests", "cached_tokens")[0] == SHARED
    gained = column(stock, "requests", "first_token_ns") - column(warm, "requests", "first_token_ns")
    assert gained[0] == SHARED * TOKEN_US * 1000
    assert (gained >= 0).all()
    assert column(warm, "steps", "t_ns")[0] == column(stock, "steps", "t_ns")[0]
    assert metrics["warmup"]["own_traffic_steps"] == 0
    assert metrics["warmup"]["warmed_blocks_used"] == SHARED // 16
    assert warm.schedule_digest == again.schedule_digest
    assert warm.tables["requests"].equals(again.tables["requests"])


def test_what_an_idle_step_of_ours_may_cost(listed: str) -> None:
    """Requests come at every moment of such a step; the longest wait for it is its own time, and the bound is met.

    Documents push the shared prefix out; it is computed again in the pauses between them.
    """
    knobs = {"warmup": {"hot_requests": 4, "look_s": 0.05, "idle_tokens": 64, "list_file": ""}}
    traffic = [request(i, 1.0 * i, prompt=400, output=2, shared=SHARED) for i in range(6)]
    for i in range(30):
        # Each ends after a little more than 0.4 s, with an empty block or two for ours.
        traffic.append(request(100 + i, 10 + 1.013 * i, prompt=3600, output=3))
    for i in range(40):
        traffic.append(request(200 + i, 45 + 0.137 * i, prompt=70, output=2))
    stock, _, _ = run(traffic, "", {}, 330)
    ours, metrics, _ = run(traffic, "warmup", knobs, 330)
    assert metrics["warmup"]["own_longest_chunk_tokens"] <= 64
    late = column(ours, "requests", "first_token_ns") - column(stock, "requests", "first_token_ns")
    assert late.max() <= round((STEP_US + 64 * TOKEN_US) * 1000)


def test_conversations_under_a_new_prompt_in_the_engine() -> None:
    """Their turns under the new prompt find their history; no record of ours, and the same again."""
    v1, v2 = np.arange(300), np.concatenate([np.arange(90), np.arange(1000, 1230)])
    traffic = []
    history: dict[int, Any] = {}
    for i in range(60):
        each, version = i % 12, v1 if i < 36 else v2
        made = request(i, 1.1 * i, prompt=60, output=20)
        turns = history.get(each, np.arange(2000 + 400 * each, 2000 + 400 * each + 200))
        prompt = np.concatenate([version, turns, made.prompt]).astype(np.int32)
        history[each] = np.concatenate([turns, made.prompt, made.output])
        traffic.append(_with(made, prompt))
    knobs = {"version": {"settle_requests": 20}}
    stock, _, _ = run(traffic, "", {}, 2000)
    ours, metrics, _ = run(traffic, "version", knobs, 2000)
    again, _, _ = run(traffic, "version", knobs, 2000)
    assert metrics["version"]["switches"] == 1
    assert metrics["version"]["rebased_conversations"] >= 6
    before, after = (column(each, "requests", "cached_tokens") for each in (stock, ours))
    # The first turn under the new prompt of those that had not come back when it was certain.
    assert (after[42:48] >= before[42:48] + 200).all()
    assert column(ours, "requests", "request_id").tolist() == [each.request_id for each in traffic]
    assert ours.schedule_digest == again.schedule_digest


def _with(made: Any, prompt: Any) -> Any:
    from dataclasses import replace

    return replace(made, prompt=prompt)
