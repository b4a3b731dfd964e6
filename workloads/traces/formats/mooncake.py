"""Mooncake: JSON lines with times in ms, and an id for each block of 512 prompt tokens.

An id names a block together with all that comes before it. Source: FAST25-release/traces of
kvcache-ai/Mooncake (Apache-2.0).
"""

from __future__ import annotations

from decimal import Decimal

from workloads.traces.formats.json_lengths import JsonLengths, fitting, has_ids, is_lengths, rows_with_ids
from workloads.traces.records import Sample
from workloads.traces.values import NS_PER_MS

BLOCK_TOKENS = 512
# What vLLM's timed_trace takes a block for unless told otherwise.
OTHER_BLOCK_TOKENS = 16


class Mooncake(JsonLengths):
    """Told from vLLM's timed_trace by its blocks of 512 tokens and its whole milliseconds."""

    name = "mooncake"
    title = "Mooncake"
    clock = "milliseconds"
    unit_ns = NS_PER_MS

    def __init__(self, sample: Sample) -> None:
        super().__init__(sample)
        self.block_tokens = BLOCK_TOKENS

    @classmethod
    def matches(cls, sample: Sample) -> bool:
        if not is_lengths(sample):
            return False
        rows = rows_with_ids(sample)
        if not rows:
            # Ids that are there but broken: this reader says what is wrong with them.
            return has_ids(sample)
        whole = not any(isinstance(fields.get("timestamp"), Decimal) for _, fields in sample.records)
        ours = fitting(rows, BLOCK_TOKENS)
        return whole and ours > 0 and ours >= fitting(rows, OTHER_BLOCK_TOKENS)
