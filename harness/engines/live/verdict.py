"""Whether a live run may be believed: every finding has a code, and one that is fatal makes the run INVALID."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from harness.arms import Arm
from harness.engines.live.client.report import ClientReport
from harness.engines.live.prefix_bound import excess
from harness.engines.live.prometheus import Metrics
from harness.engines.live.telemetry.collect import Telemetry
from harness.engines.live.telemetry.join import Joined
from harness.engines.live.telemetry.reconcile import Disagreement
from workloads.request import Workload

# With fewer first tokens than this no figure of a run means anything.
FEWEST_SERVED = 20
# An emulated engine later than this is one of this machine's processor, not of the profile's GPU; the client's bar.
ENGINE_LATE_MS = 10.0
# What witnesses disagree on, by the code of the finding; whatever else it is has a code of its own.
_WITNESSES = {
    "output_tokens": "token_mismatch",
    "prompt_tokens": "token_mismatch",
    "metrics": "no_metrics",
}
DISAGREE = "witnesses_disagree"


@dataclass(frozen=True, slots=True)
class Finding:
    """What speaks against a run, or must be known beside its figures (`fatal` tells which)."""

    code: str
    text: str
    fatal: bool = True

    def json(self) -> dict[str, Any]:
        """As a manifest holds it."""
        return {"code": self.code, "text": self.text, "fatal": self.fatal}


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """All that a run left to judge it by.

    Attributes:
        tables: the record's. joined: how its requests were found in the engine.
        telemetry: from the run's start on.
        metrics: the server's own counters. disagreements: what `reconcile` found.
        warm_up: why the server was not warm; "" where it was.
        receipt: the record's. receipt_faults: what its processes' receipts lack, once it has ended.
        throttled: what held the GPUs' clocks down.
        emulation: how an emulated engine kept the time (`emulated.launch.conduct`); None for a real one.
        notes: what else is known, not fatal.
    """

    arm: Arm
    workload: Workload
    report: ClientReport
    tables: dict[str, pa.Table]
    joined: Joined
    telemetry: Telemetry
    metrics: Metrics
    disagreements: Sequence[Disagreement] = ()
    warm_up: str = ""
    receipt: dict[str, Any] | None = None
    receipt_faults: Sequence[str] = ()
    throttled: Sequence[str] = ()
    emulation: Mapping[str, Any] | None = None
    notes: Sequence[Finding] = ()


def findings(run: Evidence) -> list[Finding]:
    """All that was found, the fatal ones first."""
    checks = (_client, _server, _patches, _tokens, _cache, _witnesses, _samples, _warm, _throttled, _late)
    found = [one for check in checks for one in check(run)]
    found += run.notes
    return sorted(found, key=lambda one: not one.fatal)


def validity(found: Sequence[Finding]) -> dict[str, Any]:
    """The manifest's part."""
    return {"valid": not any(one.fatal for one in found), "reasons": [one.json() for one in found]}


def _client(run: Evidence) -> Iterator[Finding]:
    if run.report.client_stall:
        yield Finding("client_stall", run.report.client_stall)


def _server(run: Evidence) -> Iterator[Finding]:
    engines = {engine["pid"] for engine in run.telemetry.engines}
    if len(engines) > 1:
        yield Finding("server_restart", f"{len(engines)} engine processes served it, one after another")
    for fault in run.metrics.faults:
        yield Finding(fault.code, f"at {fault.t_ns / 1e9:.1f} s: {fault.detail}")
    for text in run.telemetry.faults:
        yield Finding("no_telemetry", f"the engine's telemetry is not complete: {text}")


def _patches(run: Evidence) -> Iterator[Finding]:
    for text in run.receipt_faults:
        yield Finding("patch_not_loaded", text)
    hooks = (run.receipt or {}).get("hooks", {})
    for patch in run.arm.patches:
        if not hooks.get(patch, {}).get("hits"):
            yield Finding("never_fired", f"{patch} never fired on this traffic", fatal=False)


