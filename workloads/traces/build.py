"""A workload out of a trace: the trace's times and lengths, content and tenants drawn where it has none."""

from __future__ import annotations

from itertools import pairwise

from harness.errors import UserError
from workloads.digest import requests_sha256
from workloads.request import Phase, PlannedRequest, Segment, TokenIds, Workload
from workloads.traces import content
from workloads.traces.assumptions import assumptions
from workloads.traces.choice import TraceChoice, select
from workloads.traces.row import TraceRow
from workloads.traces.tenant_map import Draw

NAME = "trace"
PHASE = 1


def build(
    choice: TraceChoice,
    seed: int,
    *,
    rate_scale: float = 1.0,
    length_scale: float = 1.0,
    vocab_size: int = 128_256,
) -> Workload:
    """The chosen part of a trace as requests, in one measured phase.

    Args:
        choice: file, window, tenants.
        seed: decides what the trace lacks: who sends what (where the map has shares), and the token ids.
        rate_scale: divides the times between requests.
        length_scale: multiplies the tokens of prompts and answers.
        vocab_size: token ids are below this.

    Raises:
        UserError: if the file has changed or is malformed, or a row has no tenant.
    """
    if seed < 0:
        raise UserError(f"--seed: {seed} is negative; use 0 or a positive whole number")
    selection = select(choice, length_scale)
    source = selection.source
    draw = Draw(choice.tenants, source.label_names, seed, choice.path)
    requests = tuple(
        PlannedRequest(
            index=index,
            request_id=f"row-{row.line:08d}",
            tenant=draw.tenant_of(row),
            phase=PHASE,
            intended_ns=round((row.arrival_ns - selection.origin_ns) / rate_scale),
            prompt=prompt(row, seed, length_scale, vocab_size),
            output=content.tokens(
                content.keys(seed, content.ANSWER, [row.line]), [row.output_tokens], vocab_size
            ),
            segments=(Segment("prompt", f"row {row.line}", row.input_tokens),),
            session=row.session,
        )
        for index, row in enumerate(selection.rows)
    )
    end_ns = max(round(selection.length_ns / rate_scale), requests[-1].intended_ns + 1)
    return Workload(
        name=NAME,
        seed=seed,
        tenants=choice.tenants.tenants,
        phases=(Phase(PHASE, "trace", 0, end_ns, measured=True),),
        requests=requests,
        sha256=requests_sha256(requests),
        corpus_sha256="",
        notes=tuple(
            assumptions(source, choice.tenants, selection.scan, selection.too_long, choice.max_tokens)
        ),
    )


def prompt(row: TraceRow, seed: int, length_scale: float, vocab_size: int) -> TokenIds:
    """The prompt's token ids: equal ids of blocks give equal tokens, and what has no id is like nothing else."""
    bounds = [min(row.input_tokens, _cut(i, row, length_scale)) for i in range(len(row.block_ids) + 1)]
    if row.block_ids and len(row.block_ids) * row.block_tokens * length_scale >= row.input_tokens:
        # The last block takes what rounding left.
        bounds[-1] = row.input_tokens
    named = content.keys(seed, content.BLOCK, row.block_ids)
    streams, lengths = named, [end - start for start, end in pairwise(bounds)]
    rest = row.input_tokens - bounds[-1]
    if rest:
        streams = content.concatenate(named, content.keys(seed, content.UNNAMED, [row.line]))
        lengths.append(rest)
    return content.tokens(streams, lengths, vocab_size)


def _cut(blocks: int, row: TraceRow, length_scale: float) -> int:
    """Where that many blocks end."""
    return round(blocks * row.block_tokens * length_scale)
