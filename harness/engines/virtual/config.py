"""vLLM's configuration for a GPU that is not here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness import vllm_env
from harness.engines.flags import EngineFlags
from harness.errors import UserError

_PLAYED_SPEC = "CPUOffloadingSpec"

# What the process environment says while an engine is built and run.
PINNED = {
    # GPUs run Model Runner V2 by default; the CPU wheel, without Triton, falls back to V1. The scheduler
    # behaves differently under the two, so it is told what the profile's GPU would say.
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    # vLLM derives the root of all block hashes from it, and a patch may tell blocks apart by their hashes.
    "PYTHONHASHSEED": "0",
}


@contextmanager
def pinned_environment() -> Iterator[None]:
    """The environment that every virtual engine sees, whatever the caller's is; restored on leaving.

    vLLM caches its environment once an engine has started, so the cache is dropped on both sides.
    """
    from vllm import envs

    envs.disable_envs_cache()
    before = {name: os.environ.get(name) for name in PINNED}
    os.environ.update(PINNED)
    try:
        yield
    finally:
        envs.disable_envs_cache()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _kv_transfer(raw: dict[str, Any] | None) -> Any:
    """Upstream's object for it; UserError if it is none, or asks for a tier that cannot be played."""
    if raw is None:
        return None
    from vllm.config import KVTransferConfig

    spec = raw.get("kv_connector_extra_config", {}).get("spec_name", _PLAYED_SPEC)
    if spec != _PLAYED_SPEC:
        raise UserError(
            f"kv_transfer_config: upstream's {spec} maps host memory, which the virtual engine does not have; "
            f"only {_PLAYED_SPEC} can be played: take spec_name out"
        )
    try:
        return KVTransferConfig(**raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"kv_transfer_config: {place} {first['msg']}; it takes the fields of vLLM's KVTransferConfig"
        ) from None


def engine_config(model_dir: Path, flags: EngineFlags) -> Any:
    """The `VllmConfig` of these flags; `model_dir` needs to hold no more than a config.json."""
    vllm_env.prepare()
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs

    envs.disable_envs_cache()
    values = flags.model_dump()
    # The CPU platform insists on synchronous scheduling; a GPU defaults to asynchronous.
    async_scheduling = values.pop("async_scheduling")
    values["kv_transfer_config"] = _kv_transfer(flags.kv_transfer_config)
    config = EngineArgs(
        model=str(model_dir),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        **values,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = async_scheduling
    return config
