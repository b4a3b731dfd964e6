"""How many KV blocks vLLM gets out of a GPU: requested memory less weights, less what a profiling run needs.

    blocks = floor((utilization * device - weights - peak - fixed) / bytes of a block)

All of it is per GPU: under tensor parallelism each holds its share of the weights and of every block.
`peak` is the larger of two moments of vLLM's profiling run: the MLP of a full batch, and sampling for
`max_num_seqs` requests, whose logits are held as 16-bit, as float32 and sorted. `fixed` is what no shape
explains (CUDA context, workspaces, captured graphs); it is what remained on the one run whose block count
is recorded (RTX 4090, 2,588 blocks), so that run is reproduced by construction and others are estimates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.profiles.shape import DTYPE_BYTES, ModelShape

FIXED_BYTES = 909_000_000
LOGIT_BYTES = 10  # per request and vocabulary entry: 16-bit, float32, sorted float32
# What NCCL keeps on each GPU of a group: ai-dynamo/aiconfigurator's system files, there called unofficial.
NCCL_BYTES = {1: 0, 2: 358_612_992}
NCCL_BYTES_MORE = 411_041_792


def derive_kv_blocks(
    config: Mapping[str, Any],
    device_bytes: int,
    utilization: float,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    block_size: int = 16,
    tensor_parallel: int = 1,
) -> int:
    """KV blocks that one engine gets (16-bit weights and cache); 0 when the model does not fit.

    `config` is the model's config.json; `device_bytes` is the memory of each of the GPUs.
    """
    whole = ModelShape.from_config(config, "config.json")
    part = whole.shard(tensor_parallel)
    mlp = max_num_batched_tokens * DTYPE_BYTES * (3 * part.intermediate + 4 * part.hidden)
    # Every GPU of a group samples from the gathered logits.
    sampling = max_num_seqs * whole.vocab * LOGIT_BYTES
    fixed = FIXED_BYTES + NCCL_BYTES.get(tensor_parallel, NCCL_BYTES_MORE)
    free = utilization * device_bytes - part.parameters * DTYPE_BYTES - max(mlp, sampling) - fixed
    return max(int(free // (part.kv_bytes_per_token * block_size)), 0)
