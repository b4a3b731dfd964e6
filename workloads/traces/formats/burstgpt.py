"""BurstGPT: CSV of a university's calls to ChatGPT and GPT-4, with seconds from the first day's midnight.

A row whose answer has no tokens is a call that failed; the files "without fails" lack them. Release 2 puts
`Session ID` (of conversations only) and `Elapsed time` between the columns. Source: README of HPMLL/BurstGPT
(CC-BY-4.0).
"""

from __future__ import annotations

from workloads.traces.reader import FAILED, CsvReader
from workloads.traces.records import Sample
from workloads.traces.row import TraceRow
from workloads.traces.values import NS_PER_S, since_start_ns, tokens


class BurstGpt(CsvReader):
    """Rows by the names of their columns, since releases differ in their order."""

    name = "burstgpt"
    title = "BurstGPT"
    clock = "seconds"
    columns = ("timestamp", "request tokens", "response tokens")
    ignored = ("session id", "elapsed time", "total tokens")

    def __init__(self, sample: Sample) -> None:
        super().__init__(sample)
        self._time, self._in, self._out = (self._at[name] for name in self.columns)
        self._session = self._at.get("session id")

    def row(self, line: int, fields: list[str]) -> TraceRow | None:
        arrival_ns = self.checked(line, "Timestamp", since_start_ns, fields[self._time].strip(), NS_PER_S)
        asked, answered = fields[self._in].strip(), fields[self._out].strip()
        output_tokens = self.checked(line, "Response tokens", tokens, answered)
        if output_tokens == 0:
            self.checked(line, "Request tokens", tokens, asked)
            self.tally[FAILED] += 1
            return None
        return TraceRow(
            arrival_ns=arrival_ns,
            input_tokens=self.prompt_tokens(line, "Request tokens", asked),
            output_tokens=output_tokens,
            line=line,
            session="" if self._session is None else fields[self._session].strip(),
            labels=self._labels(fields),
        )
