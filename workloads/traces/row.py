"""One request of a trace, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request as its trace tells it.

    Attributes:
        arrival_ns: when it was sent, ns; from the epoch or from the trace's start, as the format counts.
        input_tokens: length of the prompt, at least 1.
        output_tokens: length of the answer, at least 1.
        line: where it stands: the line of the file, or the element of a JSON array. No two rows share it.
        block_ids: names of the prompt's blocks, first to last; equal prompts begin with equal ids. Empty where
            the format has none. A last block that is not full may go without a name.
        block_tokens: tokens of a full block; 0 where there are no ids.
        session: the conversation that it belongs to, or "".
        labels: the values of its reader's `label_names`: what else the row says, to tell tenants apart.
    """

    arrival_ns: int
    input_tokens: int
    output_tokens: int
    line: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 0
    session: str = ""
    labels: tuple[str, ...] = ()

    @property
    def total_tokens(self) -> int:
        """Prompt and answer together."""
        return self.input_tokens + self.output_tokens
