"""What the patches cost the scheduler: schedule + update, stock and patched, in one process.

A stock and a patched engine hold the same number of running and waiting requests and serve the same
traffic. They take turns of a few steps each, so that whatever else the machine does falls on both.
Only vLLM's `schedule` and `update_from_output` are timed, with everything that the patches hang on them, by the
thread's CPU time. Measuring begins once topping up the queue adds little: patches that refuse beyond a length refuse
many of the first, and ending thousands of requests in one step is not what a step costs. For the same reason deadlines
are far off here: a queue of that length is hours long, and all of it would be late at once.
With a given number of blocks the pool is full of cached ones before, so that each block that is taken evicts one.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from harness.arms import Arm
from harness.engines.flags import EngineFlags
from harness.engines.virtual.account import Account
from harness.engines.virtual.clock import vllm_reads
from harness.engines.virtual.config import pinned_environment
from harness.engines.virtual.engine import VirtualEngine
from harness.profiles import model_dir

_TENANTS = (("gold-a", "gold", 0), ("silver-0", "silver", 1), ("bronze-0", "bronze", 2))
_PREFIX_TOKENS = 128
_PROMPT_TOKENS = (256, 1024)
_OUTPUT_TOKENS = (64, 512)
_SETTLE_STEPS, _SETTLE_TURNS = 40, 20
_BLOCK_SIZE = 16
_SLO_MS = 86_400_000.0
_CHAIN_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class PerfResult:
    """Medians over the turns, microseconds a step.

    `ratio` is the median of what the two sides took in each turn, one by the other: neighbours in time share what else
    the machine does, so it spreads less than a ratio of the two medians.
    """

    running: int
    waiting: int
    blocks: int
    turns: int
    stock_us: float
    patched_us: float
    ratio: float
    stock_add_us: float
    patched_add_us: float

    def to_json(self) -> dict[str, float | int]:
        """For --json."""
        return {
            "running": self.running,
            "waiting": self.waiting,
            "blocks": self.blocks,
            "turns": self.turns,
            "stock_us": self.stock_us,
            "patched_us": self.patched_us,
            "ratio": self.ratio,
            "stock_add_us": self.stock_add_us,
            "patched_add_us": self.patched_add_us,
        }


class _ConstantStep:
    """Time passes, so that clocks move; how much does not matter here."""

    def step_us(
        self, prefills: list[tuple[int, int]], n_decode: int, sum_ctx_decode: int, n_sampled: int
    ) -> float:
        return 20_000.0


@dataclass(frozen=True, slots=True)
class _Links:
    """Links to host memory and disk as a server has them (PCIe 4.0 x16, one NVMe), for patches that move blocks."""

    d2h_bytes_per_s: float = 25e9
    h2d_bytes_per_s: float = 25e9
    launch_us: float = 10.0
    disk_read_bytes_per_s: float = 5e9
    disk_write_bytes_per_s: float = 3e9
    disk_access_us: float = 100.0


class _Side:
    """One engine with its own copy of the traffic."""

    def __init__(self, arm: Arm, running: int, waiting: int, blocks: int, full: bool, seed: int) -> None:
        self._arm, self._running, self._waiting = arm, running, waiting
        self._rng = np.random.default_rng(seed)
        self._prefixes = [self._rng.integers(0, 30_000, _PREFIX_TOKENS).tolist() for _ in _TENANTS]
        self._sent = self._topped_up = 0
        self.step_us: list[float] = []
        self.add_us: list[float] = []
        with self._in_force():
            self._engine = VirtualEngine(
                model_dir("llama-3.1-8b"), arm.flags, _ConstantStep(), blocks, links=_Links()
            )
            if full:
                self._fill()
            self._top_up()

    def _in_force(self) -> ExitStack:
        stack = ExitStack()
        if self._arm.plan is not None:
            from patches.seam.adapter import install

            stack.callback(install(self._arm.plan).undo)
        if hasattr(self, "_engine"):
            stack.enter_context(pinned_environment())
            stack.enter_context(vllm_reads(self._engine.clock))
        return stack

    def turn(self, steps: int, measure: bool) -> None:
        """Run some steps; the queue is topped up before, outside the measurement."""
        with self._in_force():
            self._top_up()
            account = Account(time.thread_time_ns)
            with account.watching(self._engine.core.scheduler):
                for _ in range(steps):
                    self._engine.core.step_fn()
        if measure:
            self.step_us.append(account.scheduler_and_patches_s / steps * 1e6)

    def settle(self) -> None:
        """Run until fewer are added between two turns than run."""
        for _ in range(_SETTLE_TURNS):
            self.turn(_SETTLE_STEPS, measure=False)
            if self._topped_up <= self._running:
                break

    def _fill(self) -> None:
        """Cache something in every block: chains of 64, as prompts that nobody will send again."""
        pool = self._engine.core.scheduler.kv_cache_manager.block_pool
        names = self._rng.bytes(32 * pool.get_num_free_blocks())
        hashes = [names[at : at + 32] for at in range(0, len(names), 32)]
        chains = []
        for at in range(0, len(hashes), _CHAIN_BLOCKS):
            of_chain = hashes[at : at + _CHAIN_BLOCKS]
            chain = pool.get_new_blocks(len(of_chain))
            request = SimpleNamespace(block_hashes=of_chain)
            pool.cache_full_blocks(request, chain, 0, len(chain), _BLOCK_SIZE, 0)
            chains.append(chain)
        for chain in chains:
            pool.free_blocks(reversed(chain))

    def _top_up(self) -> None:
        scheduler = self._engine.core.scheduler
        missing = self._running + self._waiting - sum(scheduler.get_request_counts())
        spent = 0.0
        for _ in range(missing):
            request = self._request()
            began = time.thread_time()
            self._engine.core.add_request(request)
            spent += time.thread_time() - began
        self._topped_up = missing
        if missing:
            self.add_us.append(spent / missing * 1e6)

    def _request(self) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        tenant, tier, priority = _TENANTS[self._sent % len(_TENANTS)]
        own = int(self._rng.integers(*_PROMPT_TOKENS))
        prompt = self._prefixes[self._sent % len(_TENANTS)] + self._rng.integers(0, 30_000, own).tolist()
        output = int(self._rng.integers(*_OUTPUT_TOKENS))
        name = f"perf-{self._sent}"
        self._sent += 1
        self._engine.device.outputs[name] = [7] * output
        request, _ = self._engine.core.preprocess_add_request(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=prompt,
                mm_features=None,
                sampling_params=SamplingParams(
                    max_tokens=output,
                    ignore_eos=True,
                    temperature=0.0,
                    extra_args={"tenant": tenant, "tier": tier, "slo_ttft_ms": _SLO_MS},
                ),
                pooling_params=None,
                arrival_time=self._engine.clock.seconds(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
                priority=priority,
            )
        )
        return request


def measure(
    stock: Arm,
    patched: Arm,
    running: int,
    waiting: int,
    turns: int,
    steps_a_turn: int,
    blocks: int | None = None,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> PerfResult:
    """Time both arms in turns; the arms' `max_num_seqs` must be `running`.

    Args:
        blocks: of the pool, all cached at the start; without it, room enough for twice what runs, empty at the start.
    """
    full = blocks is not None
    if blocks is None:
        # Room for all that run, twice over, so that the queue is held back by seats and not by memory.
        blocks = 2 * running * (_PREFIX_TOKENS + _PROMPT_TOKENS[1] + _OUTPUT_TOKENS[1]) // _BLOCK_SIZE
    sides = [_Side(arm, running, waiting, blocks, full, seed) for arm in (stock, patched)]
    for side in sides:
        side.settle()
    gc.collect()
    gc.disable()
    try:
        for turn in range(turns):
            # Who goes first changes, so that neither always finds the warmer cache.
            for side in sides if turn % 2 == 0 else reversed(sides):
                side.turn(steps_a_turn, measure=True)
            if progress is not None:
                progress(turn + 1)
    finally:
        gc.enable()
    first, second = (statistics.median(side.step_us) for side in sides)
    ratio = statistics.median(
        patched / plain for plain, patched in zip(sides[0].step_us, sides[1].step_us, strict=True)
    )
    adds = [statistics.median(side.add_us) for side in sides]
    return PerfResult(running, waiting, blocks, turns, first, second, ratio, adds[0], adds[1])


def flags_for(running: int) -> EngineFlags:
    """Flags under which exactly `running` requests run."""
    return EngineFlags(
        max_num_seqs=running, max_num_batched_tokens=max(2048, running + 1024), scheduling_policy="fcfs"
    )
