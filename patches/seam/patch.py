"""What a patch is: declared metadata, knobs, and a function that builds its hooks.

A patch module holds `PATCH = Patch(...)`. Everything about it can be read without building it, so
plans, pages and `bench explain` need no vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, get_args

from pydantic import BaseModel, ConfigDict

from patches.seam.seams import SEAMS

if TYPE_CHECKING:
    from patches.seam.context import Context

AREAS = ("scheduling", "kv", "spec", "pd", "fixes")

#: (value, valid_until): smaller values are served first; `valid_until` is the clock time in seconds
#: at which the value may change while the request waits, or None if it will not.
KeyPart = tuple[float, float | None]

# The last word of a numeric knob's name is its unit.
UNITS: Mapping[str, str] = MappingProxyType(
    {
        "tokens": "tokens",
        "s": "s",
        "ms": "ms",
        "us": "us",
        "blocks": "blocks",
        "bytes": "bytes",
        "requests": "requests",
        "steps": "steps",
        "levels": "levels",
        "entries": "entries",
        "count": "count",
        "times": "times",
        "ratio": "ratio",
        "share": "ratio",
        "factor": "factor",
        "weight": "weight",
        "rank": "rank",
        "pct": "%",
    }
)

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*\Z")


class Knobs(BaseModel):
    """Base of every patch's knobs: frozen, unknown keys refused, every field described and with a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class PatchDefinitionError(ValueError):
    """A patch's metadata is wrong; says which patch and which field."""


def knob_unit(knobs: type[Knobs], name: str) -> str:
    """The unit of one knob: its own `unit` (json_schema_extra) or what the name's last word says; "" if none."""
    extra = knobs.model_fields[name].json_schema_extra
    if isinstance(extra, dict) and "unit" in extra:
        return str(extra["unit"])
    words = name.split("_")
    if len(words) >= 3 and words[-2] == "per" and words[-3] in UNITS:
        return f"{UNITS[words[-3]]}/{words[-1]}"
    return UNITS.get(words[-1], "")


def input_files(knobs: Knobs) -> dict[str, Path]:
    """The files that knobs name and whose content is part of a plan: those marked `json_schema_extra={"input_file": True}`."""
    named = {}
    for name, info in type(knobs).model_fields.items():
        extra = info.json_schema_extra
        if isinstance(extra, dict) and extra.get("input_file") and (value := getattr(knobs, name)):
            named[name] = Path(value)
    return named


def _is_number(annotation: Any) -> bool:
    if annotation in (int, float):
        return True
    return any(_is_number(arg) for arg in get_args(annotation))


class BlockQueue(Protocol):
    """What upstream's block pool asks of the object that keeps its free blocks.

    `num_free_blocks` is exact after every call. Blocks given to `prepend_n` hold nothing worth
    keeping; those given to `append_n` are cached, least worth keeping first.
    """

    num_free_blocks: int

    def popleft(self) -> Any: ...
    def popleft_n(self, n: int) -> list[Any]: ...
    def remove(self, block: Any) -> None: ...
    def prepend_n(self, blocks: list[Any]) -> None: ...
    def append_n(self, blocks: list[Any]) -> None: ...


@dataclass(slots=True)
class Hooks:
    """The hooks of one patch for one engine; None is a seam that the patch does not use.

    `request` is a vLLM `Request`, `now` the scheduler's clock in seconds, `blocks` KVCacheBlock
    objects. Exactly the seams that the patch declares must be set.

    Attributes:
        request_key: the request's part of the ordering key. Called when the request is queued (also
            after a preemption), when `valid_until` has passed while it waits, and on `Context.rekey`.
        tenant_rank: (tenant, now) -> rank; smaller is served first, before any request's key is looked at.
            Asked when a tenant may be next and when running prefills and victims are ordered, so it must be
            O(1). It may rise at any time; when it falls call `Context.rerank`.
        prefer: (requests in order, now) -> index of the one that goes first. Offered are the next few that no
            gate holds, at most 64, all of one level (and of one tenant, where tenants are kept apart); the gates
            are asked for the one that was chosen. Asked at each pick and after each change, so answer fast.
        on_pick, on_put_back: within a pass, so that the next pick knows of those before it. A picked
            request is about to be admitted unless it is put back at the end of the pass.
        waiting_gate: why the request must wait although it is next, or None. Asked for the request at
            the head only. A held one is asked again when it is the best of those this gate holds, at
            most once a step, and after `Context.release`.
        token_cap: the most tokens this step, given how many are computed and would be scheduled.
            Not asked for a decode; a waiting request always keeps at least 1.
        victim_hint: added over all patches; higher is preempted sooner. Equal sums fall back to the
            ordering key, worst first.
        before_schedule, after_schedule, after_update: once a step; `outputs` maps client index to
            EngineCoreOutputs.
        on_add: before the first key is computed. on_preempt: before the key is computed anew.
        on_finish: for finished and aborted requests alike, before their blocks are freed.
        eviction_owner: called once per block pool, with all its blocks; returns what keeps the free ones.
        eviction_hint: a block's extra worth, summed over all patches: below 0 it is evicted first, above 0 last.
            Best a table (`patches.seam.worth.Worths`); of changes tell `Context.revalue`.
        on_touch: blocks of a prefix hit; those with `ref_cnt == 0` are still in the free queue.
        on_evict: cached blocks and their hashes, before these are removed; those of one allocation, or of one failed
            load, at once. Not told of: a reset of the whole cache, a state block that a hybrid model overwrites.
        expire: (request id, stop reason) of requests to end; asked before each scheduling pass, ahead of
            `before_schedule`, in order of rank. They are not scheduled again, and the reason
            (`patches.seam.endings`) is delivered with the next update. Unknown ids are passed over.
        on_own: (name, outcome, now) of a prefix that the patch asked for with `Context.inject`: `cached` or `dropped`.
        report: what was asked -> what the patch tells of its engine, as text; called between two steps by the engine's
            utility method `patchbench_report(patch, asked)`, so it must be fast and change nothing.
        api_admission: raises what upstream's API layer turns into a refusal.
    """

    request_key: Callable[[Any, float], KeyPart] | None = None
    tenant_rank: Callable[[str, float], float] | None = None
    prefer: Callable[[Sequence[Any], float], int] | None = None
    on_pick: Callable[[Any, float], None] | None = None
    on_put_back: Callable[[Any, float], None] | None = None
    waiting_gate: Callable[[Any, float], str | None] | None = None
    token_cap: Callable[[Any, int, int, float], int] | None = None
    victim_hint: Callable[[Any], float] | None = None
    before_schedule: Callable[[float], None] | None = None
    after_schedule: Callable[[Any, float], None] | None = None
    after_update: Callable[[Any, dict[int, Any], float], None] | None = None
    on_add: Callable[[Any, float], None] | None = None
    on_finish: Callable[[Any, float], None] | None = None
    on_preempt: Callable[[Any, float], None] | None = None
    eviction_owner: Callable[[list[Any]], BlockQueue] | None = None
    eviction_hint: Callable[[Any], float] | None = None
    on_touch: Callable[[Any], None] | None = None
    on_evict: Callable[[list[Any], list[Any]], None] | None = None
    expire: Callable[[float], Iterable[tuple[str, str]]] | None = None
    on_own: Callable[[str, str, float], None] | None = None
    report: Callable[[str], str] | None = None
    api_admission: Callable[[Any, int, str | None], None] | None = None

    def used(self) -> frozenset[str]:
        """Names of the seams for which a hook is set."""
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) is not None)


