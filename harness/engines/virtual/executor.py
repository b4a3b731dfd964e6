"""An Executor without a forward pass: it says when a step ends and what it would have produced.

vLLM accepts a class as `distributed_executor_backend`; everything above the executor is vLLM's own.
The tokens come from each request's true output, which the workload carries, so that speculation is
verified against real content.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from harness.engines.virtual.clock import VirtualClock


class StepTime(Protocol):
    """What the executor needs of a profile."""

    def step_us(
        self,
        prefills: list[tuple[int, int]],
        n_decode: int,
        sum_ctx_decode: int,
        n_sampled: int,
    ) -> float:
        """Microseconds of one step.

        Args:
            prefills: (new tokens, tokens already in the KV cache) of each prefill chunk.
            n_decode: requests that decode one token.
            sum_ctx_decode: their context lengths, summed.
            n_sampled: requests that pass the output head: all of the step.
        """


@dataclass(slots=True)
class Step:
    """One step as the executor saw it, handed to the recorder."""

    scheduled_ns: int
    start_ns: int
    end_ns: int
    prefill_tokens: int
    decode_tokens: int
    scheduled: int


@dataclass(slots=True)
class DeviceState:
    """What the executor and the engine around it share."""

    clock: VirtualClock
    step_time: StepTime
    kv_blocks: int
    cpu_step_ns: int = 0
    slowdown: float = 1.0
    outputs: dict[str, list[int]] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)
    prefill_progress: dict[str, int] = field(default_factory=dict)
    on_step: Callable[[Any, Step], None] | None = None
    free_ns: int = 0


class _StepFuture(Future):  # type: ignore[type-arg]
    """Resolves when the clock reaches its deadline; asking for the result is what moves the clock."""

    def __init__(self, clock: VirtualClock, deadline_ns: int, value: Any) -> None:
        super().__init__()
        self._clock, self._deadline_ns, self._value = clock, deadline_ns, value

    def done(self) -> bool:
        return self._clock.now_ns >= self._deadline_ns

    def result(self, timeout: float | None = None) -> Any:
        self._clock.advance_to(self._deadline_ns)
        return self._value


def _resolved(value: Any) -> Any:
    future: Any = Future()
    future.set_result(value)
    return future


class VirtualExecutor(Executor):
    """Subclass it with a `device` to use it: `type("Bound", (VirtualExecutor,), {"device": state})`."""

    supports_pp = False
    device: DeviceState

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def _init_executor(self) -> None:
        self._pending: Any = None
        from vllm.platforms import current_platform

        current_platform.update_block_size_for_backend(self.vllm_config)

    # What the engine asks of its workers while it starts.

    def _kv_cache_spec(self) -> dict[str, Any]:
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        model, parallel = self.model_config, self.parallel_config
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=model.get_num_kv_heads(parallel),
            head_size=model.get_head_size(),
            dtype=torch.bfloat16,
        )
        return {f"model.layers.{i}.self_attn.attn": spec for i in range(model.get_num_layers(parallel))}

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        name = method if isinstance(method, str) else getattr(method, "__name__", "")
        answer = [self._answer(name, args)]
        return _resolved(answer) if non_block else answer

    def _answer(self, name: str, args: tuple[Any, ...]) -> Any:
        if name == "get_kv_cache_spec":
            return self._kv_cache_spec()
        if name == "get_supported_kv_cache_layouts":
            return ["LBHNC"]
        if name == "set_kv_cache_layout":
            self.cache_config.kv_cache_layout = args[0]
        elif name == "determine_available_memory":
            pages = sum(spec.page_size_bytes for spec in self._kv_cache_spec().values())
            return pages * self.device.kv_blocks
        elif name == "compile_or_warm_up_model":
            from vllm.v1.worker.worker_base import CompilationTimes

            return CompilationTimes(0.0, 0.0)
        elif name == "get_supported_tasks":
            return ("generate",)
        elif name == "supports_draft_weight_updates":
            return False
        return None

    def check_health(self) -> None:
        return

    def shutdown(self) -> None:
        return

    # One step.

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        for rid in scheduler_output.finished_req_ids:
            self.device.outputs.pop(rid, None)
            self.device.prompts.pop(rid, None)
            self.device.prefill_progress.pop(rid, None)
        if scheduler_output.total_num_scheduled_tokens == 0:
            if self.device.on_step is not None:
                now = self.device.clock.now_ns
                self.device.on_step(scheduler_output, Step(now, now, now, 0, 0, 0))
            return _resolved(EMPTY_MODEL_RUNNER_OUTPUT) if non_block else EMPTY_MODEL_RUNNER_OUTPUT
        self._pending = self._submit(scheduler_output)
        return _resolved(None) if non_block else None

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        future, self._pending = self._pending, None
        return future if non_block else future.result()

    def _submit(self, so: Any) -> _StepFuture:
        device = self.device
        prompts, outputs, progress = device.prompts, device.outputs, device.prefill_progress
        tokens_of = so.num_scheduled_tokens
        prefills: list[tuple[int, int]] = []
        sampled: list[list[int]] = []
        ids: list[str] = []
        n_decode = context = 0

        cached = so.scheduled_cached_reqs
        work = zip(cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)
        for new in so.scheduled_new_reqs:
            known = new.prefill_token_ids if new.prefill_token_ids is not None else new.prompt_token_ids
            rid = new.req_id
            prompts[rid] = len(new.prompt_token_ids)
            generated = len(known) - prompts[rid]
            done, n = new.num_computed_tokens, tokens_of[rid]
            ids.append(rid)
            prefills.append((n, done))
            if done + n < len(known):
                progress[rid] = done + n
                sampled.append([])
            else:
                sampled.append([outputs[rid][generated]])
        for rid, done, generated in work:
            n = tokens_of[rid]
            ids.append(rid)
            if done + n < prompts[rid] + generated:
                prefills.append((n, done))
                progress[rid] = done + n
                sampled.append([])
                continue
            output = outputs[rid]
            # Asynchronous scheduling may run one step past the end; nobody reads that token.
            sampled.append([output[generated] if generated < len(output) else output[-1]])
            if n == 1:
                n_decode += 1
                context += done + 1
            else:
                prefills.append((n, done))
                progress.pop(rid, None)

        clock = device.clock
        scheduled_ns = clock.now_ns
        if device.cpu_step_ns:
            clock.advance_to(scheduled_ns + device.cpu_step_ns)
        start_ns = max(clock.now_ns, device.free_ns)
        step_us = device.step_time.step_us(prefills, n_decode, context, len(ids)) * device.slowdown
        end_ns = device.free_ns = start_ns + round(step_us * 1000)
        if device.on_step is not None:
            prefill_tokens = so.total_num_scheduled_tokens - n_decode
            device.on_step(so, Step(scheduled_ns, start_ns, end_ns, prefill_tokens, n_decode, len(ids)))
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={rid: i for i, rid in enumerate(ids)},
            sampled_token_ids=sampled,
        )
        return _StepFuture(clock, end_ns, output)
