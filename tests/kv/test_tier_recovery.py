"""Guards what of a recovery counts as load, as wait for the GPU and as step, and when a request has recovered.

Not here: that the times are those of a real schedule (tests/kv/test_tier_virtual.py).
"""

from __future__ import annotations

import pytest

from patches.kv.tiers.recovery import PARTS, Recoveries


def parts(recoveries: Recoveries) -> dict[str, float]:
    """The one recovery that there was, ms."""
    return {part: round(recoveries.ms(part)[1], 6) for part in PARTS}


@pytest.fixture
def lost() -> Recoveries:
    """One request that lost 100 tokens; its last pass is over by 0.9 s."""
    recoveries = Recoveries()
    recoveries.on_preempt("a", 100)
    # It was in a pass when it was preempted.
    recoveries.on_pass_ended({"a": 1, "b": 1}, 0.9)
    assert recoveries
    return recoveries


def test_a_load_that_holds_up_its_pass(lost: Recoveries) -> None:
    lost.on_load_within_step("a", 0.02)
    lost.on_pick("a", 96, 1.0)
    lost.on_scheduled({"a": 5, "b": 1}, 1.0)
    lost.on_pass_ended({"b": 1}, 1.05)
    lost.on_pass_ended({"a": 5, "b": 1}, 1.13)
    assert parts(lost) == {"recovery": 130, "own": 80, "restore": 20, "behind": 50, "step": 60}
    assert not lost
    assert lost.recomputed_tokens == 4


def test_a_load_beside_passes(lost: Recoveries) -> None:
    lost.on_pick("a", 96, 1.0)
    lost.on_pass_ended({"b": 1}, 1.05)
    lost.on_scheduled({"a": 5, "b": 1}, 1.2)
    lost.on_pass_ended({"a": 5, "b": 1}, 1.26)
    assert parts(lost) == {"recovery": 260, "own": 260, "restore": 200, "behind": 0, "step": 60}


def test_one_that_was_in_prefill_is_back_when_it_is_further_than_it_was(lost: Recoveries) -> None:
    """What its prompt had left was no loss; but a pass that only makes up for the loss is not the end."""
    lost.on_pick("a", 64, 1.0)
    lost.on_scheduled({"a": 36}, 1.0)
    lost.on_pass_ended({"a": 36}, 1.1)
    assert lost
    lost.on_pass_ended({"a": 64}, 1.3)
    assert parts(lost)["step"] == 300
    assert not lost


def test_preempted_again_on_the_way_back_and_gone(lost: Recoveries) -> None:
    lost.on_pick("a", 0, 1.0)
    lost.on_scheduled({"a": 16}, 1.0)
    lost.on_pass_ended({"a": 16}, 1.1)
    lost.on_preempt("a", 16)
    assert (lost.preempted, lost.lost_tokens) == (2, 100)
    # It got no further than 16 of the 100.
    assert lost.recomputed_tokens == 16
    lost.on_pick("a", 16, 1.2)
    assert lost.recomputed_tokens == 100
    lost.forget("a")
    assert not lost
    assert parts(lost)["recovery"] == 0
