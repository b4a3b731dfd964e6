"""What a measured run was configured with, as the virtual engine needs it, and what had to be assumed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from harness.engines.flags import EngineFlags, parse_flags
from harness.errors import UserError
from harness.measured_run import MeasuredRun
from harness.profiles import Profile
from harness.profiles.capture import capture_sizes
from harness.profiles.memory import derive_kv_blocks
from harness.refusals import refuse_run

# Flags that decide a replay, and the names under which vLLM's versions record them.
_RECORDED_AS: dict[str, tuple[str, ...]] = {
    "max_model_len": ("max_model_len",),
    "max_num_seqs": ("max_num_seqs",),
    "max_num_active_seqs": ("max_num_active_seqs",),
    "max_num_batched_tokens": ("max_num_scheduled_tokens", "max_num_batched_tokens"),
    "scheduling_policy": ("scheduling_policy", "policy"),
    "long_prefill_token_threshold": ("long_prefill_token_threshold",),
    "long_prefill_token_threshold_adaptive": ("long_prefill_token_threshold_adaptive",),
    "scheduler_reserve_full_isl": ("scheduler_reserve_full_isl",),
    "async_scheduling": ("async_scheduling",),
    "watermark": ("watermark",),
    "enable_chunked_prefill": ("enable_chunked_prefill",),
    "enable_prefix_caching": ("enable_prefix_caching",),
    "block_size": ("block_size",),
}
# Without these a replay may be far off, so a stand-in is said.
_SAID = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")
# The version that first had a behaviour as its default, for runs that do not record the flag.
_DEFAULT_SINCE = {"async_scheduling": (0, 14), "scheduler_reserve_full_isl": (0, 18)}
_UTILIZATION_BEFORE, _NEW_UTILIZATION_SINCE = 0.9, (0, 20)
_QUANTISED = re.compile(
    r"(?i)(?:^|[-_./])(fp8|fp4|nvfp4|mxfp4|awq|gptq|int4|int8|w4a16|w8a8|w8a16|bnb|gguf|[48]bit)(?=$|[-_./])"
)


def refuse_unmodelled(run: MeasuredRun) -> None:
    """UserError, naming it, when the run used something that the virtual engine does not model."""
    where = str(run.meta_file)
    refuse_run(run.meta, where)
    model = run.recorded("model")
    called = _QUANTISED.search(model) if isinstance(model, str) else None
    if called and "quantization" not in _section(run, "model_config"):
        raise UserError(f"{where}: quantised weights [model {model}]: not modelled by the virtual engine")
    policy = run.recorded(*_RECORDED_AS["scheduling_policy"])
    if policy not in (None, "fcfs", "priority"):
        raise UserError(f"{where}: scheduling policy {policy!r} is not modelled; fcfs and priority are")


def flags_of(run: MeasuredRun, profile: Profile, notes: list[str]) -> EngineFlags:
    """The engine flags that the run recorded; for what it does not say, a stand-in that is noted."""
    flags: dict[str, Any] = dict(profile.stock)
    known = set()
    for flag, names in _RECORDED_AS.items():
        value = _value(run, flag, names)
        if value is not None:
            flags[flag] = value
            known.add(flag)
    for flag, since in _DEFAULT_SINCE.items():
        if flag not in known:
            flags[flag] = _by_version(run, flag, since, notes)
    if "max_model_len" not in known:
        longest = max(len(r.prompt) + r.output_tokens for r in run.requests)
        assumed = flags["max_model_len"]
        if not flags.get("enable_chunked_prefill", True):
            assumed = min(assumed, flags["max_num_batched_tokens"])
        flags["max_model_len"] = max(assumed, longest)
    for flag in _SAID:
        if flag not in known:
            notes.append(f"{flag} is not recorded: {flags.get(flag, True)} is assumed")
    if flags["scheduling_policy"] == "priority":
        notes.append("the run scheduled by priority, but records none: all requests have the same")
    return parse_flags(flags, str(run.meta_file))


def _value(run: MeasuredRun, flag: str, names: Sequence[str]) -> Any:
    """A recorded value, in the type that the flag has; numbers and switches may be strings."""
    value = run.recorded(*names)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if isinstance(value, str) and value.isdigit():
        return int(value)
    if isinstance(value, float) and value.is_integer() and flag != "watermark":
        return int(value)
    return value


def _by_version(run: MeasuredRun, flag: str, since: tuple[int, int], notes: list[str]) -> bool:
    """A switch that is not recorded: off where the scheduler's configuration has no such thing."""
    if run.has_resolved_scheduler and flag not in _section(run, "scheduler_config"):
        return False
    version = version_of(run)
    value = version is None or version >= since
    why = (
        "its version is not recorded"
        if version is None
        else f"the default of vLLM {run.meta['vllm_version']}"
    )
    notes.append(f"{flag} is not recorded: {'on' if value else 'off'} is assumed ({why})")
    return value


def version_of(run: MeasuredRun) -> tuple[int, int] | None:
    """vLLM's (major, minor), if it was recorded."""
    found = re.match(r"v?(\d+)\.(\d+)", str(run.meta.get("vllm_version") or ""))
    return (int(found[1]), int(found[2])) if found else None


def tensor_parallel(run: MeasuredRun) -> int:
    """GPUs that shared the model; 1 when it was not recorded."""
    value = _value(run, "tensor_parallel_size", ("tensor_parallel_size",))
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{run.meta_file}: tensor_parallel_size is {value!r}, not a positive number")
    return value


