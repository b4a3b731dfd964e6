"""The wrappers around vLLM's own functions, one per touched target."""

from __future__ import annotations

import importlib
from typing import Any

from patches.seam.adapter import Installation
from patches.seam.runtime import RUNTIME_ATTR, Runtime

_SCHEDULER_SEAMS = frozenset(
    [
        "request_key",
        "tenant_rank",
        "prefer",
        "on_pick",
        "on_put_back",
        "waiting_gate",
        "token_cap",
        "victim_hint",
        "before_schedule",
        "after_schedule",
        "after_update",
        "on_add",
        "on_finish",
        "on_preempt",
        "eviction_owner",
        "eviction_hint",
        "on_touch",
        "on_evict",
        "expire",
        "on_own",
        "report",
    ]
)
# What our queue is needed for.
_QUEUE_SEAMS = frozenset({"request_key", "tenant_rank", "prefer", "on_pick", "on_put_back", "waiting_gate"})
_POOL_SEAMS = frozenset({"eviction_owner", "eviction_hint", "on_touch", "on_evict"})
#: The utility method that is put on EngineCore where a patch reports.
REPORT_METHOD = "patchbench_report"


def wrap_all(installation: Installation) -> None:
    """Wrap what the plan's seams need, and nothing else."""
    used = frozenset(seam for chosen in installation.plan.patches for seam in chosen.patch.seams)
    if used & _SCHEDULER_SEAMS:
        _wrap_scheduler(installation, used)
    if used & _POOL_SEAMS:
        _wrap_pool(installation, used)
    if "report" in used:
        core: Any = importlib.import_module("vllm.v1.engine.core")
        installation.replace(core.EngineCore, REPORT_METHOD, _report)
    if "api_admission" in used:
        module = importlib.import_module("vllm.v1.engine.async_llm")
        installation.wrap(module.AsyncLLM, "check_admission", _admission(installation))


def _wrap_scheduler(installation: Installation, used: frozenset[str]) -> None:
    module: Any = importlib.import_module("vllm.v1.core.sched.scheduler")
    scheduler = module.Scheduler
    installation.wrap(scheduler, "__init__", _init(installation))
    if used & _QUEUE_SEAMS:
        installation.wrap(module, "create_request_queue", _create_queue(installation))
    steps = {"victim_hint", "before_schedule", "after_schedule", "expire", "on_own"}
    if used & (_QUEUE_SEAMS | steps) or installation.listener is not None:
        installation.wrap(scheduler, "schedule", _schedule(installation))
    if used & {"after_update", "expire", "on_own"}:
        installation.wrap(scheduler, "update_from_output", _update)
    if "on_own" in used:
        engine: Any = importlib.import_module("vllm.v1.engine.core")
        installation.wrap(engine.EngineCore, "__init__", _start)
    if "token_cap" in used:
        installation.wrap(scheduler, "_reserve_prefill_lookahead", _token_cap)
    if "on_add" in used:
        installation.wrap(scheduler, "add_request", _add_request)
    if "on_finish" in used:
        installation.wrap(scheduler, "_free_request", _free_request)
    if "on_preempt" in used:
        installation.wrap(scheduler, "_preempt_request", _preempt_request)


def _wrap_pool(installation: Installation, used: frozenset[str]) -> None:
    module: Any = importlib.import_module("vllm.v1.core.block_pool")
    installation.replace(
        module, "FreeKVCacheBlockQueue", _free_queue(installation, module.FreeKVCacheBlockQueue)
    )
    if "on_touch" in used:
        installation.wrap(module.BlockPool, "touch", _touch)
    if "on_evict" in used:
        installation.wrap(module.BlockPool, "evict_blocks", _evict_blocks)


def _runtime(instance: Any) -> Runtime | None:
    found: Runtime | None = instance.__dict__.get(RUNTIME_ATTR)
    return found


# scheduler


def _init(installation: Installation) -> Any:
    def make(original: Any) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
            seed = int(config.model_config.seed or 0)
            runtime = Runtime(installation.plan, installation.tallies, scheduler=self, seed=seed)
            self.__dict__[RUNTIME_ATTR] = runtime
            # The queue and block-pool factories are called inside and must know for whom.
            installation.constructing.append(runtime)
            try:
                original(self, *args, **kwargs)
            finally:
                installation.constructing.pop()
            runtime.constructed()

        return __init__

    return make


