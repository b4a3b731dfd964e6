"""Puts observers around vLLM's Scheduler, its block pool and its engine loop, and takes them out again.

The changes go through a ledger, so that undo restores vLLM exactly. They belong on top of the patches' own (install a
plan first, undo it last): then they see what patches decide, and count what patches cost.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import time
from pathlib import Path
from typing import Any

from harness.engines.live.telemetry.layout import SUFFIX
from harness.engines.live.telemetry.observer import OBSERVER_ATTR, RECEIVED_ATTR, Clock, Observer
from patches.seam.ledger import Ledger
from patches.seam.targets import OBSERVED
from patches.seam.upstream_lock import check, installed_version

SCHEMA = 1
_active: Observation | None = None


class ObservationError(RuntimeError):
    """Observers cannot be installed or taken out now."""


class Observation:
    """Observers in force for Schedulers built from now on in this process; `undo()` takes them out.

    Attributes:
        folder: where each Scheduler writes `engine-<pid>-<number>.tape`, from its first event on.
        epoch_ns: CLOCK_MONOTONIC at the run's start, kept in the header for whoever reads the tape.
    """

    def __init__(self, folder: Path, epoch_ns: int, clock: Clock) -> None:
        self.folder = folder
        self.epoch_ns = epoch_ns
        self.clock = clock
        self.observers: list[Observer] = []
        self._ledger = Ledger()
        self._numbers = itertools.count()

    def undo(self) -> None:
        """Restore vLLM exactly and close the tapes; raises LedgerError, and changes nothing, if it was changed since."""
        global _active
        if _active is not self:
            raise ObservationError("these observers are not installed")
        self._ledger.undo()
        _active = None
        for observer in self.observers:
            observer.close()

    def watch(self, scheduler: Any) -> None:
        """Observe a Scheduler that was just built."""
        path = self.folder / f"engine-{os.getpid()}-{next(self._numbers)}{SUFFIX}"
        observer = Observer(scheduler, path, functools.partial(self._header, scheduler), self.clock)
        scheduler.__dict__[OBSERVER_ATTR] = observer
        scheduler.kv_cache_manager.block_pool.__dict__[OBSERVER_ATTR] = observer
        self.observers.append(observer)

    def _header(self, scheduler: Any) -> dict[str, Any]:
        config = scheduler.vllm_config
        overlapped = int(config.max_concurrent_batches) > 1
        return {
            "schema": SCHEMA,
            "pid": os.getpid(),
            "epoch_ns": self.epoch_ns,
            "created_ns": self.clock(),
            "vllm": installed_version(),
            "model": str(config.model_config.model),
            "scheduler": type(scheduler).__name__,
            "step_time": "completion to completion" if overlapped else "execution",
            "block_size": scheduler.block_size,
            "kv_blocks": scheduler.kv_cache_config.num_blocks,
            "max_num_seqs": scheduler.max_num_running_reqs,
            "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
        }

    def wrap(self, owner: Any, name: str, make: Any) -> None:
        """Replace a function that `owner` itself defines by `make(original)`, on the ledger."""
        original = vars(owner)[name]
        self._ledger.replace(owner, name, functools.wraps(original)(make(original)))


def active() -> Observation | None:
    """The observers in force in this process, if any."""
    return _active


def install(folder: Path, epoch_ns: int = 0, clock: Clock = time.monotonic_ns) -> Observation:
    """Observe the Schedulers built from now on.

    Raises:
        ObservationError: others are installed. DriftError: vLLM's code is not what the observers were written for.
    """
    global _active
    if _active is not None:
        raise ObservationError(f"observers that write to {_active.folder} are installed already")
    check(OBSERVED)
    observation = Observation(folder, epoch_ns, clock)
    try:
        _wrap_all(observation)
    except BaseException:
        observation._ledger.undo()
        raise
    _active = observation
    return observation


def install_from_environment(folder: str, epoch: str | None) -> None:
    """What the plugin does in each process of vLLM; why it could not is left in `<folder>/install-<pid>.fault`.

    A server without its telemetry is still a server: whoever collects the tapes finds the reason in their place.
    """
    place = Path(folder)
    if _active is not None and _active.folder == place:
        # vLLM says that plugins may be loaded more than once in a process.
        return
    try:
        install(place, int(epoch or 0))
    except Exception as error:
        fault = f"{type(error).__name__}: {error}\n"
        with contextlib.suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            (place / f"install-{os.getpid()}.fault").write_text(fault, encoding="utf-8")


def _wrap_all(observation: Observation) -> None:
    scheduler: Any = importlib.import_module("vllm.v1.core.sched.scheduler")
    pool: Any = importlib.import_module("vllm.v1.core.block_pool")
    engine: Any = importlib.import_module("vllm.v1.engine.core")
    for name, make in (
        ("__init__", functools.partial(_init, observation)),
        ("schedule", functools.partial(_schedule, observation.clock)),
        ("update_from_output", _update),
        ("add_request", _add_request),
        ("_preempt_request", _preempt_request),
        ("_free_request", _free_request),
        ("reset_prefix_cache", _reset_prefix_cache),
    ):
        observation.wrap(scheduler.Scheduler, name, make)
    observation.wrap(pool.BlockPool, "_maybe_evict_cached_block", _evict)
    observation.wrap(engine.EngineCore, "_process_aborts_queue", _aborts)
    observation.wrap(
        engine.EngineCore, "preprocess_add_request", functools.partial(_receive, observation.clock)
    )


def _observer(instance: Any) -> Observer | None:
    found: Observer | None = instance.__dict__.get(OBSERVER_ATTR)
    return found


def _init(observation: Observation, original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        observation.watch(self)

    return __init__


def _schedule(clock: Clock, original: Any) -> Any:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        observer = _observer(self)
        if observer is None:
            return original(self, *args, **kwargs)
        began_ns = clock()
        output = original(self, *args, **kwargs)
        observer.scheduled(output, began_ns)
        return output

    return schedule


def _update(original: Any) -> Any:
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        observer = _observer(self)
        if observer is None:
            return original(self, scheduler_output, model_runner_output)
        began_ns = observer.updating(scheduler_output)
        outputs = original(self, scheduler_output, model_runner_output)
        observer.updated(scheduler_output, model_runner_output, began_ns)
        return outputs

    return update_from_output


def _add_request(original: Any) -> Any:
    def add_request(self: Any, request: Any) -> None:
        observer = _observer(self)
        if observer is not None:
            observer.added(request)
        original(self, request)

    return add_request


def _preempt_request(original: Any) -> Any:
    def preempt_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        observer = _observer(self)
        if observer is not None:
            observer.preempting(request)
        original(self, request, *args, **kwargs)

    return preempt_request


def _free_request(original: Any) -> Any:
    def free_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        observer = _observer(self)
        if observer is not None:
            observer.finishing(request)
        return original(self, request, *args, **kwargs)

    return free_request


def _reset_prefix_cache(original: Any) -> Any:
    def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = original(self, *args, **kwargs)
        observer = _observer(self)
        if observer is not None:
            observer.cache_reset(bool(done))
        return done

    return reset_prefix_cache


def _evict(original: Any) -> Any:
    def maybe_evict_cached_block(self: Any, block: Any) -> Any:
        if block.block_hash is not None:
            observer = _observer(self)
            if observer is not None:
                observer.evicted += 1
        return original(self, block)

    return maybe_evict_cached_block


def _aborts(original: Any) -> Any:
    # Upstream's loop takes its aborts between a batch's output and the scheduler's update: that is when the output came.
    def process_aborts_queue(self: Any) -> None:
        observer = _observer(self.scheduler)
        if observer is not None:
            observer.output_ready()
        original(self)

    return process_aborts_queue


def _receive(clock: Clock, original: Any) -> Any:
    def preprocess_add_request(self: Any, request: Any) -> Any:
        received_ns = clock()
        ready = original(self, request)
        ready[0].__dict__[RECEIVED_ATTR] = received_ns
        return ready

    return preprocess_add_request
