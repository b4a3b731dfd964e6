"""What `bench run --trace` settles before anything runs: which rows, for whom, and whether they fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.arms import Arm
from harness.errors import UserError
from harness.live_plan import Machine
from harness.plan import WorkloadChoice
from harness.profiles import Profile
from workloads.traces import Selection, TenantMap, TraceChoice, Window, choose, load_map, select
from workloads.traces.assumptions import assumptions
from workloads.traces.tenant_map import Draw

DEFAULT_SECONDS = 300.0
# Beneath it a p99 is a matter of luck.
FEW_REQUESTS = 200


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """What the user asked for, as options of `bench run`; `seconds` of 0 is to the trace's end."""

    path: Path
    tenants: Path | None = None
    from_s: float = 0.0
    seconds: float = DEFAULT_SECONDS
    limit: int | None = None
    format: str | None = None
    skip_long: bool = False


def longest_request(profile: Profile | Machine, arms: Iterable[Arm]) -> int:
    """Tokens of prompt and answer that every arm can serve: its max_model_len, and what the KV cache holds."""
    if isinstance(profile, Machine):
        # vLLM does not start where its cache holds less.
        return min(arm.flags.max_model_len for arm in arms)
    # One block is vLLM's own.
    blocks = min((profile.kv_blocks - 1) * arm.flags.block_size for arm in arms)
    return min(blocks, *(arm.flags.max_model_len for arm in arms))


def plan_trace(
    asked: TraceRequest,
    longest: int,
    *,
    rate_scale: float,
    length_scale: float,
) -> tuple[WorkloadChoice, list[str]]:
    """The plan's workload, and what to say of it before the run; `longest` is the most tokens that all arms serve.

    Raises:
        UserError: if the file or the map is malformed, the window is empty or too large, a row has no tenant, or
            requests are longer than an arm can serve.
    """
    choice = choose(
        asked.path,
        format_name=asked.format,
        window=Window(asked.from_s, asked.seconds or None, asked.limit),
        tenants=load_map(asked.tenants) if asked.tenants is not None else TenantMap(),
        max_tokens=longest if asked.skip_long else None,
    )
    selection = select(choice, length_scale)
    _refuse_long(selection, choice, longest)
    counts = _tenants(selection, choice)
    workload = WorkloadChoice(name="trace", rate_scale=rate_scale, length_scale=length_scale, trace=choice)
    return workload, [*_lines(selection, choice, counts, rate_scale)]


def _refuse_long(selection: Selection, choice: TraceChoice, longest: int) -> None:
    long = [row for row in selection.rows if row.total_tokens > longest]
    if long:
        first = min(long, key=lambda row: row.line)
        raise UserError(
            f"{choice.path}: {len(long):,} of {len(selection.rows):,} requests of the window are longer than the "
            f"{longest:,} tokens that every arm can serve (the first: line {first.line}, {first.input_tokens:,} + "
            f"{first.output_tokens:,}); --trace-skip-long leaves them out and counts them"
        )


def _tenants(selection: Selection, choice: TraceChoice) -> dict[str, int]:
    draw = Draw(choice.tenants, selection.source.label_names, 0, choice.path)
    counts = dict.fromkeys((tenant.name for tenant in choice.tenants.tenants), 0)
    for row in selection.rows:
        counts[draw.tenant_of(row)] += 1
    return counts


def _lines(
    selection: Selection, choice: TraceChoice, counts: dict[str, int], rate_scale: float
) -> Iterable[str]:
    begin, seconds = choice.window.from_s, selection.length_ns / 1e9
    count, prompt_tokens = len(selection.rows), selection.prompt_tokens
    faster = "" if rate_scale == 1 else f", replayed at {rate_scale:g} times its rate"
    yield (
        f"trace: {choice.format}, {begin:,.0f} to {begin + seconds:,.0f} s of {selection.scan.span_s:,.0f} s{faster}: "
        f"{count:,} requests, {prompt_tokens:,} prompt tokens ({4 * prompt_tokens / 1e6:,.0f} MB)"
    )
    yield "tenants: " + ", ".join(f"{name} {number:,}" for name, number in counts.items())
    for said in assumptions(
        selection.source, choice.tenants, selection.scan, selection.too_long, choice.max_tokens
    ):
        yield f"assumed: {said}"
    if count < FEW_REQUESTS:
        yield (
            f"note: {count:,} requests are few for a comparison; a longer --trace-seconds (0: to the end) has more"
        )