def blocks_of(run: MeasuredRun, profile: Profile, flags: EngineFlags, notes: list[str]) -> int:
    """KV blocks as the run recorded them, else derived from memory, which is then added to `notes`."""
    for name, per_block in (
        ("num_gpu_blocks", 1),
        ("num_gpu_blocks_override", 1),
        ("num_kv_tokens", flags.block_size),
        ("kv_cache_size_tokens", flags.block_size),
    ):
        value = _value(run, name, (name,))
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < per_block:
            raise UserError(
                f"{run.meta_file}: {name} is {value!r}, not a positive number; give the blocks with --blocks N"
            )
        if name != "num_gpu_blocks":
            notes.append(f"KV blocks from {name}: {value // per_block}")
        return int(value) // per_block
    gpus = tensor_parallel(run)
    shape = profile.model_shape.shape.shard(gpus)
    reserved = run.recorded("kv_cache_memory_bytes")
    if isinstance(reserved, int) and reserved > 0:
        blocks = reserved // (shape.kv_bytes_per_token * flags.block_size)
        notes.append(
            f"KV blocks are not recorded: {blocks} in the {reserved / 1e9:.1f} GB set aside for them"
        )
        return blocks
    device = _number(run, "device_total_memory_bytes", 2.0**50) or profile.memory.device_bytes
    used = _number(run, "gpu_memory_utilization", 1.0)
    said = ""
    if used is None:
        version = version_of(run)
        old = version is not None and version < _NEW_UTILIZATION_SINCE
        used = _UTILIZATION_BEFORE if old else profile.memory.utilization
        said = " (the share is not recorded either)"
    derived = derive_kv_blocks(
        profile.model_shape.config,
        int(device),
        used,
        flags.max_num_batched_tokens,
        flags.max_num_seqs,
        flags.block_size,
        gpus,
    )
    if not derived:
        raise UserError(
            f"{run.folder}: by our estimate the model does not fit {used:g} of {int(device) / 1e9:.1f} GB; "
            "give the run's KV blocks with --blocks N (vLLM logs them as it starts)"
        )
    notes.append(
        f"the run does not record its KV blocks: {derived} derived from {used:g} of "
        f"{int(device) / 1e9:.1f} GB{said}; an estimate, give the true number with --blocks N"
    )
    return derived


def _number(run: MeasuredRun, name: str, most: float) -> float | None:
    value = run.recorded(name)
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= most:
        return value
    raise UserError(
        f"{run.meta_file}: {name} is {value!r}; a positive number of at most {most:g} is expected"
    )


def fitted(
    run: MeasuredRun, profile: Profile, flags: EngineFlags, blocks: int, notes: list[str]
) -> EngineFlags:
    """Flags with which the engine can start: a limit on lengths that cache or model cannot hold is lowered.

    vLLM checks that one request of max_model_len fits, and counts that differently between versions; the
    limit decides nothing else. Raises UserError when a request of the run does not fit.
    """
    longest = max(run.requests, key=lambda r: len(r.prompt) + r.output_tokens)
    tokens = len(longest.prompt) + longest.output_tokens
    if tokens > flags.max_model_len:
        raise UserError(
            f"{run.folder}: {longest.request_id!r} has {tokens} tokens, more than the run's max_model_len of "
            f"{flags.max_model_len}"
        )
    held = (blocks - 1) * flags.block_size  # vLLM keeps one block as a placeholder
    if tokens > held:
        raise UserError(
            f"{blocks} KV blocks of {flags.block_size} tokens cannot hold {longest.request_id!r} of {tokens} "
            f"tokens; vLLM would never serve it: give --blocks {-(-tokens // flags.block_size) + 1} or more"
        )
    positions = profile.model_shape.config.get("max_position_embeddings")
    if isinstance(positions, int) and tokens > positions:
        raise UserError(
            f"{run.folder}: {longest.request_id!r} has {tokens} tokens, more than the {positions} positions that "
            f"{profile.model_shape.folder / 'config.json'} allows; give another one with --model DIR"
        )
    limit = min(flags.max_model_len, held, positions if isinstance(positions, int) else held)
    if limit == flags.max_model_len:
        return flags
    why = f"what {blocks} KV blocks hold" if limit == held else "what the model's config.json allows"
    notes.append(f"max_model_len is lowered from {flags.max_model_len} to {limit}, {why}")
    threshold = min(flags.long_prefill_token_threshold, limit)
    return flags.model_copy(update={"max_model_len": limit, "long_prefill_token_threshold": threshold})


def captured_sizes(run: MeasuredRun, flags: EngineFlags) -> tuple[int, ...] | None:
    """CUDA-graph sizes that the run recorded: () for an eager engine, None when it does not say."""
    mode = run.recorded("cudagraph_mode")
    if run.recorded("enforce_eager") in (True, "true", "True") or mode in (0, "NONE", "none"):
        return ()
    sizes = run.recorded("cudagraph_capture_sizes")
    if isinstance(sizes, list) and all(isinstance(s, int) and s > 0 for s in sizes):
        return tuple(sorted(set(sizes)))
    # Long lists are recorded as a `<type>`; their largest entry is not.
    largest = run.recorded("max_cudagraph_capture_size")
    if isinstance(largest, int) and not isinstance(largest, bool):
        return capture_sizes(flags.max_num_seqs, flags.max_num_batched_tokens, largest) if largest > 0 else ()
    return None


def _section(run: MeasuredRun, name: str) -> Any:
    section = run.setting("resolved_config", name)
    return section if isinstance(section, dict) else {}
