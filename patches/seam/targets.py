"""The upstream objects whose code the seams rely on, and where they are written."""

from __future__ import annotations

# Top-level class or function -> file below the vllm package.
FILES: dict[str, str] = {
    "Scheduler": "v1/core/sched/scheduler.py",
    "AsyncScheduler": "v1/core/sched/async_scheduler.py",
    "RequestQueue": "v1/core/sched/request_queue.py",
    "PriorityRequestQueue": "v1/core/sched/request_queue.py",
    "create_request_queue": "v1/core/sched/request_queue.py",
    "BlockPool": "v1/core/block_pool.py",
    "BlockHashToBlockMap": "v1/core/block_pool.py",
    "make_block_hash_with_group_id": "v1/core/kv_cache_utils.py",
    "KVCacheManager": "v1/core/kv_cache_manager.py",
    "UnitaryKVCacheCoordinator": "v1/core/kv_cache_coordinator.py",
    "FullAttentionManager": "v1/core/single_type_kv_cache_manager.py",
    "FreeKVCacheBlockQueue": "v1/core/kv_cache_utils.py",
    "EngineCoreOutput": "v1/engine/__init__.py",
    "AsyncLLM": "v1/engine/async_llm.py",
    "EngineCore": "v1/engine/core.py",
    "build_app": "entrypoints/launchers/app.py",
    "init_entrypoints_middleware": "entrypoints/serve/middleware/register.py",
    "AuthenticationMiddleware": "entrypoints/serve/middleware/authenticate.py",
    "GenerateBaseServing": "entrypoints/generate/base/serving.py",
    "OpenAIServingCompletion": "entrypoints/openai/completion/serving.py",
    "create_error_response": "entrypoints/serve/exception_handling/error_response.py",
    "SingleDirectionOffloadingHandler": "v1/kv_offload/cpu/gpu_worker.py",
}

# What the observers of a live run hang on (`harness/engines/live/telemetry/hooks.py`).
OBSERVED = (
    "BlockPool._maybe_evict_cached_block",
    "EngineCore._process_aborts_queue",
    "EngineCore.preprocess_add_request",
    "Scheduler.__init__",
    "Scheduler._free_request",
    "Scheduler._preempt_request",
    "Scheduler.add_request",
    "Scheduler.reset_prefix_cache",
    "Scheduler.schedule",
    "Scheduler.update_from_output",
)

# What the front of an API server relies on (`patches/front`): to be put in, to say who calls, and to answer for refusals.
FRONT = (
    "AuthenticationMiddleware",
    "GenerateBaseServing._get_priority",
    "build_app",
    "init_entrypoints_middleware",
)
REFUSALS = (
    "AsyncLLM.generate",
    "GenerateBaseServing._convert_generation_error_to_streaming_response",
    "OpenAIServingCompletion.completion_stream_generator",
    "create_error_response",
)


# Why `tiering` need not hold freed blocks back: what upstream does so for, and that loads wait for the passes before them.
OFFLOADING = (
    "Scheduler._request_blocks_can_be_freed",
    "SingleDirectionOffloadingHandler.transfer_async",
)


def file_of(target: str) -> str:
    """The file of a target such as `Scheduler.schedule`, below the vllm package."""
    return FILES[target.split(".")[0]]
