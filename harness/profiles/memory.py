"""How many KV blocks vLLM gets out of a GPU: requested memory less weights, less what a profiling run needs.

    blocks = floor((utilization * device - weights - peak - fixed) / bytes of a block)

`peak` is the larger of two moments of vLLM's profiling run: the MLP of a full batch, and sampling for
`max_num_seqs` requests, whose logits are held as 16-bit, as float32 and sorted. `fixed` is what no shape
explains (CUDA context, workspaces, captured graphs); it is what remained on the one run whose block count
is recorded (RTX 4090, 2,588 blocks), so that run is reproduced by construction and others are estimates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIXED_BYTES = 909_000_000
LOGIT_BYTES = 10  # per request and vocabulary entry: 16-bit, float32, sorted float32
DTYPE_BYTES = 2


def head_dim(config: Mapping[str, Any]) -> int:
    """Width of one attention head; not always hidden / heads."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def parameters(config: Mapping[str, Any]) -> int:
    """Weights of a Llama-like dense model, norms included, biases not."""
    hidden, inter, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    q = config["num_attention_heads"] * head_dim(config)
    kv = config["num_key_value_heads"] * head_dim(config)
    layer = hidden * (2 * q + 2 * kv) + 3 * hidden * inter + 2 * hidden
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return int(layers * layer + embeddings + hidden)


def kv_bytes_per_token(config: Mapping[str, Any]) -> int:
    """Keys and values of one token over all layers, bytes."""
    return int(
        2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim(config) * DTYPE_BYTES
    )


def derive_kv_blocks(
    config: Mapping[str, Any],
    device_bytes: int,
    utilization: float,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    block_size: int = 16,
) -> int:
    """KV blocks on one GPU (tensor parallel 1, 16-bit weights and cache); 0 when the model does not fit."""
    mlp = max_num_batched_tokens * DTYPE_BYTES * (3 * config["intermediate_size"] + 4 * config["hidden_size"])
    sampling = max_num_seqs * config["vocab_size"] * LOGIT_BYTES
    free = utilization * device_bytes - parameters(config) * DTYPE_BYTES - max(mlp, sampling) - FIXED_BYTES
    return max(int(free // (kv_bytes_per_token(config) * block_size)), 0)
