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


def find_seam_of_turns(
    tokens: Sequence[int], prompt_tokens: int, new: Sequence[int], common: int
) -> Seam | None:
    """As `find_seam`, of a prompt and its answer; if that does not come back as it was generated, of the prompt alone."""
    seam = find_seam(tokens, new, common)
    if seam is None and (seam := find_seam(tokens[:prompt_tokens], new, common)) is not None:
        seam = Seam(seam.old_end, seam.head, answers=False)
    return seam


def find_seam(old: Sequence[int], new: Sequence[int], common: int) -> Seam | None:
    """How the `new` prompt of a conversation came from the `old` tokens (its last prompt and answer); None if it did not.

    Args:
        common: tokens that both begin with.
    """
    old, new = list(old), list(new)
    if len(old) - common < 2 * _PROBE_TOKENS:
        return None
    # The end of the old tokens lies somewhere in the new prompt, if the conversation simply went on.
    end = _last_end(new, old[-_PROBE_TOKENS:])
    if end <= common + _PROBE_TOKENS:
        return None
    back = 0
    while back < min(len(old), end) - common and old[len(old) - 1 - back] == new[end - 1 - back]:
        back += 1
    old_end, new_end = len(old) - back, end - back
    if back < 2 * _PROBE_TOKENS or old_end < common or new_end < common:
        return None
    return Seam(old_end, tuple(new[:new_end]))


def _last_end(tokens: list[int], wanted: list[int]) -> int:
    """Where the last occurrence of the wanted tokens ends; 0 if there is none."""
    whole, part = array("q", tokens), array("q", wanted)
    data, probe, limit = whole.tobytes(), part.tobytes(), len(whole) * whole.itemsize
    while (at := data.rfind(probe, 0, limit)) >= 0:
        if at % whole.itemsize == 0:
            return at // whole.itemsize + len(wanted)
        limit = at + len(probe) - 1
    return 0
