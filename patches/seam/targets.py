"""The upstream objects whose code the seams rely on, and where they are written."""

from __future__ import annotations

# Top-level class or function -> file below the vllm package.
FILES: dict[str, str] = {
    "Scheduler": "v1/core/sched/scheduler.py",
    "AsyncScheduler": "v1/core/sched/async_scheduler.py",
    "RequestQueue": "v1/core/sched/request_queue.py",
    "create_request_queue": "v1/core/sched/request_queue.py",
    "BlockPool": "v1/core/block_pool.py",
    "FreeKVCacheBlockQueue": "v1/core/kv_cache_utils.py",
    "EngineCoreOutput": "v1/engine/__init__.py",
    "AsyncLLM": "v1/engine/async_llm.py",
}


def file_of(target: str) -> str:
    """The file of a target such as `Scheduler.schedule`, below the vllm package."""
    return FILES[target.split(".")[0]]
