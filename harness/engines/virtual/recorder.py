"""Collects what happens in a virtual run, and turns it into the tables of `harness.schema`."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# Arrow loads these two when they are first needed, which would be at the end of every run.
import pandas  # noqa: F401
import pyarrow as pa
import pyarrow.compute

from harness.engines.virtual.executor import Step
from harness.engines.virtual.gauges import GaugeLog
from harness.engines.virtual.transfers import Transfer
from harness.planned_columns import planned_columns
from harness.schema import arrow_schema
from patches.seam.own import is_own_id
from workloads.request import PlannedRequest, Workload

_NEVER = -1


@dataclass(slots=True)
class RequestState:
    """One request while it lives."""

    row: int
    planned: PlannedRequest
    sent_ns: int = _NEVER
    scheduled_ns: int = _NEVER
    first_token_ns: int = _NEVER
    end_ns: int = _NEVER
    first_chunk_tokens: int = 0
    prompt_tokens_counted: int = _NEVER
    cached_tokens: int = _NEVER
    preemptions: int = 0
    recomputed_tokens: int = 0
    lost_tokens: int = 0
    status: str = ""
    reason: str = ""
    retry_after_s: int | None = None


class Recorder:
    """Fed by the executor (steps) and the front end (requests and tokens)."""

    def __init__(self, workload: Workload, prefill_progress: dict[str, int]) -> None:
        self.workload = workload
        self._prefill_progress = prefill_progress
        self.states = {r.request_id: RequestState(i, r) for i, r in enumerate(workload.requests)}
        self._by_row = list(self.states.values())
        self._digest = hashlib.sha256()
        self._steps: dict[str, array[Any]] = {
            name: array("d" if name == "kv_usage" else "q") for name in arrow_schema("steps").names
        }
        # The row of each token, and when how many tokens came.
        self._token_rows = array("i")
        self._batch_ns, self._batch_tokens = array("q"), array("q")
        self._events: list[tuple[int, str, int | None, float | None, str]] = []
        self._evicted = 0
        # Rows in the order in which they were first admitted.
        self.admitted = array("i")
        self.steps = 0
        self.ended = 0
        self._scheduler: Any = None
        # Of the patches that this engine has, if any.
        self.gauges: GaugeLog | None = None
        # Tables that patches keep of their own, as columns.
        self.extra_tables: Callable[[], Mapping[str, dict[str, list[Any]]]] = dict
        # What moved below the GPU, where anything may.
        self.transfers: Sequence[Transfer] | None = None

    # What the engine reports.

    def watch(self, scheduler: Any) -> None:
        """Read queue lengths and KV use from this scheduler, and count its cache evictions."""
        self._scheduler = scheduler
        pool = scheduler.kv_cache_manager.block_pool
        evict = pool._maybe_evict_cached_block

        def counted(block: Any) -> bool:
            if block.block_hash is not None:
                self._evicted += 1
            return bool(evict(block))

        pool._maybe_evict_cached_block = counted

    def on_step(self, so: Any, step: Step) -> None:
        """One step was scheduled and given to the device."""
        preempted = so.preempted_req_ids
        for rid in sorted(preempted) if preempted else ():
            self._on_preempt(rid, step.scheduled_ns)
        for new in so.scheduled_new_reqs:
            self._on_admission(new.req_id, new.num_computed_tokens, len(new.prompt_token_ids), step)
        resumed = so.scheduled_cached_reqs.resumed_req_ids
        if resumed:
            cached = so.scheduled_cached_reqs
            for rid, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if rid in resumed:
                    self._on_admission(rid, computed, 0, step)
        if not step.scheduled and not preempted:
            return
        digest = self._digest
        digest.update(repr(so.num_scheduled_tokens).encode())
        digest.update(repr(sorted(preempted) if preempted else ()).encode())
        self.steps += 1
        self._append_step(step, len(preempted) if preempted else 0)
        if self.gauges is not None:
            self.gauges.sample(step.scheduled_ns)

    def _append_step(self, step: Step, preempted: int) -> None:
        scheduler, steps = self._scheduler, self._steps
        held = getattr(scheduler.waiting, "held", 0)
        steps["t_ns"].append(step.scheduled_ns)
        steps["start_ns"].append(step.start_ns)
        steps["end_ns"].append(step.end_ns)
        steps["running"].append(len(scheduler.running))
        steps["waiting"].append(len(scheduler.waiting) + len(scheduler.kv_holding_waiting) - held)
        steps["held"].append(held)
        steps["scheduled"].append(step.scheduled)
        steps["prefill_tokens"].append(step.prefill_tokens)
        steps["decode_tokens"].append(step.decode_tokens)
        steps["kv_usage"].append(scheduler.kv_cache_manager.usage)
        steps["preempted"].append(preempted)
        steps["evicted"].append(self._evicted)
        steps["drafted"].append(0)
        steps["accepted"].append(0)
        self._evicted = 0

    def _on_preempt(self, rid: str, now_ns: int) -> None:
        if is_own_id(rid):
            return
        state = self.states[rid]
        state.preemptions += 1
        # A prefill that was cut had computed what its chunks reached; else all but the last token.
        progress = self._prefill_progress.pop(rid, None)
        if progress is None:
            request = self._scheduler.requests.get(rid)
            progress = request.num_tokens - 1 if request is not None else 0
        state.lost_tokens = progress
        self.event(now_ns, "preempt", state.row, float(progress))

    def _on_admission(self, rid: str, computed: int, prompt_tokens: int, step: Step) -> None:
        if is_own_id(rid):
            return
        state = self.states[rid]
        if state.scheduled_ns == _NEVER:
            self.admitted.append(state.row)
            state.scheduled_ns = step.scheduled_ns
            state.cached_tokens = computed
            state.prompt_tokens_counted = prompt_tokens
        elif state.lost_tokens:
            state.recomputed_tokens += max(0, state.lost_tokens - computed)
            self.event(step.scheduled_ns, "resume", state.row, float(computed))
            state.lost_tokens = 0

    def on_first_tokens(self, state: RequestState, count: int, now_ns: int) -> None:
        """The first chunk of a request, `count` tokens, reached its client."""
        state.first_token_ns = now_ns
        state.first_chunk_tokens = count

    def on_tokens(self, rows: list[int], now_ns: int) -> None:
        """Tokens reached their clients; one row number for each, a request's own tokens in order."""
        if rows:
            self._token_rows.fromlist(rows)
            self._batch_ns.append(now_ns)
            self._batch_tokens.append(len(rows))

    def on_end(
        self,
        state: RequestState,
        status: str,
        reason: str,
        now_ns: int,
        retry_after_s: int | None = None,
    ) -> None:
        """A request ended, one way or another; the first end counts."""
        if state.status:
            return
        state.status, state.reason, state.end_ns = status, reason, now_ns
        state.retry_after_s = retry_after_s
        self.ended += 1
        if status != "ok":
            self.event(now_ns, _EVENT_OF[status], state.row, None, reason)

    def event(
        self, t_ns: int, kind: str, row: int | None = None, value: float | None = None, detail: str = ""
    ) -> None:
        """Something worth a line in the events table."""
        self._events.append((t_ns, kind, row, value, detail))

    # What is written.

    def schedule_digest(self) -> str:
        """sha256 over each step's (request, tokens scheduled) and preempted requests."""
        return self._digest.hexdigest()

    def tables(self) -> dict[str, pa.Table]:
        """All tables of the run; `gauges` only where patches have some, `transfers` only where KV blocks may move."""
        extra = {} if self.gauges is None or not self.gauges else {"gauges": self.gauges.table()}
        if self.transfers is not None:
            extra["transfers"] = self._transfer_table()
        for name, columns in self.extra_tables().items():
            extra[name] = pa.Table.from_pydict(columns, schema=arrow_schema(name))
        return extra | {
            "requests": self._requests(),
            "tokens": self._tokens(),
            "steps": pa.Table.from_arrays(
                [pa.array(np.asarray(self._steps[f.name])).cast(f.type) for f in arrow_schema("steps")],
                schema=arrow_schema("steps"),
            ),
            "events": self._event_table(),
        }

    def _token_times(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Row and time of each token, in the order in which they came."""
        times = np.repeat(np.asarray(self._batch_ns, np.int64), np.asarray(self._batch_tokens, np.int64))
        return np.asarray(self._token_rows, np.int32), times

    def _requests(self) -> pa.Table:
        workload = self.workload
        token_rows, token_ns = self._token_times()
        counts = np.bincount(token_rows, minlength=len(self._by_row)).tolist()
        last_ns = np.full(len(self._by_row), _NEVER, np.int64)
        np.maximum.at(last_ns, token_rows, token_ns)
        tenants = {t.name: t for t in workload.tenants}
        measured = {p.number: p.measured for p in workload.phases}
        rows: list[dict[str, Any]] = []
        for state in self._by_row:
            planned = state.planned
            rows.append(
                {
                    **planned_columns(planned, tenants[planned.tenant], measured[planned.phase]),
                    "sent_ns": _known(state.sent_ns),
                    "scheduled_ns": _known(state.scheduled_ns),
                    "first_token_ns": _known(state.first_token_ns),
                    "first_output_ns": _known(state.first_token_ns),
                    "last_token_ns": _known(int(last_ns[state.row])),
                    "end_ns": _known(state.end_ns),
                    "first_chunk_tokens": state.first_chunk_tokens,
                    "prompt_tokens_counted": _known(state.prompt_tokens_counted),
                    "cached_tokens": _known(state.cached_tokens),
                    "output_tokens": counts[state.row],
                    "preemptions": state.preemptions,
                    "recomputed_tokens": state.recomputed_tokens,
                    "status": state.status,
                    "reason": state.reason,
                    "retry_after_s": state.retry_after_s,
                }
            )
        return pa.Table.from_pylist(rows, schema=arrow_schema("requests"))

    def _tokens(self) -> pa.Table:
        rows, times = self._token_times()
        # The k-th token of a request is the k-th time its row occurs.
        order = np.argsort(rows, kind="stable")
        index = np.empty(len(rows), dtype=np.int32)
        if len(rows):
            starts = np.flatnonzero(np.r_[True, np.diff(rows[order]) != 0])
            lengths = np.diff(np.r_[starts, len(rows)])
            index[order] = np.arange(len(rows)) - np.repeat(starts, lengths)
        return pa.table(
            {"request": rows, "index": index, "t_ns": times},
            schema=arrow_schema("tokens"),
        )

    def _transfer_table(self) -> pa.Table:
        names = arrow_schema("transfers").names
        moved = [astuple(one) for one in self.transfers or ()]
        columns = list(zip(*moved, strict=True)) if moved else [()] * len(names)
        return pa.table(
            {name: list(column) for name, column in zip(names, columns, strict=True)},
            schema=arrow_schema("transfers"),
        )

    def _event_table(self) -> pa.Table:
        names = arrow_schema("events").names
        columns = list(zip(*self._events, strict=True)) if self._events else [()] * len(names)
        return pa.table(
            {name: list(column) for name, column in zip(names, columns, strict=True)},
            schema=arrow_schema("events"),
        )


_EVENT_OF = {"rejected": "reject", "cancelled": "cancel", "expired": "expire", "failed": "fail"}


def _known(value: int) -> int | None:
    return None if value == _NEVER else value
