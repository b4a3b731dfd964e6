"""Guards the Retry-After of vLLM's own refusals: from the pace of what was answered, and only where it is asked for."""

from __future__ import annotations

import json

import pytest

from patches.front.middleware import Front
from patches.front.pace import Pace
from patches.seam.endings import MAX_RETRY_AFTER_S
from tests.front.driven import Recorder, call, part, start

BUSY = json.dumps({"error": {"message": "busy", "type": "x", "param": None, "code": 503}}).encode()


class Clock:
    """Stands until it is moved."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("per_s", "refused", "least_s", "most_s"), [(2, 10, 4, 6), (10, 5, 1, 1), (1, 60, 40, 65)]
)
def test_it_is_the_time_in_which_so_many_places_become_free(
    per_s: int, refused: int, least_s: int, most_s: int
) -> None:
    clock = Clock()
    pace = Pace(clock)
    for _ in range(30 * per_s):
        clock.now_s += 1 / per_s
        pace.served()
    told = [pace.refused() for _ in range(refused)]
    assert told == sorted(told) and told[0] == 1
    assert least_s <= told[-1] <= most_s
    # Who was told to come again is forgotten, and so is a pace that is over.
    clock.now_s += 1_000
    pace.served()
    assert pace.refused() <= MAX_RETRY_AFTER_S


def test_nothing_is_known_at_first_and_nothing_is_said_without_bound() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.refused() == 1
    clock.now_s += 1
    pace.served()
    clock.now_s += 1
    assert max(pace.refused() for _ in range(10_000)) == MAX_RETRY_AFTER_S


@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_of_vllm_says_when_to_come_again(stream: bool) -> None:
    answer = (
        (start(200), part(b"data: " + BUSY + b"\n\n"), part(b"", more=False))
        if stream
        else (start(503, b"application/json"), part(BUSY[:5]), part(BUSY[5:], more=False))
    )
    answered = call(Front(Recorder(*answer), paced=True))
    assert answered.status == 503 and answered.headers["retry-after"] == "1"
    assert answered.error == {**json.loads(BUSY)["error"], "retry_after_s": 1}
    assert "retry-after" not in call(Front(Recorder(*answer))).headers


def test_what_is_served_sets_the_pace() -> None:
    """Streams and whole answers count, refusals do not."""
    answers = [
        (start(200), part(b"data: {}\n\n"), part(b"", more=False)),
        (start(200, b"application/json"), part(b"{}", more=False)),
        (start(503, b"application/json"), part(BUSY, more=False)),
    ]
    app = Recorder()
    front = Front(app, paced=True)
    for answer in answers:
        app.answer = answer
        call(front)
    assert front._pace is not None
    assert round(front._pace._served) == 2 and round(front._pace._refused) == 1
