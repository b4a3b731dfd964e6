"""Code completion: a request with each keystroke, each cancelling the one before.

A few users edit files. A session is a word or two being typed: what is typed are the file's own
next characters, so the true output is how the file goes on. The completion of the last keystroke is
taken over, and the next session's context begins with this one's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from harness.errors import UserError
from workloads.five_phase import phrases
from workloads.five_phase.context import CONTENT, Context
from workloads.five_phase.draft import Draft, Part, frozen
from workloads.five_phase.phases import NS_PER_S
from workloads.five_phase.randomness import draw_length
from workloads.five_phase.tenants import TenantSpec
from workloads.request import Phase, TokenIds

# After each keystroke the user has had enough with this chance: 70% of the requests are then cancelled.
STOP_CHANCE = 0.3
MAX_KEYSTROKES = 12
KEYSTROKE_S = (0.2, 0.3)
PAUSE_S = (1.0, 2.0)
# Sessions between two rests. Rests are what brings a user's rate down to the one wanted.
STINT_SESSIONS = 3
MIN_USERS = 3
# How long before the phase a user begins, so that the phase finds users in the middle of anything.
LEAD_IN_CYCLES = 3
# Tokens of context when a file is opened, and when the user moves on to another.
OPENING_TOKENS = (500, 1_500)
MAX_CONTEXT_TOKENS = 2_000

_MEAN_KEYSTROKES = (1 - (1 - STOP_CHANCE) ** MAX_KEYSTROKES) / STOP_CHANCE
_MEAN_PAUSE_S = sum(PAUSE_S) / 2
_STINT_REQUESTS = STINT_SESSIONS * _MEAN_KEYSTROKES
_STINT_S = (
    STINT_SESSIONS * (_MEAN_KEYSTROKES - 1) * sum(KEYSTROKE_S) / 2 + (STINT_SESSIONS - 1) * _MEAN_PAUSE_S
)


@dataclass(frozen=True, slots=True)
class Team:
    """How many users there are, and how long one cycle of stint and rest takes each on average."""

    users: int
    cycle_s: float

    @property
    def mean_rest_s(self) -> float:
        """Mean rest between two stints: a common pause at the table's rates, more below them."""
        return self.cycle_s - _STINT_S

    @classmethod
    def for_rate(cls, rate_rps: float) -> Team:
        """The smallest team, but at least three users, that sends this many requests a second."""
        busiest_rps = _STINT_REQUESTS / (_STINT_S + _MEAN_PAUSE_S)
        users = max(MIN_USERS, math.ceil(rate_rps / busiest_rps))
        return cls(users, users * _STINT_REQUESTS / rate_rps)


def room(context: Context) -> int:
    """In how many places of the code a context of full length, and what follows it, can begin.

    Raises:
        UserError: if there is none, because the length scale is too large.
    """
    places = len(context.corpus.code.ids) - 2 * context.scaled(MAX_CONTEXT_TOKENS)
    if places <= 0:
        raise UserError(
            f"--length-scale: {context.length_scale:g} asks for completion contexts that are longer than the "
            "code there is; use a smaller one"
        )
    return places


class Editor:
    """One user's file: how much of it is in the context, and what comes next."""

    def __init__(self, context: Context, rng: np.random.Generator) -> None:
        self._context, self._rng = context, rng
        self._code = context.corpus.code
        self._limit = context.scaled(MAX_CONTEXT_TOKENS)
        self.open_file()

    def open_file(self) -> None:
        """Start somewhere else, with a fresh context."""
        opening = self._context.scaled(int(self._rng.integers(OPENING_TOKENS[0], OPENING_TOKENS[1] + 1)))
        start = int(self._rng.integers(room(self._context)))
        self.cursor = start + opening
        self.parts = [self._part("file", start, self.cursor)]

    def next_bytes(self, count: int) -> bytes:
        """What the file says next."""
        tokens = self._code.ids[self.cursor : self.cursor + count].tolist()
        return b"".join(map(self._context.corpus.tokenizer.token_bytes, tokens))[:count]

    def continuation(self, typed: int, length: int) -> TokenIds:
        """`length` tokens after the first `typed` bytes, the rest of a half-typed token first."""
        tokenizer = self._context.corpus.tokenizer
        end, covered = self.cursor, b""
        while len(covered) < typed:
            covered += tokenizer.token_bytes(int(self._code.ids[end]))
            end += 1
        rest = tokenizer.encode_bytes(covered[typed:])
        return frozen(np.concatenate([rest, self._code.ids[end : end + length]])[:length])

    def accept(self, tokens: int) -> None:
        """Take over that many of the file's next tokens; a full context is closed for another file."""
        self.parts.append(self._part("edit", self.cursor, self.cursor + tokens))
        self.cursor += tokens
        if sum(len(part.ids) for part in self.parts) > self._limit:
            self.open_file()

    def _part(self, kind: str, start: int, end: int) -> Part:
        return Part(kind, f"{self._code.name_at(start)}@{start}-{end}", self._code.ids[start:end])


