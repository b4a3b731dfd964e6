"""An Executor without a forward pass: it says when a step ends and what it would have produced.

vLLM accepts a class as `distributed_executor_backend`; everything above the executor is vLLM's own.
The tokens come from each request's true output, which the workload carries, so that speculation is
verified against real content. Which clock it lives on is its device's affair: the virtual engine's moves
when it is asked to, the emulated engine's (`harness.engines.emulated`) is the real one, on which it sleeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from harness.engines.virtual.account import EXECUTOR, RECORDING, Account
from harness.engines.virtual.transfers import Links, LinkSpeeds, Transfer
from harness.errors import UserError
from patches.kv.tiers import disk_io
from patches.seam.own import is_own_id

# Asynchronous scheduling may run a step or two past a request's end; nobody reads those tokens.
_PAST_THE_END = 2
# What requests of our own generate: one token that nobody reads.
_OWN_TOKEN = 0


class Clock(Protocol):
    """What the executor needs of a clock."""

    @property
    def now_ns(self) -> int:
        """The time, ns."""

    def advance_to(self, t_ns: int) -> None:
        """Return when it is `t_ns`, or later."""


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
    """What the executor and the engine around it share.

    Attributes:
        starting: whether the engine is being built; `starting_ns`: how long its own steps take meanwhile.
        links: how fast KV blocks move below the GPU; None where nobody says, and then none may.
        outputs: true output of each request that has not been scheduled yet.
        live: (prompt tokens, true output and a little more) of each request that has.
        prefill_progress: tokens computed of each request whose prefill was cut into chunks and goes on.
    """

    clock: Clock
    step_time: StepTime
    kv_blocks: int
    cpu_step_ns: int = 0
    slowdown: float = 1.0
    outputs: dict[str, list[int]] = field(default_factory=dict)
    live: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    prefill_progress: dict[str, int] = field(default_factory=dict)
    on_step: Callable[[Any, Step], None] | None = None
    free_ns: int = 0
    # Before there is traffic the clock stands still; what the steps take is summed up here.
    starting: bool = False
    starting_ns: int = 0
    links: LinkSpeeds | None = None
    account: Account = field(default_factory=Account)


class _StepFuture(Future):  # type: ignore[type-arg]
    """Resolves when the clock reaches its deadline; asking for the result moves the clock, or waits."""

    def __init__(self, clock: Clock, deadline_ns: int, value: Any) -> None:
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


_RESOLVED_NONE = _resolved(None)


class VirtualExecutor(Executor):
    """Subclass it with a `device` to use it: `type("Bound", (VirtualExecutor,), {"device": state})`."""

    supports_pp = False
    device: DeviceState

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def _init_executor(self) -> None:
        self._pending: Any = None
        self._transfers: Links | None = None
        self._playing = ExitStack()
        from vllm.platforms import current_platform

        current_platform.update_block_size_for_backend(self.vllm_config)
        if self.vllm_config.kv_transfer_config is not None:
            self._play_transfers()

    def _play_transfers(self) -> None:
        """This process plays host memory and disk below the GPU: what is built after the executor finds them."""
        links = self.device.links
        if links is None:
            raise UserError(
                "this profile says nothing of its links: KV blocks cannot be offloaded without [transfers] in its "
                "profile.toml; docs/PROFILES.md lists the fields"
            )
        block_bytes = sum(spec.page_size_bytes for spec in self._kv_cache_spec().values())
        self._transfers = Links(links, self.device.clock, block_bytes)
        disk = self._transfers.disk
        self._playing.enter_context(disk_io.play(lambda _: disk))

    @property
    def transfers(self) -> Sequence[Transfer] | None:
        """What moved below the GPU, grows as it does; None where nothing may."""
        return self._transfers.log if self._transfers is not None else None

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
        self._playing.close()

    # One step.

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        device = self.device
        before = device.account.enter(EXECUTOR)
        for rid in scheduler_output.finished_req_ids:
            device.outputs.pop(rid, None)
            device.live.pop(rid, None)
            device.prefill_progress.pop(rid, None)
        if scheduler_output.total_num_scheduled_tokens == 0:
            now = device.clock.now_ns
            self._tell(scheduler_output, Step(now, now, now, 0, 0, 0))
            output = self._without_pass(scheduler_output)
            device.account.enter(before)
            return _resolved(output) if non_block else output
        self._pending = self._submit(scheduler_output)
        device.account.enter(before)
        return _RESOLVED_NONE if non_block else None

    def _without_pass(self, so: Any) -> Any:
        if self._transfers is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        meta = so.kv_connector_metadata
        begin_ns = self._transfers.before_pass(meta, self.device.free_ns)
        told = self._transfers.after_pass(meta, max(begin_ns, self.device.free_ns))
        return ModelRunnerOutput.with_kv_conn_output_only(told)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        future, self._pending = self._pending, None
        return future if non_block else future.result()

    def _tell(self, so: Any, step: Step) -> None:
        device = self.device
        if device.on_step is not None:
            before = device.account.enter(RECORDING)
            device.on_step(so, step)
            device.account.enter(before)

    def _submit(self, so: Any) -> _StepFuture:
        device = self.device
        prefills: list[tuple[int, int]] = []
        sampled: list[list[int]] = []
        # Asked before new requests add to it: then it speaks of the cached ones alone.
        cut = bool(device.prefill_progress)
        self._new_requests(so, prefills, sampled)
        new_tokens = sum(n for n, _ in prefills)
        cached = so.scheduled_cached_reqs
        n_cached = len(cached.req_ids)
        if cut or cached.resumed_req_ids or so.total_num_scheduled_tokens - new_tokens != n_cached:
            n_decode, context = self._cached_requests(so, prefills, sampled)
        else:
            # All of them decode one token, as in nearly every step.
            live = device.live
            tokens = zip(cached.req_ids, cached.num_output_tokens, strict=True)
            sampled += [[live[rid][1][generated]] for rid, generated in tokens]
            n_decode, context = n_cached, sum(cached.num_computed_tokens) + n_cached
        ids = [new.req_id for new in so.scheduled_new_reqs]
        ids += cached.req_ids

        clock = device.clock
        scheduled_ns = clock.now_ns
        if device.cpu_step_ns:
            clock.advance_to(scheduled_ns + device.cpu_step_ns)
        start_ns = max(clock.now_ns, device.free_ns)
        if self._transfers is not None:
            ready_ns = self._transfers.before_pass(so.kv_connector_metadata, device.free_ns)
            start_ns = max(start_ns, ready_ns)
        step_us = device.step_time.step_us(prefills, n_decode, context, len(ids)) * device.slowdown
        took_ns = round(step_us * 1000)
        if device.starting:
            device.starting_ns, took_ns = device.starting_ns + took_ns, 0
        end_ns = device.free_ns = start_ns + took_ns
        prefill_tokens = so.total_num_scheduled_tokens - n_decode
        self._tell(so, Step(scheduled_ns, start_ns, end_ns, prefill_tokens, n_decode, len(ids)))
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index=dict(zip(ids, range(len(ids)), strict=True)),
            sampled_token_ids=sampled,
        )
        if self._transfers is not None:
            output.kv_connector_output = self._transfers.after_pass(so.kv_connector_metadata, end_ns)
        return _StepFuture(clock, end_ns, output)

    def _new_requests(self, so: Any, prefills: list[tuple[int, int]], sampled: list[list[int]]) -> None:
        """Requests whose KV cache begins with this step; a resumed one has tokens of its own already."""
        device, tokens_of = self.device, so.num_scheduled_tokens
        for new in so.scheduled_new_reqs:
            known = new.prefill_token_ids if new.prefill_token_ids is not None else new.prompt_token_ids
            rid, prompt = new.req_id, len(new.prompt_token_ids)
            if rid not in device.live:
                output = [_OWN_TOKEN] if is_own_id(rid) else self._true_output(new)
                device.live[rid] = (prompt, output + output[-1:] * _PAST_THE_END)
            done, n = new.num_computed_tokens, tokens_of[rid]
            prefills.append((n, done))
            if done + n < len(known):
                device.prefill_progress[rid] = done + n
                sampled.append([])
            else:
                sampled.append([device.live[rid][1][len(known) - prompt]])

    def _true_output(self, new: Any) -> list[int]:
        """Tokens that a request which is scheduled for the first time will produce, one or more."""
        return self.device.outputs[new.req_id]

    def _cached_requests(
        self, so: Any, prefills: list[tuple[int, int]], sampled: list[list[int]]
    ) -> tuple[int, int]:
        """Requests that were in a step before, some in prefill; (decodes, their contexts summed)."""
        live, progress, tokens_of = self.device.live, self.device.prefill_progress, so.num_scheduled_tokens
        cached = so.scheduled_cached_reqs
        n_decode = context = 0
        work = zip(cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)
        for rid, done, generated in work:
            n = tokens_of[rid]
            prompt, output = live[rid]
            if done + n < prompt + generated:
                prefills.append((n, done))
                progress[rid] = done + n
                sampled.append([])
                continue
            sampled.append([output[generated]])
            if n == 1:
                n_decode += 1
                context += done + 1
            else:
                prefills.append((n, done))
            if progress:
                progress.pop(rid, None)
        return n_decode, context
