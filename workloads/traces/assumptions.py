"""What replaying a trace takes for granted, in the words that every output uses."""

from __future__ import annotations

from collections.abc import Iterator

from workloads.traces.reader import FAILED, UNKNOWN_PARENT, ZERO_OUTPUT
from workloads.traces.source import TraceSource
from workloads.traces.tenant_map import TenantMap
from workloads.traces.window import Scan


def assumptions(
    source: TraceSource, tenants: TenantMap, scan: Scan, too_long: int = 0, max_tokens: int | None = None
) -> Iterator[str]:
    """One sentence for each thing that the file does not say, or that was changed; counts are of all rows read."""
    yield f"times are {source.reader.clock}; the earliest request is the start"
    yield tenants.assumed
    if source.block_tokens:
        yield f"prompts are made up: equal ids give equal blocks of {source.block_tokens} tokens, nothing else is shared"
    else:
        yield "prompts are made up and share nothing, since the trace names no blocks: a prefix cache finds nothing"
    yield "answers are made up, as long as the trace says; no later prompt repeats them"
    if scan.out_of_order:
        yield f"{_rows(scan.out_of_order)} earlier than the row before: sorted by time"
    if scan.tally[FAILED]:
        yield f"{_rows(scan.tally[FAILED])} without an answer, calls that failed: left out"
    if scan.tally[ZERO_OUTPUT]:
        yield f"{_rows(scan.tally[ZERO_OUTPUT])} with an answer of 0 tokens: replayed with 1, the least an engine gives"
    if scan.tally[UNKNOWN_PARENT]:
        yield f"{_rows(scan.tally[UNKNOWN_PARENT])} whose earlier turn does not stand before them: their chat begins there"
    if too_long:
        yield f"{_rows(too_long)} of the window longer than {max_tokens:,} tokens: left out"


def _rows(count: int) -> str:
    return f"{count:,} row{'s' if count != 1 else ''}"
