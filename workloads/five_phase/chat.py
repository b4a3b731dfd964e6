"""Chat tenants: conversations whose every turn carries all the turns before it.

Arrivals are Poisson; each is the next turn of the open conversation that has been ready for
longest, or the first of a new one. A history is made of the questions and the true outputs of the
same conversation, so a later turn's prompt begins with an earlier turn's prompt and answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from workloads.five_phase import phrases
from workloads.five_phase.arrivals import poisson_ns
from workloads.five_phase.context import ARRIVALS, CONTENT, Context
from workloads.five_phase.draft import Draft, Part, frozen
from workloads.five_phase.phases import NS_PER_S, SWITCH_PHASE
from workloads.five_phase.randomness import draw_length
from workloads.five_phase.tenants import TenantSpec
from workloads.request import Phase, TokenIds

MAX_HISTORY_TURNS = 6
# A conversation enters with up to this many turns: it began before anybody looked.
MAX_EARLIER_TURNS = 4
# Seconds between a turn and the user's next one, uniform.
THINK_S = (4.0, 12.0)
SWITCHING_TENANT = "gold-a"
CANARY_SHARE = 0.1


def prompt_version(tenant: str, phase: Phase, now_ns: int, canary: bool) -> str:
    """Which system prompt a turn is sent with. All but one tenant keep theirs.

    In the switch's first half only the canaries, a tenth of the conversations, have the new one;
    from the middle on everybody has it, conversations under way included.
    """
    if tenant != SWITCHING_TENANT or phase.number < SWITCH_PHASE:
        return "v1"
    switched = phase.number > SWITCH_PHASE or now_ns >= (phase.start_ns + phase.end_ns) // 2
    return "v2" if switched or canary else "v1"


class Speech:
    """Draws sentences from a bank of tokenised ones."""

    def __init__(self, context: Context, sentences: list[str]) -> None:
        self._bank = [context.encode(sentence) for sentence in sentences]
        self._shortest = min(map(len, self._bank))

    def compose(self, rng: np.random.Generator, length: int) -> TokenIds:
        """Sentences in random order, cut to exactly `length` tokens."""
        chosen = rng.integers(len(self._bank), size=length // self._shortest + 1)
        words: TokenIds = np.concatenate([self._bank[i] for i in chosen.tolist()])
        return words[:length]


@dataclass(slots=True)
class Conversation:
    """One user's conversation: its turns so far, and how many it will have."""

    name: str
    canary: bool
    last_history: int
    turns: list[Part] = field(default_factory=list)


class Chat:
    """Writes one tenant's requests in one phase."""

    def __init__(self, context: Context, tenant: TenantSpec, phase: Phase) -> None:
        domain = phrases.CHAT[tenant.name]
        self._context, self._tenant, self._phase = context, tenant, phase
        self._rng = context.stream(tenant, CONTENT, phase.number)
        self._questions = Speech(context, domain.expand(domain.questions))
        self._answers = Speech(context, domain.expand(domain.answers))
        self._systems = {version: context.system_part(tenant, domain, version) for version in ("v1", "v2")}
        self._user, self._assistant = context.encode(phrases.USER), context.encode(phrases.ASSISTANT)
        self._begun = 0

    def drafts(self, rate_rps: float) -> Iterator[Draft]:
        """All requests of the phase, in order of their send times."""
        waiting: list[tuple[int, int, Conversation]] = []
        arrivals = self._context.stream(self._tenant, ARRIVALS, self._phase.number)
        for order, now_ns in enumerate(poisson_ns(arrivals, rate_rps, self._phase)):
            if waiting and waiting[0][0] <= now_ns:
                conversation = heapq.heappop(waiting)[2]
            else:
                conversation = self._begin()
            question, answer = self._question(conversation), self._answer()
            version = prompt_version(self._tenant.name, self._phase, now_ns, conversation.canary)
            yield Draft(
                tenant=self._tenant.name,
                phase=self._phase.number,
                intended_ns=now_ns,
                parts=(self._systems[version], *conversation.turns, question),
                output=answer,
                session=conversation.name,
            )
            if len(conversation.turns) < conversation.last_history:
                self._remember(conversation, question, answer)
                ready_ns = now_ns + round(float(self._rng.uniform(*THINK_S)) * NS_PER_S)
                heapq.heappush(waiting, (ready_ns, order, conversation))

    def _begin(self) -> Conversation:
        """A conversation with the turns that it had before it came here."""
        self._begun += 1
        earlier = int(self._rng.integers(1, MAX_EARLIER_TURNS + 1))
        conversation = Conversation(
            name=f"{self._tenant.name}/p{self._phase.number}/{self._begun}",
            canary=bool(self._rng.random() < CANARY_SHARE),
            last_history=int(self._rng.integers(earlier, MAX_HISTORY_TURNS + 1)),
        )
        for _ in range(earlier):
            self._remember(conversation, self._question(conversation), self._answer())
        return conversation

    def _question(self, conversation: Conversation) -> Part:
        """The user's words and the cue for the answer; the first of a conversation names its case."""
        length = draw_length(self._rng, self._context.scaled(self._tenant.question_tokens))
        pieces = [self._user]
        if not conversation.turns:
            # No two conversations begin alike, so they share nothing beyond the system prompt.
            case = int(self._rng.integers(10**8, 10**9))
            pieces.append(self._context.encode(phrases.REFERENCE.format(case)))
        pieces += [self._questions.compose(self._rng, length), self._assistant]
        name = f"{conversation.name}/{len(conversation.turns) + 1}"
        return Part("question", name, frozen(np.concatenate(pieces)))

    def _answer(self) -> TokenIds:
        length = draw_length(self._rng, self._context.scaled(self._tenant.output_tokens))
        return frozen(self._answers.compose(self._rng, length))

    @staticmethod
    def _remember(conversation: Conversation, question: Part, answer: TokenIds) -> None:
        """A question and its true answer become the next turn of the history."""
        conversation.turns.append(Part("turn", question.name, frozen(np.concatenate([question.ids, answer]))))
