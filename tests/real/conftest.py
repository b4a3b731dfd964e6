"""A real engine in this process, on the small random Llama of `tests/small_llama.py`."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.small_llama import save_small_llama

# The CPU attention kernel takes multiples of 32.
BLOCK_SIZE = 32
MAX_MODEL_LEN = 512


@pytest.fixture(scope="module", autouse=True)
def _no_forced_collections() -> Iterator[None]:
    """vLLM collects all garbage several times as an engine starts and ends: seconds, over all that is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda *_: 0)
        yield


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config and weights; the same weights in every session."""
    import torch

    # Kernels this small lose far more to waiting for a second thread than they gain by it.
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("small-llama")
    save_small_llama(folder, 4096)
    return folder


@contextmanager
def real_engine(
    model: Path, patches: str, blocks: int, knobs: Mapping[str, Mapping[str, Any]] | None = None
) -> Iterator[Any]:
    """vLLM's LLMEngine in this process, with these patches installed ("" for none) and the flags that they bring."""
    from vllm import envs
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from patches.seam.adapter import install
    from patches.seam.plan import resolve

    envs.disable_envs_cache()
    installation, brought = None, {}
    if patches:
        plan = resolve(patches, knobs=knobs)
        installation = install(plan)
        if (transfer := plan.engine_flags.get("kv_transfer_config")) is not None:
            brought["kv_transfer_config"] = KVTransferConfig(**transfer)
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=blocks,
            enable_prefix_caching=True,
            # No profiling of the host memory: it depends on what else runs.
            kv_cache_memory_bytes=64 * 2**20,
            disable_log_stats=True,
            **brought,
        ),
        enable_multiprocessing=False,
    )
    try:
        yield engine
    finally:
        engine.engine_core.shutdown()
        if installation is not None:
            installation.undo()
