"""`version`: conversations that go over, alone and on real Schedulers. Not here: the detector of a whole tenant's switch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from patches.fixes.conversations import Conversations
from patches.seam import adapter
from patches.seam.own import OwnPrefix, Share, is_own_id
from tests.drive import make_config, make_request, make_scheduler
from tests.fixes.test_version import Chats
from tests.kv.test_warmup import cached, run_some
from tests.scheduling.clocked import patched, prompt

# Both end alike, as prompts of one house do.
CLOSE = prompt(9, 60)
SYSTEM = {"v1": [*prompt(1, 100), *CLOSE], "v2": [*prompt(2, 130), *CLOSE]}
# The settled prompt's whole blocks.
BEGINS = 160


@dataclass
class Turn:
    """As much of a request as is looked at."""

    request_id: str
    prompt_token_ids: list[int]
    session_id: str | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        self._all_token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)


def turn(number: int, version: str, *, said: int = 1, session: str | None = None) -> Turn:
    """Conversation `number` with so many turns behind it; its opening is as everybody's, then it is its own."""
    talk = [*prompt(7, 10), *prompt(100 + number, 70)]
    for i in range(1, said):
        talk += prompt(1000 * number + i, 30)
    return Turn(f"{number}.{said}.{version}", [*SYSTEM[version], *talk], session)


def begun(conversations: Conversations, *numbers: int, ended: bool = True) -> None:
    for number in numbers:
        request = turn(number, "v1")
        conversations.began(b"%d" % number, BEGINS, request)
        if ended:
            assert conversations.ended(request, b"%d" % number, BEGINS, 1.0) is None


def test_one_conversation_that_goes_over_is_enough_where_hardly_any_does() -> None:
    conversations = Conversations()
    begun(conversations, 1, 2, 3)
    for _ in range(40):
        # It goes on under its prompt.
        begun(conversations, 1)
    assert conversations.went_over(turn(2, "v2", said=2), b"branch", 0)
    assert conversations.odds >= 50
    assert list(conversations.move(b"branch", 2.0, 15.0)) == [
        (turn(number, "v2").prompt_token_ids, None) for number in (3, 1)
    ]
    assert conversations.odds == 1
    # Each once; and none whose user has been silent for long.
    assert not list(conversations.move(b"branch", 2.0, 15.0))
    late = Conversations()
    begun(late, 1, 2)
    assert late.went_over(turn(2, "v2", said=2), b"branch", 0)
    assert not list(late.move(b"branch", 20.0, 15.0))


def test_where_users_change_their_prompt_all_the_time_one_says_little() -> None:
    conversations = Conversations()
    for i in range(30):
        begun(conversations, i, i)
        assert conversations.went_over(turn(i, "v2", said=2), b"branch", 0)
    begun(conversations, *range(40, 60), *range(40, 60))
    assert conversations.odds == 1
    assert conversations.went_over(turn(45, "v2", said=2), b"branch", 0)
    assert conversations.odds < 50


@pytest.mark.parametrize("session", [None, "new"])
def test_a_new_conversation_is_nobody_elses(session: str | None) -> None:
    """Behind the seam lies what both prompts end with, which everybody has."""
    conversations = Conversations()
    begun(conversations, 1, 2, 3)
    assert conversations.went_over(turn(2, "v2", said=2), b"branch", 0)
    for number in range(10, 20):
        assert not conversations.went_over(turn(number, "v2", session=session), b"branch", 0)
    assert conversations.went_over(turn(1, "v2", said=2), b"branch", 0)
    assert [tokens for tokens, _ in conversations.move(b"branch", 2.0, 15.0)] == [
        turn(3, "v2").prompt_token_ids
    ]


def test_of_one_that_is_being_answered_the_rest_follows_with_its_end() -> None:
    conversations = Conversations()
    begun(conversations, 1, 2)
    running = turn(5, "v1")
    conversations.began(b"5", BEGINS, running)
    assert conversations.went_over(turn(2, "v2", said=2), b"branch", 0)
    asked = [tokens for tokens, _ in conversations.move(b"branch", 2.0, 15.0)]
    assert asked == [turn(1, "v2").prompt_token_ids, turn(5, "v2").prompt_token_ids]
    running._all_token_ids += [7] * 40
    assert conversations.ended(running, None, 0, 9.0) == ([*turn(5, "v2").prompt_token_ids, *[7] * 40], None)
    # One that has come back by itself in the meantime is owed nothing.
    other = turn(6, "v1")
    conversations.began(b"6", BEGINS, other)
    assert conversations.went_over(turn(6, "v2", said=2), b"branch", 0)
    assert conversations.ended(other, None, 0, 10.0) is None


