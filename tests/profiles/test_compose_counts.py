"""Operations and bytes of composed tables against vLLM's own count of a step (vllm/v1/metrics/perf.py).

A shape of which there is only a config.json is timed by these counts, so they have to be vLLM's. Does not guard
time: that is the measured share of the roofline. vLLM counts attention of a prefill without the causal mask.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from harness import vllm_env
from harness.profiles.elementwise import moved_bytes
from harness.profiles.gemm import gemm_bytes, gemm_flops
from harness.profiles.known_models import load_model
from harness.profiles.shape import ModelShape

TOKENS, CONTEXT = 24, 1000


@pytest.fixture(scope="module", params=["llama-3.1-8b", "qwen3-0.6b", "qwen3-8b"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """A model's name and what vLLM makes of its config.json, parsed once."""
    pytest.importorskip("vllm")
    vllm_env.prepare()
    from vllm.engine.arg_utils import EngineArgs

    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(dict(load_model(request.param).config)), encoding="utf-8")
    arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16")
    return request.param, arguments.create_engine_config()


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_counts_are_those_of_vllm(config: tuple[str, Any], gpus: int) -> None:
    from vllm.v1.metrics.perf import ExecutionContext, ModelMetrics

    name, vllm_config = config
    shape = load_model(name).shape.shard(gpus)
    vllm_config.parallel_config.tensor_parallel_size = gpus
    metrics = ModelMetrics(vllm_config)
    batch = ExecutionContext()
    for _ in range(TOKENS):
        batch.add(1, CONTEXT, is_prefill=False)
    flops = metrics.get_num_flops_breakdown(batch)
    moved = _sum(metrics.get_read_bytes_breakdown(batch), metrics.get_write_bytes_breakdown(batch))
    gemms = {what: (n, k) for what, n, k in shape.gemms}
    layers = shape.layers

    assert flops["attn.qkv_proj"] == layers * gemm_flops(*gemms["qkv_proj"], TOKENS)
    assert flops["attn.out_proj"] == layers * gemm_flops(*gemms["o_proj"], TOKENS)
    assert flops["ffn.dense_ffn"] == layers * (
        gemm_flops(*gemms["gate_up_proj"], TOKENS) + gemm_flops(*gemms["down_proj"], TOKENS)
    )
    assert flops["unembed.unembed"] == gemm_flops(shape.vocab, shape.hidden, TOKENS)
    attention = flops["attn.attn_qk"] + flops["attn.attn_av"]
    assert attention == layers * 4 * shape.heads * shape.head_dim * TOKENS * CONTEXT

    for prefix, product in (("attn.qkv", "qkv_proj"), ("attn.out", "o_proj")):
        ours = layers * gemm_bytes(*gemms[product], TOKENS)
        assert sum(moved[f"{prefix}_{part}"] for part in ("input", "weight", "output")) == ours
    for prefix, product in (("ffn.dense_up_gate", "gate_up_proj"), ("ffn.dense_down", "down_proj")):
        ours = layers * gemm_bytes(*gemms[product], TOKENS)
        assert sum(moved[f"{prefix}_{part}"] for part in ("input", "weights", "output")) == ours
    assert moved["ffn.dense_silu_input"] + moved["ffn.dense_silu_output"] == layers * TOKENS * moved_bytes(
        "act", shape
    )
    head = gemm_bytes(shape.vocab, shape.hidden, TOKENS)
    assert sum(moved[f"unembed.{part}"] for part in ("input", "weight", "output")) == head
    assert moved["attn.attn_input"] == layers * _decode_bytes(shape)


def _decode_bytes(shape: ModelShape) -> int:
    """Queries of a layer, and the keys and values that they meet."""
    kv = shape.kv_bytes_per_token // shape.layers
    return TOKENS * (shape.heads * shape.head_dim * 2 + CONTEXT * kv)


def _sum(read: Mapping[str, int], written: Mapping[str, int]) -> dict[str, int]:
    return {key: read.get(key, 0) + written.get(key, 0) for key in {*read, *written}}