@dataclass(frozen=True)
class Patch:
    """One optimisation, as declared by its module.

    Attributes:
        name: its name on the command line. number: its number in the catalogue ("" for one from outside).
        area: one of `AREAS`. summary: one line.
        knobs: its knobs class. build: (knobs, context) -> hooks, once per engine.
        seams: the seams it uses, all of them. ranks: its rank on each ranked seam that it uses.
        why, how: paragraphs for its page. baseline: the upstream flags that it is measured against.
        mechanism: the metric that must move for a win to count.
        requires, conflicts: names of other patches. replaces: engine flags that it takes the place of.
        by_tenant: whether its waiting gate answers by tenant. The queue then keeps tenants apart: a refusal of
            a tenant's first request shuts that tenant's line for the step, and nobody else's.
        key_level: where its part of the key is continuous, what of a value is its level: a rising function.
            Within a level `prefer` may choose. Without it each value is a level of its own.
        engine_flags: knobs -> engine flags without which it cannot work (a KV connector), under vLLM's names; whoever
            starts the engine adds them. None as a value is a flag that must stay unset beside them.
        changes_outputs: whether it may change what is generated, not only when.
        references: papers, issues. removable_when: what upstream would have to do.
    """

    name: str
    number: str
    area: str
    summary: str
    knobs: type[Knobs]
    build: Callable[[Any, Context], Hooks]
    seams: tuple[str, ...]
    why: str
    how: str
    baseline: str
    mechanism: str
    removable_when: str
    ranks: Mapping[str, int] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    by_tenant: bool = False
    key_level: Callable[[float], float] | None = None
    engine_flags: Callable[[Any], Mapping[str, Any]] | None = None
    changes_outputs: bool = False
    references: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", MappingProxyType(dict(self.ranks)))
        if not _NAME.match(self.name):
            self._fail("name", f"{self.name!r} must be lower case letters, digits and single underscores")
        if self.area not in AREAS:
            self._fail("area", f"{self.area!r} is not one of {', '.join(AREAS)}")
        for text in ("summary", "why", "how", "baseline", "mechanism", "removable_when"):
            if not str(getattr(self, text)).strip():
                self._fail(text, "must not be empty")
        self._check_seams()
        self._check_knobs()
        for other in (*self.requires, *self.conflicts):
            if other == self.name:
                self._fail("requires/conflicts", "names the patch itself")
        both = sorted(set(self.requires) & set(self.conflicts))
        if both:
            self._fail("requires/conflicts", f"{both[0]!r} is in both")

    def _check_seams(self) -> None:
        if not self.seams:
            self._fail("seams", "declare at least one")
        if len(set(self.seams)) != len(self.seams):
            self._fail("seams", "a seam is named twice")
        for seam in self.seams:
            if seam not in SEAMS:
                self._fail("seams", f"{seam!r} is not a seam; known: {', '.join(SEAMS)}")
            if SEAMS[seam].ranked and seam not in self.ranks:
                self._fail("ranks", f"the seam {seam!r} needs a rank")
        for seam in self.ranks:
            if seam not in self.seams or not SEAMS[seam].ranked:
                self._fail("ranks", f"{seam!r} is not a ranked seam that this patch uses")

    def _check_knobs(self) -> None:
        for name, info in self.knobs.model_fields.items():
            if not (info.description or "").strip():
                self._fail("knobs", f"{name!r} has no description")
            if info.is_required():
                self._fail("knobs", f"{name!r} has no default")
            if _is_number(info.annotation) and not knob_unit(self.knobs, name):
                self._fail(
                    "knobs", f"{name!r} does not say its unit (last word: {', '.join(UNITS)}; or a `unit`)"
                )

    def _fail(self, where: str, what: str) -> None:
        raise PatchDefinitionError(f"patch {self.name!r}, {where}: {what}")

    def unit(self, knob: str) -> str:
        """The unit of one of its knobs, "" if it has none."""
        return knob_unit(self.knobs, knob)