def test_canaries_do_not_use_up_the_tries() -> None:
    conversations = Conversations()
    for i in range(1, 90):
        begun(conversations, i % 5)
        assert not conversations.went_over(turn(200 + i, "v2"), b"branch", 0)
    assert conversations.went_over(turn(3, "v2", said=2), b"branch", 0)


# on the scheduler


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_first_conversation_that_goes_over_brings_the_others(async_scheduling: bool) -> None:
    """Before the switch is certain, and beside somebody's long answer in a pool that the longest prompt would fill."""
    config = make_config(async_scheduling=async_scheduling, max_model_len=8192)
    with patched("version", {"version": {"settle_requests": 20}}) as (installation, clock):
        scheduler = make_scheduler(config, 500)
        chats = Chats(config)
        for i in range(30):
            scheduler.add_request(chats.turn(i % 6, "v1"))
            run_some(scheduler, None)
            clock.advance_to(clock.now_ns + 1_400_000_000)
        scheduler.add_request(make_request(config, "long", prompt(55, 100), max_tokens=60, tenant="b"))
        scheduler.add_request(chats.turn(0, "v2"))
        steps = run_some(scheduler, None)
        assert any(is_own_id(rid) and "long" in step for step in steps for rid in step)
        metrics = installation.receipt()["metrics"]["version"]
        assert metrics["switches"] == 0
        assert metrics["rebased_conversations"] == 5
        for i in range(1, 6):
            ahead = chats.turn(i, "v2")
            assert cached(scheduler, ahead) >= ahead.num_prompt_tokens - 20 - 4 - 16


def test_a_share_says_whether_the_longest_prompt_must_fit_beside() -> None:
    config = make_config(max_model_len=8192)
    for beside_longest, tokens in ((True, 0), (False, 64)):
        with patched("warmup") as (_, _clock):
            # 8,192 tokens are 512 blocks.
            scheduler = make_scheduler(config, 500)
            runtime = adapter.runtime_of(scheduler)
            assert runtime is not None
            own: Any = runtime.injector
            share = Share(idle_tokens=64, beside_longest=beside_longest)
            assert own.ask(OwnPrefix("warmup", "x", prompt(1, 64), None, share))
            assert sum(scheduler.schedule().num_scheduled_tokens.values()) == tokens


class Counted(list[int]):
    """Tokens that count how often they are gone through."""

    times = 0

    def __iter__(self) -> Any:
        self.times += 1
        return super().__iter__()


def test_a_stray_is_gone_through_once_and_few_turns_are_searched_for_in_it() -> None:
    def with_answers(count: int) -> Conversations:
        """All answers end alike, so that each turn must be searched for."""
        conversations = Conversations()
        for number in range(count):
            request = turn(number, "v1")
            conversations.began(b"%d" % number, BEGINS, request)
            request._all_token_ids += [7] * 30
            conversations.ended(request, None, 0, 1.0)
        return conversations

    for count, found in ((30, True), (60, False)):
        goes_on = turn(0, "v2")
        # The oldest of them.
        goes_on.prompt_token_ids = Counted([*goes_on.prompt_token_ids, *[7] * 30, *prompt(77, 20)])
        assert with_answers(count).went_over(goes_on, b"branch", 0) == found
        assert goes_on.prompt_token_ids.times == 1
    # Turns whose last tokens do not even occur in it cost nothing.
    conversations = Conversations()
    begun(conversations, *range(60))
    assert conversations.went_over(turn(0, "v2", said=2), b"branch", 0)


def test_conversations_are_over_when_none_has_spoken_for_long() -> None:
    conversations = Conversations()
    assert conversations.are_over(0.0, 15.0)
    begun(conversations, 1)
    assert not conversations.are_over(16.0, 15.0)
    assert conversations.are_over(16.5, 15.0)
    begun(conversations, 2, ended=False)
    assert not conversations.are_over(99.0, 15.0)
