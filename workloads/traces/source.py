"""A trace file whose format is known: recognise it, and read its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import UserError
from harness.refusals import refuse_row
from workloads.traces.formats import READERS
from workloads.traces.formats.servegen import refuse_known
from workloads.traces.reader import Reader
from workloads.traces.records import Sample, records, sample
from workloads.traces.row import TraceRow

FORMATS = tuple(reader.name for reader in READERS)
# Times and lengths of that many rows take a GB while they are summed up.
MAX_ROWS = 50_000_000
_SHOWN_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class TraceSource:
    """A trace file and its format.

    Attributes:
        label_names: what `TraceRow.labels` are.
        block_tokens: tokens of a full block; 0 where the file names no blocks.
    """

    path: Path
    reader: type[Reader]
    label_names: tuple[str, ...]
    block_tokens: int
    _sample: Sample = field(repr=False)

    def rows(self, tally: Counter[str], limit: int | None = None) -> Iterator[TraceRow]:
        """The rows in the file's order, at most `limit`; what was changed or left out is counted in `tally`.

        Raises:
            UserError: naming file and line of a row that is none, or if there are too many.
        """
        reader = self.reader(self._sample)
        reader.tally = tally
        found = records(self.path, self._sample.kind, self._sample.noun)
        if self._sample.kind == "csv":
            next(found)
        count = 0
        for line, fields in found:
            if self._sample.kind == "json":
                refuse_row(fields, f"{self.path}: {self._sample.noun} {line}")
            row = reader.row(line, fields)
            if row is None:
                continue
            count += 1
            if count > MAX_ROWS:
                raise UserError(
                    f"{self.path}: more than {MAX_ROWS:,} rows; read the first ones alone with --limit N"
                )
            yield row
            if count == limit:
                return


def open_trace(path: Path, format_name: str | None = None) -> TraceSource:
    """Recognise a trace by its header or keys; `format_name` decides where two would fit.

    Raises:
        UserError: if it is in none of the formats, fits two, is not in the one that was asked for, or holds no row.
    """
    begun = sample(path)
    if format_name is not None and format_name not in FORMATS:
        raise UserError(f"no trace format {format_name!r}; the formats are {', '.join(FORMATS)}")
    refuse_known(begun)
    fits = [reader for reader in READERS if reader.matches(begun)]
    if not fits:
        raise UserError(f"{path}: {_unknown(begun)}")
    if format_name is not None:
        chosen = [reader for reader in fits if reader.name == format_name]
        if not chosen:
            raise UserError(
                f"{path}: not in the format {format_name}; it looks like {' or '.join(r.name for r in fits)}"
            )
        fits = chosen
    if len(fits) > 1:
        names = " and ".join(reader.name for reader in fits)
        raise UserError(
            f"{path}: fits {names}, which count time differently; say which it is with the option for its format "
            f"(bench trace --format {fits[0].name}, bench run --trace-format {fits[0].name})"
        )
    if not begun.records:
        raise UserError(f"{path}: no request in it, only a header; is the file complete?")
    reader = fits[0](begun)
    return TraceSource(path, fits[0], reader.label_names, reader.block_tokens, begun)


def _unknown(begun: Sample) -> str:
    what = "columns" if begun.kind == "csv" else "keys"
    named = ", ".join(name[:30] for name in begun.header[:_SHOWN_COLUMNS])
    more = f" and {len(begun.header) - _SHOWN_COLUMNS} more" if len(begun.header) > _SHOWN_COLUMNS else ""
    titles = ", ".join(dict.fromkeys(reader.title for reader in READERS))
    return (
        f"not a trace that is known: it begins with the {what} {named}{more}; known are {titles} "
        "(docs/TRACES.md has their columns)"
    )
