"""Watches one Scheduler and writes what it decides to a tape; changes nothing, and stops at its first fault.

A step is counted exactly as the virtual engine's recorder counts it, so that the two can be compared row by row.

When a step began and ended: with synchronous scheduling (a CPU) it begins when its batch leaves the scheduler and ends
when its sampled tokens are back: that is the executor's execute_model and sample_tokens, by the wall clock. With
asynchronous scheduling (a GPU) batch k+1 leaves the scheduler while k is still computed, so it begins when it was
submitted or when k's tokens were there, whichever came later: from completion to completion while the GPU is kept
busy. Each output is matched to its batch by identity, never by what was scheduled last. A result that was there before
the engine looked is seen late, and then the engine's own pace is what is measured: `schedule_ns` and `update_ns` tell.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from harness.engines.live.telemetry import layout
from harness.engines.live.telemetry.tape import Tape
from patches.seam.own import is_own_id

#: Where a Scheduler and its block pool keep their observer; absent on one that nobody observes.
OBSERVER_ATTR = "patchbench_observer"
#: Where a request keeps the moment at which the engine's process received it.
RECEIVED_ATTR = "patchbench_received_ns"

Clock = Callable[[], int]
_in_prefill = attrgetter("is_prefill_chunk")
_cost = time.perf_counter_ns


class _Live:
    """One request while it lives."""

    __slots__ = ("admitted", "lost_tokens", "row")

    def __init__(self, row: int) -> None:
        self.row = row
        self.admitted = False
        self.lost_tokens = 0


@dataclass(slots=True)
class _Flight:
    """A step that was scheduled and whose output is not there yet; `counts` are STEP_INTS from `running` on."""

    output: Any
    t_ns: int
    schedule_ns: int
    counts: dict[str, int]
    kv_usage: float
    chunks: list[tuple[int, int]]
    submitted_ns: int = 0
    cost_ns: int = 0


class Observer:
    """Fed by the hooks, on the engine's thread."""

    def __init__(
        self, scheduler: Any, path: Path, header: Callable[[], dict[str, Any]], clock: Clock
    ) -> None:
        self._scheduler = scheduler
        self._path = path
        self._header = header
        self._clock = clock
        self._tape: Tape | None = None
        self._rows = 0
        self._live: dict[str, _Live] = {}
        self._without_token: set[str] = set()
        self._flights: deque[_Flight] = deque()
        self._last_end_ns = -1
        self._output_ns = 0
        self._came_ns = 0
        self._update_cost_ns = 0
        self.evicted = 0
        self.fault = ""

    # steps

    def scheduled(self, output: Any, began_ns: int) -> None:
        """A scheduling pass that began then has returned `output`."""
        if self.fault:
            return
        began_cost = _cost()
        t_ns = self._clock()
        try:
            flight = self._flight(output, t_ns, t_ns - began_ns)
            if flight is not None:
                self._flights.append(flight)
                flight.cost_ns = _cost() - began_cost
                # What was written down just now is not the step's time.
                flight.submitted_ns = self._clock() if output.total_num_scheduled_tokens else t_ns
        except Exception as error:
            self._fail(error)

    def output_ready(self) -> None:
        """The output of the oldest batch is there."""
        self._output_ns = self._clock()

    def updating(self, output: Any) -> int:
        """The scheduler is about to be told the output of this batch; gives the time."""
        now_ns = self._clock()
        # An engine loop other than upstream's has not said when the output came.
        self._came_ns = self._output_ns or now_ns
        self._output_ns = 0
        return now_ns

    def updated(self, output: Any, answer: Any, began_ns: int) -> None:
        """The scheduler was told the model's `answer` to the batch `output`, which began then."""
        if self.fault:
            return
        began_cost = _cost()
        try:
            update_ns = self._clock() - began_ns
            if self._without_token:
                self._note_first_tokens(output)
            flight = self._take(output)
            if flight is not None:
                self._write_step(flight, answer, update_ns, began_cost)
        except Exception as error:
            self._fail(error)

    def _flight(self, output: Any, t_ns: int, schedule_ns: int) -> _Flight | None:
        hits = self._note_admissions(output, t_ns)
        preempted = len(output.preempted_req_ids) if output.preempted_req_ids else 0
        tokens = output.num_scheduled_tokens
        if not tokens and not preempted:
            return None
        scheduler = self._scheduler
        chunks: list[tuple[int, int]] = []
        decode_tokens, context_tokens = _split(output, scheduler, chunks)
        held = getattr(scheduler.waiting, "held", 0)
        counts = {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting) + len(scheduler.kv_holding_waiting) - held,
            "held": held,
            "scheduled": len(tokens),
            "prefill_tokens": output.total_num_scheduled_tokens - decode_tokens,
            "decode_tokens": decode_tokens,
            "preempted": preempted,
            "evicted": self.evicted,
            "drafted": 0,
            "accepted": 0,
            "context_tokens": context_tokens,
            "hit_tokens": hits,
        }
        self.evicted = 0
        return _Flight(output, t_ns, schedule_ns, counts, scheduler.kv_cache_manager.usage, chunks)

    def _take(self, output: Any) -> _Flight | None:
        for index, flight in enumerate(self._flights):
            if flight.output is output:
                del self._flights[index]
                return flight
        return None

    def _write_step(self, flight: _Flight, answer: Any, update_ns: int, began_cost: int) -> None:
        output = flight.output
        if output.total_num_scheduled_tokens:
            start_ns = max(flight.submitted_ns, self._last_end_ns)
            end_ns = self._last_end_ns = max(start_ns, self._came_ns)
        else:
            start_ns = end_ns = flight.t_ns
        counts = flight.counts
        if output.scheduled_spec_decode_tokens:
            counts["drafted"], counts["accepted"] = _drafts(output, answer)
        cost_ns = flight.cost_ns + self._update_cost_ns
        times = (flight.t_ns, start_ns, end_ns, flight.schedule_ns, update_ns, cost_ns)
        self._the_tape().write_chunks(
            layout.STEP_BODY, layout.STEP, flight.chunks, *times, *counts.values(), flight.kv_usage
        )
        # The cost of writing a row is known after it is written: it is booked on the next one.
        self._update_cost_ns = _cost() - began_cost

    # requests

    def added(self, request: Any) -> None:
        """The request is about to enter the waiting queue."""
        rid = request.request_id
        # The next part of a streaming session is no new request.
        if self.fault or rid in self._live or is_own_id(rid):
            return
        try:
            live = self._live[rid] = _Live(self._rows)
            self._rows += 1
            self._the_tape().write_text(
                layout.ARRIVE_BODY,
                layout.ARRIVE,
                rid.encode(),
                live.row,
                self._clock(),
                request.__dict__.get(RECEIVED_ATTR, -1),
                request.num_prompt_tokens,
            )
        except Exception as error:
            self._fail(error)

    def preempting(self, request: Any) -> None:
        """The request is about to lose its blocks."""
        live = self._live.get(request.request_id)
        if self.fault or live is None:
            return
        try:
            # Under asynchronous scheduling the last token may be counted before it is there.
            progress = min(request.num_computed_tokens, request.num_tokens - 1)
            live.lost_tokens = progress
            self._event(live.row, progress, b"preempt", self._clock())
        except Exception as error:
            self._fail(error)

    def finishing(self, request: Any) -> None:
        """The request has ended, however it ended."""
        live = self._live.pop(request.request_id, None)
        if self.fault or live is None:
            return
        try:
            tokens = request.num_output_tokens
            if request.request_id in self._without_token:
                self._without_token.discard(request.request_id)
                if tokens:
                    self._the_tape().write(layout.FIRST_BODY, layout.FIRST, live.row, self._came_ns)
            self._the_tape().write_text(
                layout.FINISH_BODY,
                layout.FINISH,
                str(request.get_finished_reason()).encode(),
                live.row,
                self._clock(),
                tokens,
            )
        except Exception as error:
            self._fail(error)

    def cache_reset(self, done: bool) -> None:
        """The prefix cache was to be reset."""
        if self.fault:
            return
        try:
            self._event(layout.NO_REQUEST, float(done), b"cache_reset", self._clock())
        except Exception as error:
            self._fail(error)

    def _note_admissions(self, output: Any, t_ns: int) -> int:
        hits = 0
        for new in output.scheduled_new_reqs:
            hits += self._admitted(new.req_id, new.num_computed_tokens, t_ns)
        cached = output.scheduled_cached_reqs
        resumed = cached.resumed_req_ids
        if resumed:
            for rid, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if rid in resumed:
                    hits += self._admitted(rid, computed, t_ns)
        return hits

    def _admitted(self, rid: str, computed: int, t_ns: int) -> int:
        live = self._live.get(rid)
        if live is None:
            return 0
        if not live.admitted:
            live.admitted = True
            self._without_token.add(rid)
            self._the_tape().write(layout.ADMIT_BODY, layout.ADMIT, live.row, t_ns, computed)
            return computed
        if live.lost_tokens:
            self._event(live.row, computed, b"resume", t_ns)
            live.lost_tokens = 0
        return 0

    def _note_first_tokens(self, output: Any) -> None:
        requests = self._scheduler.requests
        for rid in self._without_token & output.num_scheduled_tokens.keys():
            request = requests.get(rid)
            if request is not None and request.num_output_tokens:
                self._without_token.discard(rid)
                self._the_tape().write(layout.FIRST_BODY, layout.FIRST, self._live[rid].row, self._came_ns)

    def _event(self, row: int, value: float, kind: bytes, t_ns: int) -> None:
        self._the_tape().write_text(layout.EVENT_BODY, layout.EVENT, kind, row, t_ns, value)

    # the tape

    def _the_tape(self) -> Tape:
        # Opened by the first event, in the process in which it happens: a fork before that shares nothing.
        if self._tape is None:
            self._tape = Tape(self._path, self._header())
        return self._tape

    def close(self) -> None:
        """Cut the file to its length; nothing is written afterwards."""
        self.fault = self.fault or "closed"
        if self._tape is not None:
            self._tape.close()
            self._tape = None

    def _fail(self, error: Exception) -> None:
        """An observer must not end what it observes: it says why it stopped, beside its tape, and is silent."""
        self.fault = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.with_suffix(".fault").write_text(self.fault + "\n", encoding="utf-8")