def _tokens(run: Evidence) -> Iterator[Finding]:
    table = run.tables["requests"]
    counted, planned = (table[name].to_pylist() for name in ("prompt_tokens_counted", "prompt_tokens"))
    wrong = [row for row, (c, p) in enumerate(zip(counted, planned, strict=True)) if c not in (None, p)]
    if wrong:
        row = wrong[0]
        yield Finding(
            "token_mismatch",
            f"the server counted other prompt tokens than planned in {len(wrong)} requests (the first, "
            f"{run.workload.requests[row].request_id}: {counted[row]} for {planned[row]})",
        )
    got, wanted, status = (
        table[name].to_pylist() for name in ("output_tokens", "output_tokens_planned", "status")
    )
    short = [row for row, how in enumerate(status) if how == "ok" and got[row] != wanted[row]]
    if short:
        row = short[0]
        yield Finding(
            "token_mismatch",
            f"{len(short)} answers have another length than planned (the first, "
            f"{run.workload.requests[row].request_id}: {got[row]} tokens for {wanted[row]})",
        )
    guessed = sum(not seen.tokens_exact for seen in run.report.requests)
    if guessed:
        yield Finding(
            "token_mismatch", f"the server did not say how many tokens some chunks of {guessed} answers hold"
        )


def _cache(run: Evidence) -> Iterator[Finding]:
    if not run.arm.flags.enable_prefix_caching:
        return
    table = run.tables["requests"]
    found = excess(
        run.workload.requests,
        table["scheduled_ns"].to_pylist(),
        table["cached_tokens"].to_pylist(),
        run.arm.flags.block_size,
    )
    if found.first is not None:
        yield Finding(
            "prefix_contamination",
            f"{found.requests} requests found {found.tokens:,} prompt tokens in the cache that this traffic cannot "
            f"have put there (the first, {run.workload.requests[found.first].request_id}: {found.found} of at most "
            f"{found.bound}): the cache was not empty, or others used the server",
        )


def _witnesses(run: Evidence) -> Iterator[Finding]:
    for one in run.disagreements:
        code = _WITNESSES.get(one.what, DISAGREE)
        yield Finding(code, f"{one.what}: {one.detail}", fatal=code != "no_metrics")
    if run.joined.repeated:
        yield Finding(DISAGREE, f"the engine got {len(run.joined.repeated)} requests more than once")
    if run.joined.strangers:
        yield Finding(DISAGREE, f"the engine got {len(run.joined.strangers)} requests of somebody else")


def _samples(run: Evidence) -> Iterator[Finding]:
    table = run.tables["requests"]
    rows = zip(table["measured"].to_pylist(), table["first_token_ns"].to_pylist(), strict=True)
    served = sum(1 for measured, first in rows if measured and first is not None)
    if served < FEWEST_SERVED:
        yield Finding(
            "too_few_samples",
            f"only {served} measured requests got a token, fewer than {FEWEST_SERVED}: send more with --rate-scale "
            "or --time-scale",
        )


def _warm(run: Evidence) -> Iterator[Finding]:
    if run.warm_up:
        yield Finding("warmup_short", run.warm_up)


def _throttled(run: Evidence) -> Iterator[Finding]:
    if run.throttled:
        yield Finding("throttled", f"the GPU's clocks were held down: {', '.join(run.throttled)}")


def _late(run: Evidence) -> Iterator[Finding]:
    if run.emulation is None:
        return
    late = run.emulation.get("late_ms", {}).get("p99")
    if late is None:
        yield Finding("engine_late", "the emulated engine did not say at its end how it had kept the time")
    elif late > ENGINE_LATE_MS:
        yield Finding(
            "engine_late",
            f"the emulated engine took its steps' outputs {late:.1f} ms late (p99; at most {ENGINE_LATE_MS:g}): this "
            "machine's processor, not the profile's GPU, set the pace; send less with --rate-scale",
        )
