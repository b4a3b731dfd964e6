"""A real engine on the CPU with tiers below it, and traffic that pushes blocks down and calls them back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.real.conftest import BLOCK_SIZE, real_engine

BLOCKS = 26
# Two layers, keys and values, two heads of 32 numbers of four bytes, 32 tokens.
BLOCK_BYTES = 2 * 2 * 2 * 32 * 4 * BLOCK_SIZE
# Everything goes down at once and comes back whatever it costs: a real engine this small computes faster than it copies.
EAGER = {
    "save_ahead_share": 0.0,
    "reload_min_blocks": 1,
    "reload_cost_ratio": 100.0,
    "token_recompute_us": 1e6,
}


@contextmanager
def tiered_engine(model: Path, knobs: Mapping[str, Any] | None) -> Iterator[Any]:
    """vLLM's LLMEngine in this process with `tiering` and these knobs; None is vLLM as it is."""
    patches, own = ("tiering", {"tiering": knobs}) if knobs is not None else ("", None)
    with real_engine(model, patches, BLOCKS, own) as engine:
        yield engine


def scheduler_of(engine: Any) -> Any:
    """The real Scheduler."""
    return engine.engine_core.engine_core.scheduler


def tiers_of(engine: Any) -> Any:
    """The connector's scheduler side."""
    return scheduler_of(engine).connector.tiers


def prompts(count: int, seed: int = 7) -> list[list[int]]:
    """Prompts of mixed length that share prefixes in groups of three."""
    rng = np.random.default_rng(seed)
    shared = [rng.integers(3, 1000, 64).tolist() for _ in range(3)]
    return [
        shared[i % 3] + rng.integers(3, 1000, n).tolist() for i, n in enumerate(rng.integers(16, 260, count))
    ]


def serve(
    engine: Any, asked: list[list[int]], tenant: str, output: int = 12, wave: str = ""
) -> list[list[int]]:
    """Greedy outputs, in the order in which they were asked for."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    for i, tokens in enumerate(asked):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=output,
            ignore_eos=True,
            detokenize=False,
            extra_args={"tenant": tenant, "tier": "bronze"},
        )
        engine.add_request(f"{wave}{i}", TokensPrompt(prompt_token_ids=tokens), params, priority=1)
    outputs: dict[str, list[int]] = {}
    pool = scheduler_of(engine).kv_cache_manager.block_pool
    while engine.has_unfinished_requests():
        for one in engine.step():
            if one.finished:
                outputs[one.request_id] = list(one.outputs[0].token_ids)
        assert all(block.ref_cnt >= 0 for block in pool.blocks)
    return [outputs[f"{wave}{i}"] for i in range(len(asked))]


def churn(engine: Any, tenant: str = "a") -> list[list[int]]:
    """Two dozen prompts, which the pool cannot hold at once, and then the same again: what was pushed out returns."""
    asked = prompts(24)
    return serve(engine, asked, tenant, wave="x") + serve(engine, asked, tenant, wave="y")
