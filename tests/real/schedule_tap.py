"""Writes down what a Scheduler decides and what its clients get; the same for every engine around it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class ScheduledStep:
    """One scheduling pass.

    Attributes:
        t_ns: the engine's clock when it was made.
        tokens: (request, tokens scheduled), in the scheduler's order.
        computed: (request, tokens in the KV cache before the step): prefix hits show here.
        blocks: (request, ids of the KV blocks that were added for it).
        preempted: requests preempted by this pass, sorted.
        finished: requests of which the worker is told that they ended, sorted.
    """

    t_ns: int
    tokens: tuple[tuple[str, int], ...]
    computed: tuple[tuple[str, int], ...]
    blocks: tuple[tuple[str, Any], ...]
    preempted: tuple[str, ...]
    finished: tuple[str, ...]


@dataclass
class Record:
    """All passes of a run, and the tokens and ends that the scheduler handed out."""

    steps: list[ScheduledStep] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)

    def preemptions(self) -> Counter[str]:
        """How often each request was preempted."""
        return Counter(rid for step in self.steps for rid in step.preempted)

    def first_hits(self) -> dict[str, int]:
        """Prompt tokens found in the prefix cache when a request was first scheduled."""
        hits: dict[str, int] = {}
        for step in self.steps:
            for rid, computed in step.computed:
                hits.setdefault(rid, computed)
        return hits

    def digest(self) -> str:
        """The schedule's digest as the manifest of a virtual run holds it."""
        digest = hashlib.sha256()
        for step in self.steps:
            if step.tokens or step.preempted:
                digest.update(repr(dict(step.tokens)).encode())
                digest.update(repr(list(step.preempted) if step.preempted else ()).encode())
        return digest.hexdigest()

    def difference(self, other: Record) -> str | None:
        """The first thing in which two runs differ, in words; None if they are equal."""
        for number, (mine, theirs) in enumerate(zip(self.steps, other.steps, strict=False)):
            for name in (f.name for f in fields(ScheduledStep)):
                a, b = getattr(mine, name), getattr(theirs, name)
                if a != b:
                    return f"step {number}: {name}: {a} against {b}"
        if len(self.steps) != len(other.steps):
            return f"{len(self.steps)} steps against {len(other.steps)}"
        for rid in sorted(self.outputs.keys() | other.outputs.keys()):
            if self.outputs.get(rid) != other.outputs.get(rid):
                return f"output of {rid}: {self.outputs.get(rid)} against {other.outputs.get(rid)}"
        if self.ends != other.ends:
            return f"ends: {sorted(self.ends.items() ^ other.ends.items())}"
        return None


def tap(scheduler: Any, now_ns: Callable[[], int]) -> Record:
    """Record this scheduler from now on, without changing what it does."""
    record = Record()
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def tapped_schedule(*args: Any) -> Any:
        t_ns = now_ns()
        out = schedule(*args)
        record.steps.append(_step(out, t_ns))
        return out

    def tapped_update(*args: Any) -> Any:
        outputs = update(*args)
        for client in outputs.values():
            for output in client.outputs:
                record.outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    record.ends[output.request_id] = str(output.finish_reason)
        return outputs

    scheduler.schedule, scheduler.update_from_output = tapped_schedule, tapped_update
    return record


def _step(out: Any, t_ns: int) -> ScheduledStep:
    cached = out.scheduled_cached_reqs
    computed = [(new.req_id, new.num_computed_tokens) for new in out.scheduled_new_reqs]
    computed += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    blocks = [(new.req_id, new.block_ids) for new in out.scheduled_new_reqs]
    blocks += zip(cached.req_ids, cached.new_block_ids, strict=True)
    return ScheduledStep(
        t_ns=t_ns,
        tokens=tuple(out.num_scheduled_tokens.items()),
        computed=tuple(computed),
        # The lists belong to the scheduler and grow.
        blocks=tuple((rid, tuple(map(tuple, ids or ()))) for rid, ids in blocks),
        preempted=tuple(sorted(out.preempted_req_ids or ())),
        finished=tuple(sorted(out.finished_req_ids)),
    )
