"""The JSON lines that vLLM's own benchmark replays as `--dataset-name timed_trace`.

Times are seconds (its --timed-trace-sec-multiplier is 1 unless set), a block is 16 tokens (its
--timed-trace-chunk-hash-size), and `hash_ids` may be left out. vLLM cuts a prompt where its ids end; here such
a row is refused. Source: vllm/benchmarks/datasets/datasets.py, class TimedTrace, of vLLM 0.32.0.
"""

from __future__ import annotations

from typing import Any

from workloads.traces.formats.json_lengths import JsonLengths, fitting, has_ids, is_lengths, rows_with_ids
from workloads.traces.formats.mooncake import BLOCK_TOKENS, Mooncake
from workloads.traces.records import Sample
from workloads.traces.row import TraceRow
from workloads.traces.values import NS_PER_S

DEFAULT_BLOCK_TOKENS = 16
_SIZES = (16, 32, 64, 128, 256, 512, 1024)


class TimedTrace(JsonLengths):
    """The size of a block is the default, or the power of two that all sampled rows fit."""

    name = "timed_trace"
    title = "vLLM's timed_trace"
    clock = "seconds"
    unit_ns = NS_PER_S

    def __init__(self, sample: Sample) -> None:
        super().__init__(sample)
        if has_ids(sample):
            rows = rows_with_ids(sample)
            fits = [size for size in _SIZES if rows and fitting(rows, size) == len(rows)]
            self.block_tokens = fits[0] if fits else DEFAULT_BLOCK_TOKENS

    @classmethod
    def matches(cls, sample: Sample) -> bool:
        if not is_lengths(sample):
            return False
        if not has_ids(sample):
            return True
        rows = rows_with_ids(sample)
        ours = fitting(rows, DEFAULT_BLOCK_TOKENS)
        if ours and ours >= fitting(rows, BLOCK_TOKENS):
            return True
        return bool(rows) and not Mooncake.matches(sample)

    def row(self, line: int, fields: dict[str, Any]) -> TraceRow | None:
        if self.block_tokens == 0 and fields.get("hash_ids"):
            raise self.fault(
                line, "hash_ids are here, but the rows before have none; name the blocks of all or none"
            )
        return super().row(line, fields)
