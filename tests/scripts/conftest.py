"""A model small enough for a CPU, and its kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from harness.profiles.shape import ModelShape
from scripts.gpu_timing.attention import Attention
from scripts.gpu_timing.kernels import Kernel
from scripts.gpu_timing.kv import KvCache

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config.json of a tiny model."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture(scope="session")
def tiny() -> ModelShape:
    """Its shape: four query heads to a key-value head."""
    return ModelShape.from_config(TINY, "tiny")


def attention_of(shape: ModelShape, kernel: Kernel, tokens: int = 16384) -> Attention:
    """Attention on the CPU in bfloat16, with a cache of so many tokens."""
    cache = KvCache(shape, tokens, kernel.page, dtype=torch.bfloat16, device="cpu", seed=0)
    return Attention(
        shape, kernel, cache, max_tokens=64, l2_bytes=1 << 16, dtype=torch.bfloat16, device="cpu"
    )
