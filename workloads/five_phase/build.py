"""Builds the workload: the same arguments give the same bytes, in any process, on any machine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from harness.errors import UserError
from workloads.digest import requests_sha256
from workloads.five_phase.chat import Chat
from workloads.five_phase.completion import completion_drafts, room
from workloads.five_phase.context import Context
from workloads.five_phase.corpus import load_corpus
from workloads.five_phase.draft import Draft
from workloads.five_phase.phases import PHASES, RatePlan, parse_phases, timetable
from workloads.five_phase.rag import Reader
from workloads.five_phase.tenants import NOTES, TENANTS, TenantSpec
from workloads.request import Phase, PlannedRequest, Workload

NAME = "five_phase"
PLANNED_MODES = ("pd", "spec", "all")
TABLE_RATES = RatePlan()


def build(
    seed: int,
    *,
    phases: str | int | Sequence[int] = "all",
    rates: RatePlan = TABLE_RATES,
    rate_scale: float = 1.0,
    time_scale: float = 1.0,
    length_scale: float = 1.0,
    slo_factor: float = 1.0,
    mode: str = "single",
    vocab_size: int = 128_256,
) -> Workload:
    """The five-phase, seven-tenant workload, as tokens.

    Args:
        seed: decides everything that is drawn; the same seed is the same trace for every arm.
        phases: `all`, `3`, `2,4` or numbers. Earlier phases are replayed unmeasured, later ones dropped.
        rates: the profile's factors on the table's rates, one a phase.
        rate_scale: multiplies every rate.
        time_scale: multiplies the phases' durations; the times between requests stay.
        length_scale: multiplies the tokens of prompts and outputs.
        slo_factor: multiplies the SLOs, for GPUs slower than the data-centre one they are meant for.
        mode: how the traffic will be served; only `single` so far.
        vocab_size: token ids are below this.

    Raises:
        UserError: for an argument out of range, or when the corpus is not the pin's.
    """
    selected = check_choice(phases, mode)
    _check_numbers(
        seed, rate_scale=rate_scale, time_scale=time_scale, length_scale=length_scale, slo_factor=slo_factor
    )
    table = timetable(selected, time_scale)
    context = Context(load_corpus(vocab_size), seed, length_scale)
    # Lengths that no text has are refused before any are written.
    room(context)
    drafts: list[Draft] = []
    for phase, spec in zip(table, PHASES, strict=False):
        for tenant in TENANTS:
            rate_rps = rates.rate_rps(spec, tenant.name, rate_scale)
            drafts.extend(_drafts(context, tenant, phase, rate_rps, vocab_size))
    requests = _planned(drafts)
    return Workload(
        name=NAME,
        seed=seed,
        tenants=tuple(tenant.tenant(slo_factor) for tenant in TENANTS),
        phases=table,
        requests=requests,
        sha256=requests_sha256(requests),
        corpus_sha256=context.corpus.sha256,
        slo_factor=slo_factor,
        notes=NOTES,
    )


def _drafts(
    context: Context, tenant: TenantSpec, phase: Phase, rate_rps: float, vocab_size: int
) -> Iterator[Draft]:
    """One tenant's requests in one phase."""
    if tenant.kind == "chat":
        return Chat(context, tenant, phase).drafts(rate_rps)
    if tenant.kind == "completion":
        return completion_drafts(context, tenant, phase, rate_rps)
    return Reader(context, tenant, phase, vocab_size).drafts(rate_rps)


def _planned(drafts: list[Draft]) -> tuple[PlannedRequest, ...]:
    """The requests in order of sending, each with its place and its id."""
    # The sort is stable: what ties in time and tenant stays in order of creation.
    ordered = sorted(drafts, key=lambda draft: (draft.intended_ns, draft.tenant))
    sent: Counter[tuple[str, int]] = Counter()
    requests = []
    for index, draft in enumerate(ordered):
        sent[draft.tenant, draft.phase] += 1
        requests.append(
            PlannedRequest(
                index=index,
                request_id=f"{draft.tenant}.p{draft.phase}.{sent[draft.tenant, draft.phase]}",
                tenant=draft.tenant,
                phase=draft.phase,
                intended_ns=draft.intended_ns,
                prompt=draft.prompt(),
                output=draft.output,
                segments=tuple(part.segment() for part in draft.parts),
                cancel_ns=draft.cancel_ns,
                session=draft.session,
            )
        )
    return tuple(requests)


def check_choice(phases: str | int | Sequence[int], mode: str) -> tuple[int, ...]:
    """The phases that are selected, after a check of both.

    Raises:
        UserError: for a phase or a mode that there is not.
    """
    if mode in PLANNED_MODES:
        raise UserError(f"--mode: {mode} is planned, not there yet; use single")
    if mode != "single":
        raise UserError(f"--mode: there is no mode {mode!r}; use single")
    return parse_phases(phases)


def _check_numbers(seed: int, **scales: float) -> None:
    if seed < 0:
        raise UserError(f"--seed: {seed} is negative; use 0 or a positive whole number")
    for name, value in scales.items():
        if not (math.isfinite(value) and value > 0):
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option}: {value:g} is no scale; use a number above 0, such as 0.5")
