"""Drives a real Scheduler without a model: configuration, requests, and a loop that runs it to its end.

Import it after `harness.vllm_env.prepare()` (conftest does that); it imports vLLM.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

MODEL = Path(__file__).resolve().parent.parent / "harness" / "profiles" / "models" / "llama-3.1-8b"


def make_config(
    *,
    block_size: int = 16,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    max_model_len: int = 4096,
    policy: str = "fcfs",
    async_scheduling: bool = False,
    **scheduler: Any,
) -> Any:
    """A VllmConfig for the shape of Llama-3.1-8B; further keywords go to SchedulerConfig."""
    model = ModelConfig(
        model=str(MODEL),
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        enforce_eager=True,
        dtype="bfloat16",
        seed=0,
    )
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=True,
            policy=policy,
            **scheduler,
        ),
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
    )
    # The CPU platform switches async scheduling off while the config is built.
    config.scheduler_config.async_scheduling = async_scheduling
    return config


def make_scheduler(config: Any, num_blocks: int, *, log_stats: bool = True) -> Any:
    """The Scheduler (or AsyncScheduler) that vLLM itself would build, on a pool of `num_blocks`."""
    size = config.cache_config.block_size
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    config.cache_config.num_gpu_blocks = num_blocks
    register_all_kvcache_specs(config)
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=kv,
        block_size=size,
        hash_block_size=size,
        log_stats=log_stats,
        structured_output_manager=StructuredOutputManager(config),
    )


def make_request(
    config: Any,
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 16,
    arrival_time: float = 0.0,
    priority: int = 0,
    tenant: str = "",
    tier: str = "",
) -> Any:
    """A Request of these prompt tokens that generates exactly `max_tokens`."""
    hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    params = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, temperature=0.0, extra_args={"tenant": tenant, "tier": tier}
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=params,
        pooling_params=None,
        arrival_time=arrival_time,
        priority=priority,
        block_hasher=get_request_block_hasher(config.cache_config.block_size, hash_fn),
    )


@dataclass
class Trace:
    """What a run did: per step the tokens of each request, and how each request ended."""

    steps: list[dict[str, int]] = field(default_factory=list)
    first_step: dict[str, int] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    finished: dict[str, str] = field(default_factory=dict)
    stop_reasons: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)

    def order(self) -> list[str]:
        """Request ids by the step in which they first got tokens, then by place within it."""
        return list(self.first_step)


Each = Callable[[int, Any], None]


def run_to_end(
    scheduler: Any,
    requests: Sequence[Any] = (),
    *,
    depth: int | None = None,
    each: Each | None = None,
    max_steps: int = 20_000,
    token: int = 7,
) -> Trace:
    """Add the requests, then schedule and update until nothing is left.

    Args:
        depth: steps in flight; 2 for an AsyncScheduler, 1 otherwise, by default.
        each: called with (step number, scheduler) before each scheduling pass: add, cancel, look.
        max_steps: AssertionError beyond that.
        token: what every request "generates".
    """
    depth = depth or (2 if scheduler.scheduler_config.async_scheduling else 1)
    for request in requests:
        scheduler.add_request(request)
    trace = Trace()
    in_flight: deque[tuple[Any, dict[str, bool]]] = deque()
    step = 0
    while scheduler.has_unfinished_requests() or in_flight or (each is not None and step == 0):
        if len(in_flight) < depth and (scheduler.has_requests() or (each is not None and step == 0)):
            if each is not None:
                each(step, scheduler)
            out = scheduler.schedule()
            partial = {rid: scheduler.requests[rid].is_prefill_chunk for rid in out.num_scheduled_tokens}
            trace.steps.append(dict(out.num_scheduled_tokens))
            for rid in out.num_scheduled_tokens:
                trace.first_step.setdefault(rid, step)
            trace.preempted.extend(sorted(out.preempted_req_ids or ()))
            in_flight.append((out, partial))
            step += 1
            assert step <= max_steps, "the run does not end"
            if len(in_flight) < depth and out.total_num_scheduled_tokens:
                continue
        out, partial = in_flight.popleft()
        _collect(trace, scheduler.update_from_output(out, _outputs(out, partial, token)))
    return trace


def _outputs(out: Any, partial: dict[str, bool], token: int) -> Any:
    ids = list(out.num_scheduled_tokens)
    if not ids:
        return EMPTY_MODEL_RUNNER_OUTPUT
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={rid: index for index, rid in enumerate(ids)},
        sampled_token_ids=[[] if partial[rid] else [token] for rid in ids],
    )


def _collect(trace: Trace, outputs: dict[int, Any]) -> None:
    for client in outputs.values():
        for output in client.outputs:
            trace.outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                trace.finished[output.request_id] = str(output.finish_reason)
                trace.stop_reasons[output.request_id] = output.stop_reason


def cancel(scheduler: Any, *request_ids: str) -> None:
    """End requests as a client that closes its stream does."""
    scheduler.finish_requests(list(request_ids), RequestStatus.FINISHED_ABORTED)


def free_blocks(scheduler: Any) -> int:
    """Blocks that nobody references, cached ones included."""
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
