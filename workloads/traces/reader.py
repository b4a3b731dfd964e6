"""What the reader of a format offers. Each format is one module in `workloads/traces/formats`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

from harness.errors import UserError
from workloads.traces.records import Kind, Sample
from workloads.traces.row import TraceRow
from workloads.traces.values import SeenIds, shown, tokens

# What a reader counts in `tally`.
FAILED = "failed"
ZERO_OUTPUT = "zero_output"
UNKNOWN_PARENT = "unknown_parent"


class Reader(ABC):
    """Turns records of one file into rows; it counts in `tally` what it changed or left out.

    Attributes:
        name: how the format is asked for.
        title: how a person calls it.
        clock: what its times are.
        label_names: columns that are no length or time; see `TraceRow.labels`.
        block_tokens: tokens of a full block; 0 where the file names no blocks.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    kind: ClassVar[Kind]
    clock: ClassVar[str]

    def __init__(self, sample: Sample) -> None:
        self._path, self._noun = sample.path, sample.noun
        self.tally: Counter[str] = Counter()
        self.label_names: tuple[str, ...] = ()
        self.block_tokens = 0
        self._ids = SeenIds()

    @classmethod
    @abstractmethod
    def matches(cls, sample: Sample) -> bool:
        """Whether the file is in this format."""

    @abstractmethod
    def row(self, line: int, fields: Any) -> TraceRow | None:
        """One row, or None for one that is left out (and counted).

        Raises:
            UserError: naming file and line.
        """

    def fault(self, line: int, what: str) -> UserError:
        """The error for one line of this file."""
        return UserError(f"{self._path}: {self._noun} {line}: {what}")

    def checked(self, line: int, name: str, convert: Callable[..., int], *values: object) -> int:
        """A converted value; what `convert` says of one that is wrong becomes the error of this line."""
        try:
            return convert(*values)
        except ValueError as error:
            raise self.fault(line, f"{name} {error}") from None

    def prompt_tokens(self, line: int, name: str, value: object) -> int:
        """The prompt's length; an empty prompt is an error."""
        count = self.checked(line, name, tokens, value)
        if count == 0:
            raise self.fault(line, f"{name} is 0; a request without a prompt cannot be sent: remove the row")
        return count

    def answer_tokens(self, line: int, name: str, value: object) -> int:
        """The answer's length; an empty answer is replayed as one token, and counted."""
        count = self.checked(line, name, tokens, value)
        if count == 0:
            self.tally[ZERO_OUTPUT] += 1
        return max(1, count)

    def new_id(self, line: int, name: str, value: object) -> int:
        """An id that no row before has; another is an error."""
        number = self.checked(line, name, _identifier, value)
        if not self._ids.add(number):
            raise self.fault(
                line, f"{name} {number} has come before; ids must differ: is the file joined from two?"
            )
        return number

    def _blocks(self, line: int, value: object, input_tokens: int) -> tuple[int, ...]:
        """The ids, if there are as many as the prompt has blocks (its last one, if not full, may lack one)."""
        ids = block_ids(value)
        if isinstance(ids, str):
            raise self.fault(line, f"hash_ids {ids}")
        full, rest = divmod(input_tokens, self.block_tokens)
        if len(ids) not in (full, full + (rest > 0)):
            raise self.fault(
                line,
                f"hash_ids has {len(ids)} ids of {self.block_tokens} tokens, but {input_tokens} tokens of input have "
                f"{full + (rest > 0)} blocks; is the row complete?",
            )
        return ids


class CsvReader(Reader):
    """A format with a header: columns are found by their names, in any order and case."""

    kind = "csv"
    columns: ClassVar[tuple[str, ...]]
    # Columns that are neither needed nor fit to tell tenants apart.
    ignored: ClassVar[tuple[str, ...]] = ()

    def __init__(self, sample: Sample) -> None:
        super().__init__(sample)
        at = {name.lower(): i for i, name in enumerate(sample.header)}
        self._at = at
        known = {*self.columns, *self.ignored}
        others = [i for name, i in at.items() if name not in known]
        self.label_names = tuple(sample.header[i] for i in others)
        self._others = tuple(others)

    @classmethod
    def matches(cls, sample: Sample) -> bool:
        return sample.kind == "csv" and sample.names >= set(cls.columns)

    def _labels(self, fields: list[str]) -> tuple[str, ...]:
        return tuple(fields[i].strip() for i in self._others)


def _identifier(value: object) -> int:
    text = str(value) if type(value) is int else value
    if type(text) is str and text.isascii() and text.isdigit() and len(text) < 20:
        return int(text)
    raise ValueError(f"is {shown(value)}; expected a whole number, 0 or more")


def block_ids(value: object) -> tuple[int, ...] | str:
    """The ids as a tuple, or what is wrong with them."""
    if value is None:
        return "is missing; expected a list of whole numbers"
    if not isinstance(value, list):
        return f"is {shown(value)}; expected a list of whole numbers"
    for block in value:
        if type(block) is not int:
            return f"holds {shown(block)}; expected whole numbers"
        if not 0 <= block < 1 << 64:
            return f"holds {shown(block)}, which is {'below 0' if block < 0 else 'too large'}"
    return tuple(value)
