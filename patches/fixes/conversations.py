"""One tenant's conversations under one prompt: which are under way, and do they go over to another prompt?

A conversation that had the settled prompt and goes on under another says far more than a request that merely has another:
a canary's users keep the prompt that they began with, so before a switch hardly any conversation changes its prompt, and
after it all do.

Only products of fractions decide, so every machine decides alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from patches.fixes.rebase import Prompt, Seam, find_seam_of_turns

# Conversations remembered, how many times in a row it is tried to find how prompts changed, and in one such try how many
# turns, the latest first, a prompt is searched for whose last tokens all occur in it.
_MOST_CONVERSATIONS = 64
_MOST_TRIES = 64
_MOST_SEARCHES = 32
# What a conversation begins with, beyond the system prompt's whole blocks, to tell it from others.
_TOLD_BY_TOKENS = 48
# Share of conversations that go over under a switch, and what is taken for their usual share at least and at most.
_NEARLY_ALL = 0.9
_LEAST_SHARE = 0.01
_MOST_SHARE = 0.8

#: Tokens to compute, and their cache salt.
Computed = tuple[list[int], str | None]


class Turn:
    """A prompt and its answer, as far as it is there, and when that ended (None: it has not).

    `own` is its first block beyond the system prompt, `begins` where that block begins, in tokens.
    """

    __slots__ = ("begins", "computed_for", "ended_s", "own", "prompt_tokens", "salt", "session", "tokens")

    def __init__(self, own: bytes, begins: int, request: Any) -> None:
        self.own, self.begins = own, begins
        # The request's own list: it grows with the answer.
        self.tokens: list[int] = request._all_token_ids
        self.prompt_tokens = int(request.num_prompt_tokens)
        self.session, self.salt = request.session_id, request.cache_salt
        self.ended_s: float | None = None
        # The branch under whose prompt it was asked for.
        self.computed_for: bytes | None = None


class Conversations:
    """The latest turns under one prompt, and the odds that conversations leave it these days.

    Attributes:
        odds: how much likelier it is that nearly all go over now than that no more do than usual.
    """

    def __init__(self) -> None:
        # By their first block beyond the prompt.
        self._ended: OrderedDict[bytes, Turn] = OrderedDict()
        # By the request's id.
        self._running: dict[str, Turn] = {}
        # How the prompt of a branch is put in place of this one.
        self._seam: tuple[bytes, Seam] | None = None
        self._tries = 0
        self._stayed = self._left = 0
        self._last_end_s = float("-inf")
        self.odds = 1.0

    # turns

    def began(self, own: bytes, begins: int, request: Any) -> None:
        """A turn under this prompt came; see `Turn`."""
        if self._ended.pop(own, None) is not None or any(turn.own == own for turn in self._running.values()):
            usual = self._usual()
            self._stayed += 1
            self.odds = max(1.0, self.odds * (1 - _NEARLY_ALL) / (1 - usual))
        # Canaries use up tries for nothing; what they use comes back with those that are none.
        self._tries = max(0, self._tries - 1)
        if len(self._running) < _MOST_CONVERSATIONS:
            self._running[request.request_id] = Turn(own, begins, request)

    def knows(self, request: Any) -> bool:
        """Whether it is a turn that began here and has not ended."""
        return request.request_id in self._running

    def ended(self, request: Any, own: bytes | None, begins: int, now: float) -> Computed | None:
        """A request ended: the rest of what its conversation will go on from under another prompt, if `move` told of it.

        Args:
            own, begins: as of a `Turn`, if it has both; one that was not seen to begin counts with them.
        """
        turn = self._running.pop(request.request_id, None)
        if turn is None:
            if own is None:
                return None
            turn = Turn(own, begins, request)
        turn.ended_s = self._last_end_s = now
        self._ended[turn.own] = turn
        self._ended.move_to_end(turn.own)
        if len(self._ended) > _MOST_CONVERSATIONS:
            self._ended.popitem(last=False)
        seam = None if turn.computed_for is None else self.seam(turn.computed_for)
        return None if seam is None else (seam.rebased(turn.tokens, turn.prompt_tokens), turn.salt)

    def forget(self, request: Any) -> None:
        """A request ended of which nothing is to be remembered."""
        self._running.pop(request.request_id, None)

    def are_over(self, now: float, longest_s: float) -> bool:
        """Whether none is being answered or has been within `longest_s`: `move` and `ended` have nothing more to tell."""
        return not self._running and now - self._last_end_s > longest_s

    # going over

    def went_over(self, request: Any, branch: bytes, common_tokens: int) -> bool:
        """A request came under another prompt, that of `branch`: does a conversation of these go on with it?

        Args:
            common_tokens: tokens that both prompts begin with.
        """
        turn = self._found(request, branch, common_tokens)
        if turn is None:
            return False
        # It has come back by itself: nothing is owed to it.
        self._ended.pop(turn.own, None)
        for request_id, each in list(self._running.items()):
            if each.own == turn.own:
                del self._running[request_id]
        usual = self._usual()
        self._left += 1
        self.odds *= _NEARLY_ALL / usual
        return True

    def seam(self, branch: bytes) -> Seam | None:
        """How that branch's prompt is put in place of this one; None before one has shown it."""
        return self._seam[1] if self._seam is not None and self._seam[0] == branch else None

    def move(self, branch: bytes, now: float, longest_s: float) -> Iterator[Computed]:
        """What these will go on from under the prompt of a branch whose seam is known, each once; the longest silent first.

        Those whose answer ended longer than `longest_s` ago are left out. Of those that are being answered it is the
        prompt, and `ended` tells of the rest.
        """
        self.odds = 1.0
        seam = self.seam(branch)
        for turn in (*self._ended.values(), *self._running.values()):
            if seam is None or turn.computed_for == branch:
                continue
            if turn.ended_s is None:
                turn.computed_for = branch
                yield seam.rebased(turn.tokens[: turn.prompt_tokens], turn.prompt_tokens), turn.salt
            elif now - turn.ended_s <= longest_s:
                turn.computed_for = branch
                yield seam.rebased(turn.tokens, turn.prompt_tokens), turn.salt

    # inside

    def _usual(self) -> float:
        total = self._left + self._stayed
        return min(max(self._left / total if total else 0.0, _LEAST_SHARE), _MOST_SHARE)

    def _found(self, request: Any, branch: bytes, common_tokens: int) -> Turn | None:
        if request.prompt_token_ids is None:
            return None
        seam = self.seam(branch)
        candidates = [
            turn
            for turn in (*reversed(self._ended.values()), *reversed(self._running.values()))
            if not request.session_id or turn.session == request.session_id
        ]
        if seam is not None:
            return next((turn for turn in candidates if _goes_on(turn, seam, request.prompt_token_ids)), None)
        if not candidates or self._tries >= _MOST_TRIES:
            return None
        self._tries += 1
        prompt, searches = Prompt(request.prompt_token_ids), 0
        for turn in candidates:
            ends = len(turn.tokens), turn.prompt_tokens
            if not any(prompt.may_have(turn.tokens, end) for end in ends):
                continue
            searches += 1
            if searches > _MOST_SEARCHES:
                break
            seam = find_seam_of_turns(turn.tokens, turn.prompt_tokens, prompt, common_tokens)
            if seam is not None:
                self._seam = (branch, seam)
                return turn
        return None


def _goes_on(turn: Turn, seam: Seam, prompt: list[int]) -> bool:
    """Whether the prompt has the conversation in it. Both prompts may end alike, so it is told by what lies behind them."""
    begins = max(turn.begins, seam.old_end)
    start = turn.tokens[begins : begins + _TOLD_BY_TOKENS]
    at = begins - seam.old_end + len(seam.head)
    return len(start) == _TOLD_BY_TOKENS and prompt[at : at + _TOLD_BY_TOKENS] == start
