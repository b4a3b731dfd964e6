"""vLLM's configuration for a GPU that is not here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import vllm_env
from harness.engines.flags import EngineFlags


@contextmanager
def gpu_model_runner() -> Iterator[None]:
    """GPUs run Model Runner V2 by default; the CPU wheel, without Triton, falls back to V1.

    The scheduler behaves differently under the two, so it is told what the profile's GPU would say.
    The flag is read through vLLM's environment, which is cached once an engine has started.
    """
    from vllm import envs

    envs.disable_envs_cache()
    before = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    try:
        yield
    finally:
        envs.disable_envs_cache()
        if before is None:
            del os.environ["VLLM_USE_V2_MODEL_RUNNER"]
        else:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = before


def engine_config(model_dir: Path, flags: EngineFlags) -> Any:
    """The `VllmConfig` of these flags; `model_dir` needs to hold no more than a config.json."""
    vllm_env.prepare()
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs

    envs.disable_envs_cache()
    values = flags.model_dump()
    # The CPU platform insists on synchronous scheduling; a GPU defaults to asynchronous.
    async_scheduling = values.pop("async_scheduling")
    config = EngineArgs(
        model=str(model_dir),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        **values,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = async_scheduling
    return config
