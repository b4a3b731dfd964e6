"""Guards that no patch changes what is generated, and that none leaks or over-frees a KV block.

The engine and the model are real (CPU, in process, synchronous scheduling), the pool is small enough
that requests are preempted and cached blocks evicted. Does not guard asynchronous scheduling with a
real model (vLLM's runner for it needs a GPU); the virtual engine covers the scheduler's side of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patches.catalogue import CATALOGUE
from patches.seam import adapter
from tests.real.conftest import BLOCK_SIZE, real_engine

ALL = ",".join(
    entry.name for entry in CATALOGUE if entry.built and entry.area in ("scheduling", "kv", "fixes")
)
# Without any patch that brings a queue of its own.
CACHE = "slru,shield"
BLOCKS = 26
# Small, so that this traffic meets them.
KNOBS: dict[str, dict[str, Any]] = {
    "qos": {"short_prompt_tokens": 100, "victim_prompt_tokens": 0, "preempt_cooldown_s": 0.0},
    "mlfq": {"level0_tokens": 64, "level1_tokens": 128, "level2_tokens": 256, "last_level_step_tokens": 64},
    "watermark": {"short_prompt_tokens": 64},
    "ratelimit": {"burst_tokens": 64, "most_rate_tokens": 16},
    "prefillbudget": {"long_prompt_tokens": 150, "short_prefill_tokens": 16, "least_tokens": 16},
    "tiering": {"host_bytes": 2**22, "reload_min_blocks": 1, "reload_cost_ratio": 100.0},
    "overload": {"long_prompt_tokens": 150, "long_step_least_tokens": 16},
}
# What this traffic must make act, or the comparison says nothing of it.
ACTING = {"qos", "mlfq", "wfq", "watermark", "edf", "prefillbudget", "tenant", "slru"}


def add(engine: Any, name: str, prompt: list[int], output: int, tenant: int) -> None:
    """Send one greedy request of a tenant."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(
        temperature=0.0,
        max_tokens=output,
        ignore_eos=True,
        detokenize=False,
        extra_args={
            "tenant": f"t{tenant % 5}",
            "tier": ("gold", "silver", "bronze")[tenant % 3],
            "weight": (4, 2, 1)[tenant % 3],
            # Real time passes here, and a request that is refused or ended for it cannot be compared.
            "slo_ttft_ms": 3.6e6,
        },
    )
    engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params, priority=tenant % 3)


def prompts(count: int) -> list[list[int]]:
    """Prompts of mixed length that share prefixes in groups."""
    rng = np.random.default_rng(7)
    shared = [rng.integers(3, 1000, 64).tolist() for _ in range(3)]
    lengths = rng.integers(16, 260, count)
    return [shared[i % 3] + rng.integers(3, 1000, n).tolist() for i, n in enumerate(lengths)]


def generate(engine: Any, pool: Any) -> tuple[dict[str, list[int]], int]:
    """Outputs by request, and how often requests were preempted; checks the pool on the way."""
    scheduler = engine.engine_core.engine_core.scheduler
    seen: dict[str, Any] = {}
    for i, prompt in enumerate(prompts(30)):
        add(engine, f"r{i}", prompt, 24, i)
    seen.update(scheduler.requests)
    outputs: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = list(output.outputs[0].token_ids)
        assert all(block.ref_cnt >= 0 for block in pool.blocks)
    return outputs, sum(request.num_preemptions for request in seen.values())


def pool_of(engine: Any) -> Any:
    """The real block pool."""
    return engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool


def test_greedy_outputs_are_token_identical_with_and_without_patches(small_model: Path) -> None:
    results = {}
    for patches in ("", ALL, CACHE):
        with real_engine(small_model, patches, BLOCKS, KNOBS if patches == ALL else None) as engine:
            pool = pool_of(engine)
            free = pool.get_num_free_blocks()
            results[patches], preemptions = generate(engine, pool)
            assert pool.get_num_free_blocks() == free
            # With all of them `watermark` sees to it that none is needed.
            assert preemptions > 0 or patches == ALL, "the pool is too large for this test to say anything"
            if patches == ALL:
                installed = adapter.active()
                assert installed is not None and not ACTING & {*installed.tallies.never_fired()}
    stock = results[""]
    assert len(stock) == 30
    assert all(len(tokens) == 24 for tokens in stock.values())
    assert len({tuple(tokens) for tokens in stock.values()}) > 20, "outputs too alike to tell a mix-up"
    assert results[ALL] == results[CACHE] == stock


Action = tuple[str, int, int, int]
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 5), st.integers(1, 300), st.integers(1, 40)),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 6), st.just(0), st.just(0)),
    ),
    min_size=5,
    max_size=40,
)


@pytest.fixture(scope="module")
def patched_engine(small_model: Path) -> Any:
    """One engine with all patches for all examples: a leak in one shows in the next."""
    with real_engine(small_model, ALL, BLOCKS, KNOBS) as engine:
        yield engine


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_no_block_is_leaked_or_freed_twice(patched_engine: Any, actions: list[Action]) -> None:
    engine = patched_engine
    pool = pool_of(engine)
    free = pool.get_num_free_blocks()
    assert free == BLOCKS - 1
    rng = np.random.default_rng(len(actions))
    sent: list[str] = []
    for kind, a, b, c in actions:
        if kind == "add":
            name = f"h{len(sent)}"
            shared = [10 + a] * (2 * BLOCK_SIZE)
            add(engine, name, shared + rng.integers(3, 1000, b).tolist(), c, a)
            sent.append(name)
        elif kind == "cancel" and sent:
            engine.abort_request([sent[a % len(sent)]])
        else:
            for _ in range(a):
                engine.step()
        check(pool)
    while engine.has_unfinished_requests():
        engine.step()
        check(pool)
    # One more step lets the scheduler tell the worker of the last ones that ended.
    engine.step()
    assert pool.get_num_free_blocks() == free


def check(pool: Any) -> None:
    """No block is referenced below zero, none is both free and referenced, and the count is right."""
    listed = pool.free_block_queue.get_all_free_blocks()
    assert len(listed) == len({block.block_id for block in listed}) == pool.get_num_free_blocks()
    assert all(block.ref_cnt == 0 for block in listed)
    assert all(block.ref_cnt >= 0 for block in pool.blocks)
    referenced = sum(1 for block in pool.blocks if block.ref_cnt > 0 and not block.is_null)
    assert referenced + len(listed) == len(pool.blocks) - 1
