"""The engine flags that vLLM 0.32.0's API server resolves on a GPU, with no flag but --max-model-len.

The rule is `EngineArgs.get_batch_defaults` for the usage context of the API server: by the memory of one
GPU, with the A100 as its one exception by name.
"""

from __future__ import annotations

from typing import Any

_GIB = 2**30


def stock_flags(
    device_bytes: int, device_name: str, max_model_len: int, block_size: int = 16
) -> dict[str, Any]:
    """Scheduling flags of an engine on that GPU."""
    if device_bytes >= 160 * _GIB:
        tokens, sequences = 16384, 1024
    elif device_bytes >= 70 * _GIB and "a100" not in device_name.lower():
        tokens, sequences = 8192, 1024
    else:
        tokens, sequences = 2048, 256
    return {
        "max_model_len": max_model_len,
        "max_num_batched_tokens": tokens,
        "max_num_seqs": sequences,
        "scheduling_policy": "fcfs",
        "watermark": 0.0,
        "long_prefill_token_threshold": 0,
        "scheduler_reserve_full_isl": True,
        "enable_prefix_caching": True,
        "async_scheduling": True,
        "block_size": block_size,
    }
