"""Patches on a real Scheduler whose clock the test moves: a step takes a fixed time, arrivals come by step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# The clock is put into modules that are loaded, and these load only when a scheduler is built.
import vllm.v1.core.sched.async_scheduler  # noqa: F401

from harness.engines.virtual.clock import VirtualClock, vllm_reads
from patches.seam import adapter
from patches.seam.plan import resolve
from patches.seam.runtime import RUNTIME_ATTR
from tests.drive import Trace, cancel, free_blocks, run_to_end

NS = 1_000_000_000
STEP_NS = 20_000_000

Knobs = Mapping[str, Mapping[str, Any]]


def prompt(seed: int, length: int) -> list[int]:
    """Tokens that no other seed shares."""
    rng = random.Random(seed)
    return [rng.randrange(3, 100_000) for _ in range(length)]


@contextmanager
def patched(enable: str, knobs: Knobs | None = None) -> Iterator[tuple[adapter.Installation, VirtualClock]]:
    """A plan in force and vLLM on a clock that the test moves; both are undone on leaving."""
    clock = VirtualClock()
    with vllm_reads(clock), installed(enable, knobs) as installation:
        yield installation, clock


@contextmanager
def installed(enable: str, knobs: Knobs | None = None) -> Iterator[adapter.Installation]:
    """A plan in force; for engines that bring their own clock."""
    installation = adapter.install(resolve(enable, knobs=knobs or {}))
    try:
        yield installation
    finally:
        installation.undo()


@dataclass
class Served:
    """A run's trace, with step numbers counted through, when each request came and which were cancelled."""

    trace: Trace = field(default_factory=Trace)
    arrived: dict[str, int] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)


def serve(
    scheduler: Any,
    clock: VirtualClock,
    arrivals: Sequence[tuple[int, Any]],
    cancels: Sequence[tuple[int, str]] = (),
    *,
    check: Callable[[Any], None] | None = None,
) -> Served:
    """Add each request before its step, cancel ids before theirs (if still there), and run to the end.

    `check` is called with the scheduler before each scheduling pass. Asserts that every free block
    came back and that none is referenced afterwards.
    """
    pool = scheduler.kv_cache_manager.block_pool
    free = free_blocks(scheduler)
    served = Served()
    pending = sorted(arrivals, key=lambda arrival: arrival[0])
    ends = sorted(cancels)
    step = 0

    def each(_: int, sched: Any) -> None:
        nonlocal step
        clock.advance_to(clock.now_ns + STEP_NS)
        # Nothing left to do: go straight to the next arrival.
        if pending and not sched.has_unfinished_requests():
            step = max(step, pending[0][0])
        while pending and pending[0][0] <= step:
            request = pending.pop(0)[1]
            served.arrived[request.request_id] = step
            sched.add_request(request)
        while ends and ends[0][0] <= step:
            request_id = ends.pop(0)[1]
            if request_id in sched.requests:
                cancel(sched, request_id)
                served.cancelled.append(request_id)
        if check is not None:
            check(sched)
        step += 1

    while pending:
        before = step
        part = run_to_end(scheduler, each=each)
        _append(served.trace, part, before)
    assert not scheduler.requests
    assert not len(scheduler.waiting)
    assert free_blocks(scheduler) == free
    assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
    return served


def _append(whole: Trace, part: Trace, before: int) -> None:
    # Idle steps that were skipped are not in `steps`; order, and distances within a part, are exact.
    for request_id, step in part.first_step.items():
        whole.first_step.setdefault(request_id, before + step)
    whole.steps.extend(part.steps)
    whole.preempted.extend(part.preempted)
    whole.finished.update(part.finished)
    whole.stop_reasons.update(part.stop_reasons)
    for request_id, tokens in part.outputs.items():
        whole.outputs.setdefault(request_id, []).extend(tokens)


@dataclass(frozen=True)
class Eviction:
    """One request that a patch took out of the running list before a scheduling pass."""

    request_id: str
    preempted_before: int
    at_ns: int
    head: str

    @property
    def step(self) -> int:
        """Number, in the trace, of the pass that it was taken out before; the clock moves once for each."""
        return self.at_ns // STEP_NS - 1


def evictions(scheduler: Any, clock: VirtualClock) -> list[Eviction]:
    """A list that grows with each preemption on a patch's demand (upstream's own do not count)."""
    runtime = scheduler.__dict__[RUNTIME_ATTR]
    original = runtime.preempt
    seen: list[Eviction] = []

    def preempt(request: Any) -> bool:
        before = int(request.num_preemptions)
        head = scheduler.waiting.peek_request().request_id
        done = bool(original(request))
        if done:
            seen.append(Eviction(request.request_id, before, clock.now_ns, head))
        return done

    runtime.preempt = preempt
    return seen
