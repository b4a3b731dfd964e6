"""Guards that prefixes which patches compute by themselves give the tokens that a request's own prefill gives.

A small real model on the CPU, in process: the list of `warmup`, the conversations of `version`, what `cancel` spares.
With a negative control: a warmed block whose content is spoiled does change what is generated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.real.conftest import BLOCK_SIZE, real_engine
from tests.real.test_identity import add, pool_of

BLOCKS = 90
RNG = np.random.default_rng(11)
V1, V2 = RNG.integers(3, 1000, 70).tolist(), RNG.integers(3, 1000, 80).tolist()
HISTORY = [RNG.integers(3, 1000, 120).tolist() for _ in range(6)]


def outputs(engine: Any) -> list[list[int]]:
    """What is generated: two turns of each conversation under the first prompt, two under the second.

    One request after the other, with idle turns of the engine in between.
    """
    found: list[list[int]] = []
    histories = [list(history) for history in HISTORY]
    for turn in range(4):
        for number, history in enumerate(histories):
            history += np.random.default_rng(100 * turn + number).integers(3, 1000, 20).tolist()
            add(engine, f"r{len(found)}", [*(V1 if turn < 2 else V2), *history], 12, 0)
            answer: list[int] = []
            while not answer:
                for output in engine.step():
                    if output.finished:
                        answer = list(output.outputs[0].token_ids)
            history += answer
            found.append(answer)
            for _ in range(16):
                assert not engine.step()
    return found


def test_what_patches_computed_gives_the_same_tokens(small_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "list.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": V1}) + "\n", encoding="utf-8")
    knobs: dict[str, dict[str, Any]] = {
        "warmup": {"list_file": str(path)},
        "version": {"settle_s": 0.0, "settle_requests": 6, "evidence_times": 10.0},
    }
    with real_engine(small_model, "", BLOCKS) as engine:
        stock = outputs(engine)
    with real_engine(small_model, "warmup,version,cancel,slru", BLOCKS, knobs) as engine:
        from patches.seam.adapter import active

        pool = pool_of(engine)
        free = pool.get_num_free_blocks()
        found = outputs(engine)
        assert pool.get_num_free_blocks() == free
        installation = active()
        assert installation is not None
        metrics = installation.receipt()["metrics"]
    assert metrics["warmup"]["warmed_blocks_used"] == len(V1) // BLOCK_SIZE
    assert metrics["version"]["switches"] == 1
    assert metrics["version"]["own_tokens"] > 200
    assert len({tuple(tokens) for tokens in stock}) > 20, "outputs too alike to tell a mix-up"
    assert found == stock


def test_a_spoiled_warm_block_would_be_seen(small_model: Path, tmp_path: Path) -> None:
    """The control: the comparison above is one of content that the cache held."""
    path = tmp_path / "list.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": V1}) + "\n", encoding="utf-8")
    found = {}
    for spoiled in (False, True):
        with real_engine(small_model, "warmup", BLOCKS, {"warmup": {"list_file": str(path)}}) as engine:
            if spoiled:
                runner = engine.model_executor.driver_worker.worker.model_runner
                for layer in runner.kv_caches:
                    layer.mul_(-1.5)
            found[spoiled] = outputs(engine)[0]
    assert found[True] != found[False]


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
