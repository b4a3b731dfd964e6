"""Who runs, what they hold and will come to need, and whether one more would still have room to grow."""

from __future__ import annotations

import math
from typing import Any, Protocol

from patches.scheduling.claims import Rank
from patches.scheduling.kvforecast import Demand, OutputLengths, peak_blocks


class RoomKnobs(Protocol):
    """The knobs that it goes by; see `WatermarkKnobs`."""

    @property
    def peak_share(self) -> float: ...
    @property
    def reserve_deviations_ratio(self) -> float: ...
    @property
    def first_output_tokens(self) -> int: ...


class Room:
    """The requests that run, by class, on one scheduler's pool of blocks."""

    def __init__(self, knobs: RoomKnobs, context: Any) -> None:
        self._knobs, self._context = knobs, context
        self._lengths = OutputLengths(knobs.first_output_tokens)
        # Requests in the running list, in order of admission.
        self._running: dict[str, Any] = {}
        self._running_of: dict[Rank, int] = {}
        # Tokens that they had when they were admitted, by class and one by one.
        self._tokens_of: dict[Rank, int] = {}
        self._admitted_with: dict[str, int] = {}
        self._prefilling: dict[str, Any] = {}
        # Those of this pass, and the free blocks before the first of them, which then take theirs bit by bit.
        self._admitting: dict[str, Any] = {}
        self._free_before = 0

    # what is there

    def blocks(self, tokens: float) -> float:
        """Blocks that hold so many tokens."""
        return math.ceil(tokens / self._context.scheduler.block_size)

    def pool(self) -> tuple[int, int]:
        """Free blocks, and all of them."""
        pool = self._context.scheduler.kv_cache_manager.block_pool
        free = self._free_before if self._admitting else pool.get_num_free_blocks()
        return free, max(1, pool.num_gpu_blocks - 1)

    def promised_blocks(self) -> float:
        """Blocks that prompts in prefill will still take, those admitted in this pass included."""
        promised = sum(
            self.blocks(r.num_tokens) - self.blocks(r.num_computed_tokens) for r in self._prefilling.values()
        )
        return promised + sum(self.blocks(r.num_tokens) for r in self._admitting.values())

    def used_share(self) -> float:
        """Share of the blocks that are referenced or promised."""
        free, total = self.pool()
        return (total - free + self.promised_blocks()) / total

    def is_admitting(self, request_id: str) -> bool:
        """Whether it is being admitted in this pass: what it takes counts already."""
        return request_id in self._admitting

    def lower_runs(self, rank: Rank) -> bool:
        """Whether anybody of a lower class runs."""
        return any(rank < other for other in self._running_of)

    def beside_others(self, rank: Rank) -> bool:
        """Whether anybody decodes, or somebody better runs."""
        return self.decodes() > 0 or any(other < rank for other in self._running_of)

    def decodes(self) -> int:
        """Running requests that are through their prefill."""
        return len(self._running) - len(self._prefilling)

    # whether one more has room

    def seat_to_spare(self, rank: Rank) -> bool:
        """Whether a lower class may take a seat: the last ones are for the best, who would wait for an answer to end."""
        seats = self._context.scheduler.max_num_active_reqs
        room = min(self._knobs.peak_share * seats, seats - self._reserve(rank)[0])
        return len(self._running) + len(self._admitting) + 1 <= max(1.0, room)

    def _reserve(self, rank: Rank) -> tuple[float, float]:
        """Seats and blocks by which what better classes hold is likely to rise: their number is as good as Poisson's."""
        count = tokens = 0
        for other, running in self._running_of.items():
            if other < rank:
                count += running
                tokens += self._tokens_of[other]
        seats = self._knobs.reserve_deviations_ratio * math.sqrt(count)
        return seats, seats * tokens / count / self._context.scheduler.block_size if count else 0.0

    def fits(self, request: Any, rank: Rank) -> bool:
        """Whether the forecast peak with this one stays below what it may reach."""
        free, total = self.pool()
        newcomer = Demand(0.0, self.blocks(request.num_tokens), self._expected_left(request))
        room = min(self._knobs.peak_share * total, total - self._reserve(rank)[1])
        wanted = total - free + self.promised_blocks() + newcomer.prompt
        if wanted > room:
            return False
        # A bound that costs nothing: as if all grew to the longest before any of them ends.
        count = len(self._running) + len(self._admitting) + 1
        if wanted + count * self._lengths.longest() / self._context.scheduler.block_size <= room:
            return True
        return self.peak(newcomer) <= room

    def peak(self, *newcomers: Demand) -> float:
        """The most blocks that those who run will hold at one time, with these."""
        free, total = self.pool()
        running = list(self._running.values())
        holding = sum(self.blocks(r.num_computed_tokens) for r in running)
        # Shared blocks are held once: each is said to hold its part of what is used.
        share = (total - free) / holding if holding else 1.0
        demands = list(newcomers)
        for r in running:
            held = self.blocks(r.num_computed_tokens)
            prompt = max(0.0, self.blocks(r.num_tokens) - held)
            demands.append(Demand(held * share, prompt, self._expected_left(r)))
        demands += [
            Demand(0.0, self.blocks(r.num_tokens), self._expected_left(r)) for r in self._admitting.values()
        ]
        return peak_blocks(demands, self._context.scheduler.block_size)

    def _expected_left(self, request: Any) -> float:
        tenant = self._context.request_info(request).tenant
        return self._lengths.left(tenant, request.num_tokens - request.num_prompt_tokens)

    # what happens

    def begin_admission(self, request: Any) -> None:
        """It is about to be admitted in this pass."""
        if not self._admitting:
            self._free_before, _ = self.pool()
        self._admitting[request.request_id] = request

    def admit(self, request: Any, rank: Rank) -> None:
        """It runs from now on."""
        request_id = request.request_id
        if request_id not in self._running:
            self._running[request_id] = request
            tokens = self._admitted_with[request_id] = int(request.num_tokens)
            self._tokens_of[rank] = self._tokens_of.get(rank, 0) + tokens
            self._running_of[rank] = self._running_of.get(rank, 0) + 1
        if request.is_prefill_chunk:
            self._prefilling[request_id] = request

    def end_pass(self) -> None:
        """The pass is over: whoever of those being admitted was admitted has been told of."""
        self._admitting.clear()
        if self._prefilling:
            self._prefilling = {
                request_id: request
                for request_id, request in self._prefilling.items()
                if request.is_prefill_chunk and request_id in self._running
            }

    def stop(self, request_id: str, rank: Rank) -> None:
        """It runs no longer; nothing happens if it did not."""
        self._prefilling.pop(request_id, None)
        if self._running.pop(request_id, None) is not None:
            self._running_of[rank] -= 1
            self._tokens_of[rank] -= self._admitted_with.pop(request_id)
            if not self._running_of[rank]:
                del self._running_of[rank]

    def answered(self, request: Any) -> None:
        """Its answer came to its own end: learn how long it was."""
        tenant = self._context.request_info(request).tenant
        self._lengths.finished(tenant, request.num_tokens - request.num_prompt_tokens)
