"""Lets vLLM's configuration be that of a GPU on a machine that has none.

In each process that checks it: the API server builds it, and the engine checks it again once it has started.
"""

from __future__ import annotations

import os
from typing import Any

from harness.engines.virtual.config import PINNED


def keep_async_scheduling() -> None:
    """Let the flag decide whether scheduling is asynchronous; vLLM's CPU platform turns it off."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    setattr(platform, "check_and_update_config", classmethod(check_and_update_config))  # noqa: B010


def pin_engine() -> None:
    """Make this process's engine what a virtual one is; to be called in it, before its scheduler is built.

    The API server keeps vLLM's Model Runner V1: the other one's checks of sampling parameters need a GPU's libraries.
    """
    from vllm import envs
    from vllm.config import VllmConfig

    # vLLM refuses Model Runner V2 without Triton, in which its kernels are written; none of them runs here.
    VllmConfig._validate_v2_model_runner = _validate_v2_model_runner
    os.environ.update(PINNED)
    envs.disable_envs_cache()


def _validate_v2_model_runner(self: Any) -> None:
    unsupported = self._get_v2_model_runner_unsupported_features()
    if unsupported:
        raise ValueError(f"Model Runner V2 does not yet support: {', '.join(unsupported)}")
