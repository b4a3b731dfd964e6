"""A conversation under a new system prompt: what its next turn will begin with, told from how others came back.

A turn's prompt is the system prompt, the turns before, and the question. When the system prompt changes, all after it
stays and moves by the difference in length. One conversation that came back under the new prompt shows where
the old one ended and the new one ends, to the token; the others' next prompts can then be written down.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

# Tokens that are looked for in a prompt to find where the rest of it has gone.
_PROBE_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Seam:
    """Where two prompts part and meet again: the first ends at `old_end`, the second, whose tokens are `head`, at its end.

    `answers`: whether the next prompt has the last answer in it as it was generated, to the token.
    """

    old_end: int
    head: tuple[int, ...]
    answers: bool = True

    def rebased(self, tokens: Sequence[int], prompt_tokens: int) -> list[int]:
        """What began with the old prompt, with the new one in its place; the last answer only if it comes back as it was."""
        end = len(tokens) if self.answers else prompt_tokens
        return [*self.head, *tokens[self.old_end : end]]


class Prompt:
    """A prompt in which the ends of many turns are looked for: what that takes is made once."""

    __slots__ = ("_data", "_known", "tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self._known = frozenset(self.tokens)
        self._data = array("q", self.tokens).tobytes()

    def may_have(self, tokens: Sequence[int], length: int) -> bool:
        """Whether all of the last few of the first `length` tokens occur here, in whatever order; cheap."""
        return self._known.issuperset(tokens[max(0, length - _PROBE_TOKENS) : length])

    def last_end(self, wanted: Sequence[int]) -> int:
        """Where the last occurrence of the wanted tokens ends; 0 if there is none."""
        part = array("q", wanted)
        data, probe, limit = self._data, part.tobytes(), len(self._data)
        while (at := data.rfind(probe, 0, limit)) >= 0:
            if at % part.itemsize == 0:
                return at // part.itemsize + len(wanted)
            limit = at + len(probe) - 1
        return 0


def find_seam_of_turns(tokens: Sequence[int], prompt_tokens: int, new: Prompt, common: int) -> Seam | None:
    """As `find_seam`, of a prompt and its answer; if that does not come back as it was generated, of the prompt alone."""
    seam = find_seam(tokens, len(tokens), new, common)
    if seam is None and (seam := find_seam(tokens, prompt_tokens, new, common)) is not None:
        seam = Seam(seam.old_end, seam.head, answers=False)
    return seam


def find_seam(old: Sequence[int], length: int, new: Prompt, common: int) -> Seam | None:
    """How the `new` prompt of a conversation came from the first `length` of the `old` tokens; None if it did not.

    Args:
        old: its last prompt and answer.
        common: tokens that both begin with.
    """
    if length - common < 2 * _PROBE_TOKENS:
        return None
    # The end of the old tokens lies somewhere in the new prompt, if the conversation simply went on.
    end = new.last_end(old[length - _PROBE_TOKENS : length])
    if end <= common + _PROBE_TOKENS:
        return None
    tokens, back = new.tokens, 0
    while back < min(length, end) - common and old[length - 1 - back] == tokens[end - 1 - back]:
        back += 1
    old_end, new_end = length - back, end - back
    if back < 2 * _PROBE_TOKENS or old_end < common or new_end < common:
        return None
    return Seam(old_end, tuple(tokens[:new_end]))