def _start(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        runtime = _runtime(self.scheduler)
        # Ranks that must step together cannot be stepped from here.
        if (
            runtime is None
            or runtime.injector is None
            or self.vllm_config.parallel_config.data_parallel_size > 1
        ):
            return

        def turn() -> None:
            _, executed = self.step_fn()
            self.post_step(executed)

        runtime.injector.start(turn, lambda: bool(self.batch_queue or self.scheduler.has_requests()))

    return __init__


def _create_queue(installation: Installation) -> Any:
    def make(original: Any) -> Any:
        def create_request_queue(policy: Any) -> Any:
            if not installation.constructing:
                return original(policy)
            return installation.constructing[-1].make_queue(policy)

        return create_request_queue

    return make


def _schedule(installation: Installation) -> Any:
    listener = installation.listener

    def make(original: Any) -> Any:
        def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
            runtime = _runtime(self)
            if runtime is None:
                return original(self, *args, **kwargs)
            runtime.begin_step()
            out = original(self, *args, **kwargs)
            if runtime.after_schedule or runtime.injector is not None:
                runtime.end_schedule(out)
            if listener is not None:
                listener()
            return out

        return schedule

    return make


def _update(original: Any) -> Any:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    def deliver_ended(runtime: Runtime, outputs: Any) -> None:
        for request, reason in runtime.take_ended():
            # Ending it has told the workers; the client hears of it only through an output.
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    stop_reason=reason,
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
            )

    def update_from_output(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, scheduler_output, *args, **kwargs)
        runtime = _runtime(self)
        if runtime is not None:
            now, seen = runtime.clock(), scheduler_output
            if runtime.injector is not None:
                seen = runtime.injector.view(scheduler_output)
                runtime.injector.after_update(outputs)
            for hook in runtime.after_update:
                hook(seen, outputs, now)
            if runtime.expire is not None:
                deliver_ended(runtime, outputs)
        return outputs

    return update_from_output


