"""Azure's LLM inference traces of 2023 and 2024: CSV of times and lengths, nothing else.

2023 writes times without a zone and with seven digits (100 ns), 2024 with `+00:00` and up to six digits, which
it leaves out when they are all zero. Sources: AzureLLMInferenceDataset2023.md, AzureLLMInferenceDataset2024.md
and their notebooks, Azure/AzurePublicDataset (CC-BY).
"""

from __future__ import annotations

import re
from typing import ClassVar

from workloads.traces.reader import CsvReader
from workloads.traces.records import Sample
from workloads.traces.row import TraceRow
from workloads.traces.values import iso_ns

_ZONE = re.compile(r"(Z|[+-][0-9]{2}:?[0-9]{2})$")


class _Azure(CsvReader):
    columns = ("timestamp", "contexttokens", "generatedtokens")
    clock = "dates and times"
    zoned: ClassVar[bool]

    def __init__(self, sample: Sample) -> None:
        super().__init__(sample)
        self._time, self._in, self._out = (self._at[name] for name in self.columns)

    @classmethod
    def matches(cls, sample: Sample) -> bool:
        if not super().matches(sample):
            return False
        # A file without a row is no reason to call the format unknown; that there is none is said later.
        first = sample.records[0][1] if sample.records else None
        time = str(first[[name.lower() for name in sample.header].index("timestamp")]) if first else ""
        return bool(_ZONE.search(time.strip())) == cls.zoned

    def row(self, line: int, fields: list[str]) -> TraceRow:
        return TraceRow(
            arrival_ns=self.checked(line, "TIMESTAMP", self._ns, fields[self._time].strip()),
            input_tokens=self.prompt_tokens(line, "ContextTokens", fields[self._in].strip()),
            output_tokens=self.answer_tokens(line, "GeneratedTokens", fields[self._out].strip()),
            line=line,
            labels=self._labels(fields),
        )

    def _ns(self, text: str) -> int:
        at_ns, zoned = iso_ns(text)
        if zoned != self.zoned:
            other = (
                "has a time zone, the rows before it have none"
                if zoned
                else "has no time zone, the others have"
            )
            raise ValueError(f"{text!r} {other}; times of one file must be of one kind")
        return at_ns


class Azure2023(_Azure):
    """Times without a zone."""

    name = "azure-2023"
    title = "Azure LLM inference trace 2023"
    zoned = False


class Azure2024(_Azure):
    """Times with a zone."""

    name = "azure-2024"
    title = "Azure LLM inference trace 2024"
    zoned = True