def _split(output: Any, scheduler: Any, chunks: list[tuple[int, int]]) -> tuple[int, int]:
    """Decode tokens of a step and the context they look at; adds (new, before) of each prefill chunk to `chunks`."""
    tokens = output.num_scheduled_tokens
    new_tokens = 0
    for new in output.scheduled_new_reqs:
        count = tokens[new.req_id]
        new_tokens += count
        chunks.append((count, new.num_computed_tokens))
    cached = output.scheduled_cached_reqs
    ids = cached.req_ids
    requests = scheduler.requests
    # Nearly every step: each running request decodes one token. Looking at each of them is spared where upstream has
    # no prefill under way; where it has one, its chunk may be a single token.
    if (
        output.total_num_scheduled_tokens - new_tokens == len(ids)
        and not cached.resumed_req_ids
        and not (scheduler._inflight_prefills and any(map(_in_prefill, map(requests.__getitem__, ids))))
    ):
        return len(ids), sum(cached.num_computed_tokens) + len(ids)
    decode_tokens = context = 0
    drafts = output.scheduled_spec_decode_tokens
    for rid, before in zip(ids, cached.num_computed_tokens, strict=True):
        count = tokens[rid]
        whole = not requests[rid].is_prefill_chunk and rid not in cached.resumed_req_ids
        if whole and (count == 1 or rid in drafts):
            decode_tokens += count
            context += before + count
        else:
            chunks.append((count, before))
    return decode_tokens, context


def _drafts(output: Any, answer: Any) -> tuple[int, int]:
    """Draft tokens verified in a step, and those accepted, as upstream counts them."""
    invalid = output.num_invalid_spec_tokens or {}
    drafted = accepted = 0
    for rid, draft in output.scheduled_spec_decode_tokens.items():
        index = answer.req_id_to_index.get(rid)
        sampled = answer.sampled_token_ids[index] if index is not None and answer.sampled_token_ids else ()
        if len(sampled):
            drafted += len(draft) - invalid.get(rid, 0)
            accepted += len(sampled) - 1
    return drafted, accepted