class User:
    """Writes one user's requests in one phase."""

    def __init__(self, context: Context, tenant: TenantSpec, phase: Phase, number: int) -> None:
        self._context, self._tenant, self._phase = context, tenant, phase
        self._name = f"{tenant.name}/p{phase.number}/u{number}"
        self._rng = context.stream(tenant, CONTENT, phase.number, number)
        self._editor = Editor(context, self._rng)
        self._system = context.system_part(tenant, phrases.COMPLETION[tenant.name])

    def drafts(self, team: Team) -> Iterator[Draft]:
        """The user's requests within the phase, in order."""
        now_s = -(LEAD_IN_CYCLES + float(self._rng.random())) * team.cycle_s
        session = 0
        while self._time_ns(now_s) < self._phase.end_ns:
            times_s = self._keystrokes(now_s)
            if times_s[-1] >= 0:
                yield from self._session(session, [self._time_ns(time_s) for time_s in times_s])
            session += 1
            if session % STINT_SESSIONS:
                pause_s = float(self._rng.uniform(*PAUSE_S))
            else:
                pause_s = float(self._rng.uniform(PAUSE_S[0], 2 * team.mean_rest_s - PAUSE_S[0]))
            now_s = times_s[-1] + pause_s

    def _keystrokes(self, start_s: float) -> list[float]:
        """Seconds from the phase's start at which one session's keys are pressed."""
        count = min(int(self._rng.geometric(STOP_CHANCE)), MAX_KEYSTROKES)
        gaps = self._rng.uniform(*KEYSTROKE_S, size=count - 1)
        return [start_s, *(start_s + np.cumsum(gaps)).tolist()]

    def _time_ns(self, time_s: float) -> int:
        return self._phase.start_ns + round(time_s * NS_PER_S)

    def _session(self, number: int, times_ns: list[int]) -> Iterator[Draft]:
        """One request a keystroke, of those that fall within the phase."""
        start_ns, end_ns = self._phase.start_ns, self._phase.end_ns
        length = draw_length(self._rng, self._context.scaled(self._tenant.output_tokens))
        before = (self._system, *self._editor.parts)
        coming = self._editor.next_bytes(len(times_ns))
        place = before[-1].name
        following = zip(times_ns, [*times_ns[1:], None], strict=True)
        for typed, (time_ns, next_ns) in enumerate(following, start=1):
            if not start_ns <= time_ns < end_ns:
                continue
            tail = self._context.corpus.tokenizer.encode_bytes(coming[:typed])
            yield Draft(
                tenant=self._tenant.name,
                phase=self._phase.number,
                intended_ns=time_ns,
                parts=(*before, Part("typed", f"{place}+{typed}", tail)),
                output=self._editor.continuation(typed, length),
                cancel_ns=next_ns if next_ns is not None and next_ns < end_ns else None,
                session=f"{self._name}/{number}",
            )
        self._editor.accept(length)


def completion_drafts(context: Context, tenant: TenantSpec, phase: Phase, rate_rps: float) -> Iterator[Draft]:
    """All completion requests of a phase, user by user."""
    if rate_rps <= 0:
        return
    team = Team.for_rate(rate_rps)
    for number in range(team.users):
        yield from User(context, tenant, phase, number).drafts(team)