def _token_cap(original: Any) -> Any:
    from vllm.v1.request import RequestStatus

    def _reserve_prefill_lookahead(
        self: Any, request: Any, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        # A decode, as nearly every call is: cutting its drafts would break the padded batch, and 1 token cannot be cut.
        if num_new_tokens <= 1 + self.num_spec_tokens:
            if self.num_prefill_lookahead > 1:
                return int(original(self, request, num_computed_tokens, num_new_tokens))
            # Upstream's function has nothing to reserve then; the call alone, for each that runs, costs 2% of a step.
            return num_new_tokens if num_new_tokens > 0 else 0
        runtime = _runtime(self)
        # Counts that were just aligned to something would be broken by a cut.
        if (
            runtime is None
            or self.need_mamba_block_aligned_split
            or request.has_encoder_inputs
            or runtime.is_own(request)
        ):
            return int(original(self, request, num_computed_tokens, num_new_tokens))
        waiting = request.status != RequestStatus.RUNNING
        cap = runtime.cap(request, num_computed_tokens, num_new_tokens, runtime.clock())
        # 0 for a running request means "not in this step"; for a waiting one it would end the scan.
        cap = max(cap, 1 if waiting else 0)
        if cap == 1 + self.num_spec_tokens and self.num_spec_tokens:
            # That very count would be taken for a padded decode.
            cap += 1
        kept = int(original(self, request, num_computed_tokens, min(cap, num_new_tokens)))
        if kept == 0 and waiting:
            return int(original(self, request, num_computed_tokens, num_new_tokens))
        return kept

    return _reserve_prefill_lookahead


def _add_request(original: Any) -> Any:
    def add_request(self: Any, request: Any) -> None:
        runtime = _runtime(self)
        # The next chunk of a streaming session is no new request.
        if runtime is not None and request.request_id not in self.requests and not runtime.is_own(request):
            now = runtime.clock()
            for hook in runtime.on_add:
                hook(request, now)
        original(self, request)

    return add_request


def _free_request(original: Any) -> Any:
    def free_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        runtime = _runtime(self)
        if runtime is not None and not runtime.is_own(request):
            now = runtime.clock()
            for hook in runtime.on_finish:
                hook(request, now)
        return original(self, request, *args, **kwargs)

    return free_request


def _preempt_request(original: Any) -> Any:
    def preempt_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        runtime = _runtime(self)
        if runtime is not None and not runtime.is_own(request):
            now = runtime.clock()
            for hook in runtime.on_preempt:
                hook(request, now)
        original(self, request, *args, **kwargs)

    return preempt_request


def _report(self: Any, patch: str, asked: str = "") -> str:
    """On EngineCore: what one of its patches tells; "" where the engine has no such patch."""
    runtime = _runtime(self.scheduler)
    tell = None if runtime is None else runtime.reports.get(patch)
    return "" if tell is None else str(tell(asked))


# block pool


def _free_queue(installation: Installation, stock: Any) -> Any:
    def free_block_queue(blocks: list[Any]) -> Any:
        pool = blocks[0].pool if blocks else None
        # Host-memory pools of offloading connectors are not the cache that these patches are about.
        if pool is None or getattr(pool, "medium", "GPU") != "GPU":
            return stock(blocks)
        if installation.constructing:
            runtime = installation.constructing[-1]
        else:
            runtime = Runtime(installation.plan, installation.tallies)
        pool.__dict__[RUNTIME_ATTR] = runtime
        queue = stock(blocks) if runtime.eviction_owner is None else runtime.eviction_owner(blocks)
        if runtime.on_evict:
            _watch_taking(queue, runtime.on_evict)
        return queue

    return free_block_queue


def _watch_taking(queue: Any, hooks: tuple[Any, ...]) -> None:
    """Tell the hooks what this queue hands out; one queue of one engine, so nothing is to be undone."""
    take = queue.popleft_n

    def popleft_n(n: int) -> list[Any]:
        blocks: list[Any] = take(n)
        if n > 1:
            _tell_evicted(blocks, hooks)
        elif n and (name := blocks[0].block_hash) is not None:
            # A decode that has filled its last one, as nearly every call is.
            names = [name]
            for hook in hooks:
                hook(blocks, names)
        return blocks

    queue.popleft_n = popleft_n


def _tell_evicted(blocks: list[Any], hooks: tuple[Any, ...]) -> None:
    """Tell the hooks of those blocks that hold something, with their hashes, all at once."""
    names = [block.block_hash for block in blocks]
    if not all(names):
        blocks = [block for block, name in zip(blocks, names, strict=True) if name is not None]
        names = [name for name in names if name is not None]
        if not blocks:
            return
    for hook in hooks:
        hook(blocks, names)


def _touch(original: Any) -> Any:
    def touch(self: Any, blocks: Any) -> None:
        runtime = _runtime(self)
        # A hit of one of our own is no sign that anybody wants the blocks. In its pass nobody else can have one.
        if runtime is not None and not (runtime.injector is not None and runtime.injector.in_pass):
            for hook in runtime.on_touch:
                hook(blocks)
        original(self, blocks)

    return touch


def _evict_blocks(original: Any) -> Any:
    def evict_blocks(self: Any, block_ids: set[int]) -> None:
        runtime = _runtime(self)
        if runtime is not None:
            known = [self.blocks[each] for each in sorted(block_ids) if each < len(self.blocks)]
            if known:
                _tell_evicted(known, runtime.on_evict)
        original(self, block_ids)

    return evict_blocks


# API


def _admission(installation: Installation) -> Any:
    def make(original: Any) -> Any:
        def check_admission(self: Any, n: int = 1, request_id: str | None = None) -> None:
            original(self, n, request_id)
            runtime = _runtime(self)
            if runtime is None:
                runtime = Runtime(installation.plan, installation.tallies)
                self.__dict__[RUNTIME_ATTR] = runtime
            for _, hook, tally in runtime.admission:
                try:
                    hook(self, n, request_id)
                except Exception:
                    tally.add("api_admission")
                    raise

        return check_admission

    return make
