"""What a measured run was configured with, as the virtual engine needs it."""

from __future__ import annotations

from typing import Any

from harness.engines.flags import EngineFlags, parse_flags
from harness.errors import UserError
from harness.measured_run import MeasuredRun
from harness.profiles import Profile, list_profiles, load_profile
from harness.profiles.memory import derive_kv_blocks
from harness.profiles.profile import read_model_config


def profile_for(run: MeasuredRun) -> Profile:
    """The built-in profile of the GPU and model that the run recorded."""
    device = run.setting("hardware", "device_name")
    model = run.setting("model")
    # Variants of a GPU (say, with part of its memory) have longer names than the GPU itself.
    for name in sorted(list_profiles(), key=lambda name: (len(name), name)):
        candidate = load_profile(name)
        if device in candidate.device_names and _same_model(model, candidate):
            return candidate
    raise UserError(
        f"{run.folder / 'run_meta.json'}: no profile for {model!r} on {device!r}; "
        f"choose one with --profile ({', '.join(list_profiles())})"
    )


def flags_of(run: MeasuredRun, profile: Profile) -> EngineFlags:
    """The engine flags that the run recorded; what it does not say is the profile's stock."""
    scheduler, cache = ("resolved_config", "scheduler_config"), ("resolved_config", "cache_config")
    told = {
        "max_model_len": (
            ("resolved_config", "model_config", "max_model_len"),
            ("engine_kwargs", "max_model_len"),
        ),
        "max_num_seqs": ((*scheduler, "max_num_seqs"), ("engine_kwargs", "max_num_seqs")),
        "max_num_batched_tokens": (
            (*scheduler, "max_num_batched_tokens"),
            ("engine_kwargs", "max_num_batched_tokens"),
        ),
        "scheduling_policy": ((*scheduler, "policy"),),
        "long_prefill_token_threshold": ((*scheduler, "long_prefill_token_threshold"),),
        "scheduler_reserve_full_isl": ((*scheduler, "scheduler_reserve_full_isl"),),
        "async_scheduling": ((*scheduler, "async_scheduling"),),
        "watermark": ((*cache, "watermark"), (*scheduler, "watermark")),
        "enable_prefix_caching": ((*cache, "enable_prefix_caching"), ("kv_cache", "enable_prefix_caching")),
        "block_size": ((*cache, "block_size"), ("kv_cache", "block_size")),
    }
    flags: dict[str, Any] = dict(profile.stock)
    for flag, paths in told.items():
        recorded = [value for path in paths if (value := run.setting(*path)) is not None]
        if recorded:
            flags[flag] = recorded[0]
    return parse_flags(flags, str(run.folder / "run_meta.json"))


def refuse_unmodelled(run: MeasuredRun) -> None:
    """UserError, naming it, when the run used something that the virtual engine does not model."""
    config = "resolved_config"
    refused = {
        "tensor parallelism": (run.setting(config, "parallel_config", "tensor_parallel_size"), (None, 1)),
        "pipeline parallelism": (run.setting(config, "parallel_config", "pipeline_parallel_size"), (None, 1)),
        "data parallelism": (run.setting(config, "parallel_config", "data_parallel_size"), (None, 1)),
        "quantised weights": (run.setting(config, "model_config", "quantization"), (None,)),
        "a quantised KV cache": (
            run.setting(config, "cache_config", "cache_dtype"),
            (None, "auto", "bfloat16"),
        ),
        "speculative decoding": (run.setting(config, "speculative_config"), (None,)),
        "LoRA": (run.setting(config, "lora_config"), (None,)),
        "KV transfer": (run.setting(config, "kv_transfer_config"), (None,)),
    }
    for what, (value, fine) in refused.items():
        if value not in fine:
            raise UserError(
                f"{run.folder / 'run_meta.json'}: the run used {what} ({value}), which is not modelled"
            )


def blocks_of(run: MeasuredRun, profile: Profile, flags: EngineFlags, notes: list[str]) -> int:
    """KV blocks as the run recorded them, else derived from memory, which is then added to `notes`."""
    recorded = run.setting("kv_cache", "num_gpu_blocks")
    if recorded is None:
        recorded = run.setting("resolved_config", "cache_config", "num_gpu_blocks")
    if isinstance(recorded, int) and recorded > 0:
        return recorded
    if recorded is not None:
        raise UserError(
            f"{run.folder / 'run_meta.json'}: num_gpu_blocks is {recorded!r}, not a positive number"
        )
    device = run.setting("hardware", "device_total_memory_bytes") or profile.memory.device_bytes
    used = (
        run.setting("resolved_config", "cache_config", "gpu_memory_utilization") or profile.memory.utilization
    )
    derived = derive_kv_blocks(
        read_model_config(profile.name.split("/", 1)[1]),
        int(device),
        float(used),
        flags.max_num_batched_tokens,
        flags.max_num_seqs,
        flags.block_size,
    )
    if not derived:
        raise UserError(
            f"{run.folder}: the model does not fit the GPU's memory; give the blocks with --blocks N"
        )
    notes.append(
        f"the run does not record its KV blocks: {derived} derived from {used:g} of {device / 1e9:.1f} GB"
    )
    return derived


def check_fits(run: MeasuredRun, flags: EngineFlags, blocks: int) -> None:
    """UserError when the engine could not start, or could never serve one of the requests."""
    needed = -(-flags.max_model_len // flags.block_size) + 1  # vLLM keeps one block as a placeholder
    if blocks < needed:
        raise UserError(
            f"{blocks} KV blocks of {flags.block_size} tokens cannot hold one request of max_model_len "
            f"{flags.max_model_len}; vLLM would not start: give --blocks {needed} or more"
        )
    for request in run.requests:
        tokens = len(request.prompt) + request.output_tokens
        if tokens > flags.max_model_len:
            raise UserError(
                f"{run.folder / 'requests.jsonl'}: {request.request_id!r} has {tokens} tokens, more than the "
                f"run's max_model_len of {flags.max_model_len}"
            )


def captured_sizes(run: MeasuredRun) -> tuple[int, ...] | None:
    """CUDA-graph sizes that the run recorded: () for an eager engine, None when it does not say."""
    if run.setting("resolved_config", "model_config", "enforce_eager"):
        return ()
    sizes = run.setting("resolved_config", "compilation_config", "cudagraph_capture_sizes")
    if isinstance(sizes, list) and all(isinstance(size, int) for size in sizes):
        return tuple(sorted(sizes))
    return None


def _same_model(model: Any, profile: Profile) -> bool:
    if not isinstance(model, str):
        return False
    last = model.rstrip("/").rsplit("/", 1)[-1].lower()
    return last in {name.rsplit("/", 1)[-1].lower() for name in profile.model_names}
