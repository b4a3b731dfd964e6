"""`slru` as a patch: on the real Scheduler, through the adapter. Not here: what it is worth (replay tests)."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pydantic import ValidationError
from vllm.v1.core.block_pool import BlockPool

from harness.cache_policies import QUEUES
from harness.cache_replay import replay
from patches.kv.segments import SegmentedFreeQueue
from patches.kv.slru import PATCH, SlruKnobs
from patches.seam import adapter
from patches.seam.plan import resolve
from tests.drive import free_blocks, make_config, make_request, make_scheduler, run_to_end

BOTH = pytest.mark.parametrize("async_scheduling", [False, True])


@contextmanager
def installed(enable: str, **more: Any) -> Iterator[adapter.Installation]:
    installation = adapter.install(resolve(enable, **more))
    try:
        yield installation
    finally:
        installation.undo()


def tokens(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 1000) for _ in range(length)]


def test_every_knob_has_a_unit_and_refuses_nonsense() -> None:
    assert all(PATCH.unit(name) for name in SlruKnobs.model_fields)
    for bad in ({"ghost_times": 0}, {"start_factor": 0.5}, {"max_factor": 1e9}, {"ghosts": 3}):
        with pytest.raises(ValidationError):
            SlruKnobs(**bad)


@BOTH
def test_shared_prompts_survive_one_shot_documents(async_scheduling: bool) -> None:
    """A system prompt that comes back after documents as large as the pool: LRU loses it, this does not."""
    config = make_config(async_scheduling=async_scheduling)
    system = tokens(1, 320)  # 20 blocks of 100

    def cached_tokens(enable: str | None) -> tuple[int, dict[str, Any] | None]:
        def serve() -> int:
            scheduler = make_scheduler(config, 101)
            start = free_blocks(scheduler)
            total, seed = 0, 10
            for turn in range(12):
                total += _serve(
                    scheduler, make_request(config, f"chat{turn}", system + tokens(seed, 16), max_tokens=1)
                )
                seed += 1
                # First the prompt is used often, then documents come in between.
                for part in range(3 if turn >= 4 else 0):
                    _serve(
                        scheduler,
                        make_request(config, f"doc{turn}.{part}", tokens(1000 + seed, 640), max_tokens=1),
                    )
                    seed += 1
            assert free_blocks(scheduler) == start
            return total

        if enable is None:
            return serve(), None
        with installed(enable) as installation:
            return serve(), installation.receipt()

    stock, _ = cached_tokens(None)
    ours, receipt = cached_tokens("slru")
    assert stock == 4 * 320
    assert ours >= 10 * 320
    assert receipt is not None
    metrics = receipt["metrics"]["slru"]
    assert receipt["hooks"]["slru"]["by_hook"]["protected_hits"] == metrics["protected_hits"] > 0
    assert metrics["evicted_probation"] > 0
    assert metrics["protect_factor"] >= 1


def _serve(scheduler: Any, request: Any) -> int:
    """Run one request alone; the prompt tokens that came from the cache."""
    trace = run_to_end(scheduler, [request])
    return int(request.num_prompt_tokens - sum(sum(step.values()) for step in trace.steps))


@BOTH
def test_pressure_and_preemption_leak_nothing(async_scheduling: bool) -> None:
    config = make_config(async_scheduling=async_scheduling, max_num_seqs=16)
    system = [tokens(seed, 64) for seed in range(3)]
    with installed("slru"):
        scheduler = make_scheduler(config, 60)
        start = free_blocks(scheduler)
        requests = [
            make_request(config, f"r{i}", system[i % 3] + tokens(100 + i, 20 + 37 * (i % 5)), max_tokens=40)
            for i in range(60)
        ]
        run_to_end(scheduler, requests)
        queue = scheduler.kv_cache_manager.block_pool.free_block_queue
        assert isinstance(queue, SegmentedFreeQueue)
        assert free_blocks(scheduler) == start == len(queue.get_all_free_blocks())


def test_nothing_is_left_after_undo() -> None:
    before = dict(vars(BlockPool))
    with installed("slru"):
        assert isinstance(BlockPool(4, True, 16).free_block_queue, SegmentedFreeQueue)
    assert dict(vars(BlockPool)) == before
    assert not isinstance(BlockPool(4, True, 16).free_block_queue, SegmentedFreeQueue)


def test_cost_per_block_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    """Whole replays (look-up, touch, allocation, caching, free) against stock, in calls made: the same on any machine."""
    rng = random.Random(0)
    paths = []
    for _ in range(600):
        session = rng.randrange(60)
        paths.append(tuple(session * 1000 + depth for depth in range(rng.randint(5, 40))))
    calls: dict[str, int] = dict.fromkeys(("lru", "slru"), 0)
    for policy in calls:

        def count(frame: Any, event: str, argument: Any, policy: str = policy) -> None:
            calls[policy] += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            replay(paths, QUEUES[policy], 500)
        finally:
            sys.setprofile(None)
    ratio = calls["slru"] / calls["lru"]
    with capsys.disabled():
        print(f"\nslru/lru, calls in a replay of the block pool: {ratio:.2f}")
    assert ratio < 1.5
