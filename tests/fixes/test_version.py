"""`version`: the detector alone, then on real Schedulers; the five phases' own prompts. Not here: what it is worth."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest

from patches.fixes.rebase import Prompt, find_seam, find_seam_of_turns
from patches.fixes.trunks import Trunk
from patches.fixes.version import Versions, _Tenant
from patches.seam import adapter
from patches.seam.own import OwnPrefix, is_own_id
from tests.drive import cancel, free_blocks, make_config, make_request, make_scheduler
from tests.kv.test_warmup import cached, run_some
from tests.scheduling.clocked import installed, patched, prompt

BOTH = pytest.mark.parametrize("async_scheduling", [False, True])


def trunk(**more: Any) -> Trunk:
    knobs = {"settle_s": 30.0, "settle_requests": 20, "evidence_times": 50_000.0, "most_blocks": 64}
    return Trunk(**(knobs | more))


def chain(*names: str) -> list[bytes]:
    """Block hashes as upstream makes them: each stands for all before it."""
    made, whole = [], ""
    for name in names:
        whole += f"/{name}"
        made.append(whole.encode())
    return made


def settled(one: Trunk, begin: float = 0.0) -> float:
    """Let a trunk `s1 s2 v1` settle; the time afterwards."""
    for i in range(40):
        assert one.see(chain("s1", "s2", "v1", f"c{i}", "x"), begin + i) is None
    assert one.blocks == tuple(chain("s1", "s2", "v1"))
    return begin + 40


# the detector


def test_a_whole_switch_is_certain_after_five_requests() -> None:
    one = trunk()
    now = settled(one)
    found = [one.see(chain("s1", "s2", "v2", "w2", f"d{i}"), now + i) for i in range(5)]
    assert found[:4] == [None] * 4
    switch = found[4]
    assert switch is not None
    assert switch.common == 2
    assert switch.old == tuple(chain("s1", "s2", "v1"))
    assert switch.new == tuple(chain("s1", "s2", "v2", "w2"))
    assert one.blocks == switch.new
    # And back: a rollback is a switch like any other.
    back = [one.see(chain("s1", "s2", "v1", f"e{i}"), now + 10 + i) for i in range(12)]
    assert [each is not None for each in back].index(True) == 4


def test_one_who_knows_may_say_so() -> None:
    one = trunk()
    now = settled(one)
    switch = one.see(chain("s1", "s2", "v2", "w2", "c"), now, announced=True)
    assert switch is not None
    assert switch.new == tuple(chain("s1", "s2", "v2"))
    # What is no other prompt cannot be announced.
    assert one.see(chain("s1", "s2", "v2", "w2", "c"), now, announced=True) is None
    for i in range(20):
        assert one.see(chain("s1", "s2", "v2", "w2", f"d{i}"), now + i) is None
    # In time it is known how far the new one reaches.
    assert one.blocks == tuple(chain("s1", "s2", "v2", "w2"))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), share=st.sampled_from([0.02, 0.1, 0.25, 0.5]))
def test_a_canary_is_no_switch_and_its_end_is_one(seed: int, share: float) -> None:
    """A branch's steady share is not taken for a switch, whatever it is; when all follow, it is within 60 requests.

    With far more evidence asked for than by default: else chance would show in as many examples as these.
    """
    rng, one = random.Random(seed), trunk(evidence_times=1e9)
    now = settled(one)
    for i in range(150):
        version = "v2" if rng.random() < share else "v1"
        # Before there is any history the least share is assumed: more than that, at once, looks like a switch.
        if share > 0.1 and i < 60:
            version = "v2" if i % round(1 / share) == 0 else "v1"
        assert one.see(chain("s1", "s2", version, f"d{i}"), now + i) is None
    took = next(
        (i for i in range(80) if one.see(chain("s1", "s2", "v2", f"e{i}"), now + 200 + i) is not None), None
    )
    assert took is not None
    assert took < 60


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    documents=st.integers(1, 40),
    run=st.integers(1, 60),
    system=st.integers(1, 3),
)
def test_what_lies_beyond_the_trunk_is_never_a_switch(
    seed: int, documents: int, run: int, system: int
) -> None:
    """Documents of changing popularity, files that are open for `run` requests, short prompts: no switch."""
    rng, one = random.Random(seed), trunk()
    heads = [f"s{i}" for i in range(system)]
    document, now = "d0", 0.0
    # Not one document alone until the trunk is settled: then it could not be told from a prompt.
    order = [f"d{i % max(2, documents)}" for i in range(30)]
    for i in range(600):
        if i < 30:
            document = order[i]
        elif rng.random() < 1 / run:
            document = f"d{rng.randrange(documents + 30)}"
        parts = [*heads, document, f"{document}.2", f"q{i}"][: rng.choice([system - 1, system, 9, 9, 9])]
        assert one.see(chain(*parts), now) is None
        now += rng.expovariate(2.0)
        assert len(one._branches) <= 8


def test_a_tenant_without_a_common_beginning_has_no_trunk() -> None:
    one, rng = trunk(), random.Random(3)
    for i in range(500):
        assert one.see(chain(f"x{rng.randrange(50)}", f"y{i}"), float(i)) is None
        assert not one.blocks


# where prompts part and meet


@given(
    old=st.integers(0, 40),
    new=st.integers(0, 40),
    common=st.integers(0, 20),
    tail=st.integers(30, 120),
    question=st.integers(0, 20),
)
def test_the_seam_is_found_to_the_token(old: int, new: int, common: int, tail: int, question: int) -> None:
    rng = random.Random(old * 7919 + new * 31 + common + tail)
    draw = iter(rng.sample(range(10_000), old + new + common + tail + question + 150))

    def some(count: int) -> list[int]:
        return [next(draw) for _ in range(count)]

    head, v1, v2, turns = some(common), some(old), some(new), some(tail)
    old_turn = head + v1 + turns
    seam = find_seam(old_turn, len(old_turn), Prompt(head + v2 + turns + some(question)), common)
    if tail < 48:
        assert seam is None
        return
    assert seam is not None
    assert seam.old_end == common + old
    assert list(seam.head) == head + v2
    other = some(15)
    assert seam.rebased(head + v1 + other, 3) == head + v2 + other
    # An answer that does not come back as it was is left out.
    answered = [*head, *v1, *turns, *some(30)]
    edited = find_seam_of_turns(answered, len(answered) - 30, Prompt(head + v2 + turns + [1] * 9), common)
    assert edited is not None
    assert not edited.answers
    assert edited.rebased([*head, *v1, 5, 6, 7, 8], len(head + v1) + 2) == [*head, *v2, 5, 6]


def test_another_conversation_has_no_seam() -> None:
    assert find_seam(prompt(1, 200), 200, Prompt(prompt(2, 300)), 0) is None


# on the scheduler

SYSTEM = {"v1": prompt(1, 300), "v2": prompt(1, 100) + prompt(2, 210)}


class Chats:
    """Conversations of one tenant: each turn is the system prompt, the turns before and a new question."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._turns: dict[int, list[int]] = {}
        self._count = 0

    def turn(self, conversation: int, version: str) -> Any:
        """The conversation's next request."""
        self._count += 1
        history = self._turns.setdefault(conversation, prompt(1000 + conversation, 80))
        question = prompt(5000 + self._count, 20)
        # The tests' model says 7.
        self._turns[conversation] = [*history, *question, *[7] * 4]
        return make_request(
            self._config,
            f"{version}.{self._count}",
            SYSTEM[version] + history + question,
            max_tokens=4,
            tenant="a",
        )


@pytest.fixture(params=[False, True])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any, Any, Chats]]:
    """Ten conversations that have had three turns each under v1, over forty seconds."""
    config = make_config(async_scheduling=request.param)
    with patched("version,slru", {"version": {"settle_requests": 20}}) as (installation, clock):
        scheduler = make_scheduler(config, 900)
        chats = Chats(config)
        for i in range(30):
            scheduler.add_request(chats.turn(i % 10, "v1"))
            run_some(scheduler, None)
            clock.advance_to(clock.now_ns + 1_400_000_000)
        yield installation, clock, scheduler, chats


def test_conversations_are_computed_under_the_new_prompt(served: tuple[Any, Any, Any, Chats]) -> None:
    installation, _, scheduler, chats = served
    start = free_blocks(scheduler)
    steps = []
    for i in range(5):
        scheduler.add_request(chats.turn(i, "v2"))
        steps += run_some(scheduler, None)
    metrics = installation.receipt()["metrics"]["version"]
    assert metrics["switches"] == 1
    assert metrics["demoted_blocks"] > 50
    # Those that had come back before it was certain are among them; they cost nothing, all of theirs is there.
    assert metrics["rebased_conversations"] >= 5
    assert any(is_own_id(rid) for step in steps for rid in step)
    # The turns of the others find all but their question in the cache.
    for i in range(5, 10):
        turn = chats.turn(i, "v2")
        assert cached(scheduler, turn) >= turn.num_prompt_tokens - 20 - 4 - 16
        scheduler.add_request(turn)
        run_some(scheduler, None)
    assert free_blocks(scheduler) == start


def test_dead_blocks_go_first_and_old_ones_that_return_do_not(served: tuple[Any, Any, Any, Chats]) -> None:
    _, _, scheduler, chats = served
    old = chats.turn(9, "v1")
    for i in range(5):
        scheduler.add_request(chats.turn(i, "v2"))
        run_some(scheduler, None)
    queue = scheduler.kv_cache_manager.block_pool.free_block_queue
    dead = queue.dead_blocks
    assert dead > 50
    # What both prompts begin with was never dead.
    before = cached(scheduler, old) // 16 - 100 // 16
    scheduler.add_request(old)
    run_some(scheduler, None)
    assert queue.dead_blocks == dead - before
    # A document as large as what is dead and empty pushes out nothing else.
    runtime = adapter.runtime_of(scheduler)
    assert runtime is not None
    spare = [chats.turn(i, "v2") for i in range(5)]
    known = [cached(scheduler, each) for each in spare]
    empty = sum(1 for block in queue.get_all_free_blocks() if block.block_hash is None)
    document = prompt(77, 16 * (empty + queue.dead_blocks - 2))
    for i in range(0, len(document), 3200):
        scheduler.add_request(make_request(chats._config, f"doc{i}", document[i : i + 3200], max_tokens=1))
        run_some(scheduler, None)
    assert [cached(scheduler, each) for each in spare] == known


def test_a_hint_needs_no_evidence(served: tuple[Any, Any, Any, Chats]) -> None:
    installation, _, scheduler, chats = served
    turn = chats.turn(5, "v2")
    turn.sampling_params.extra_args["prompt_switched"] = True
    scheduler.add_request(turn)
    run_some(scheduler, None)
    metrics = installation.receipt()["metrics"]["version"]
    assert metrics["switches"] == 1
    # And that one showed how the others are to be computed: the seven that spoke since the prompt was settled.
    assert metrics["rebased_conversations"] == 7


def test_what_another_tenant_uses_is_not_dead(served: tuple[Any, Any, Any, Chats]) -> None:
    _, _, scheduler, chats = served
    other = make_request(chats._config, "other", SYSTEM["v1"] + prompt(8, 30), max_tokens=1, tenant="b")
    scheduler.add_request(other)
    run_some(scheduler, None)
    for i in range(5):
        scheduler.add_request(chats.turn(i, "v2"))
        run_some(scheduler, None)
    pool = scheduler.kv_cache_manager.block_pool
    shared = list(other.block_hashes[:18])
    runtime = adapter.runtime_of(scheduler)
    assert runtime is not None
    blocks = [pool.get_cached_block(each, [0])[0] for each in shared]
    assert all(runtime.worth(block) == 0 for block in blocks)


def test_nothing_is_left_after_undo() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    before = dict(vars(Scheduler))
    with installed("version,cancel"):
        assert dict(vars(Scheduler)) != before
    assert dict(vars(Scheduler)) == before


@pytest.mark.parametrize("rate_scale", [0.08, 0.5])
def test_no_false_switch_in_the_five_phases_and_the_one_there_is(rate_scale: float) -> None:
    """The workload's own prompts, by the detector alone: gold-a, in phase 2's second half, and nobody else."""
    from workloads.five_phase.build import build

    workload = build(1, rate_scale=rate_scale)
    tenants: dict[str, Trunk] = {}
    found: list[tuple[str, float]] = []
    for each in workload.requests:
        hashes = _hashes(each.prompt[: 16 * 64].tolist(), min(len(each.prompt) // 16, 64))
        one = tenants.setdefault(each.tenant, trunk())
        if one.see(hashes, each.intended_ns / 1e9) is not None:
            found.append((each.tenant, each.intended_ns / 1e9))
    assert [tenant for tenant, _ in found] == ["gold-a"]
    assert 90 <= found[0][1] < 90 + 8 / rate_scale


def _hashes(ids: list[int], blocks: int) -> list[bytes]:
    import hashlib

    made, digest = [], hashlib.blake2b(digest_size=12)
    for i in range(blocks):
        digest.update(repr(ids[16 * i : 16 * i + 16]).encode())
        made.append(digest.digest())
    return made


@pytest.mark.parametrize("kind", ["embeds", "lora"])
def test_a_trunk_that_no_request_of_ours_can_get_is_not_asked_for(
    served: tuple[Any, Any, Any, Chats], kind: str
) -> None:
    """Prompts without token ids, and those of an adapter: their blocks have other names than their tokens' alone."""
    installation, _, scheduler, chats = served
    turn = chats.turn(5, "v2")
    if kind == "embeds":
        turn.prompt_embeds = torch.zeros((turn.num_prompt_tokens, 8))
        turn.prompt_token_ids = None
    else:
        turn.lora_request = LoRARequest("adapter", 1, "adapter")
    turn.sampling_params.extra_args["prompt_switched"] = True
    runtime: Any = adapter.runtime_of(scheduler)
    own = runtime.injector
    asked: list[str] = []
    ask = own.ask

    def noted(prefix: OwnPrefix) -> bool:
        asked.append(prefix.name)
        return bool(ask(prefix))

    own.ask = noted
    scheduler.add_request(turn)
    assert installation.receipt()["metrics"]["version"]["switches"] == 1
    assert "a-trunk" not in asked


def test_the_trunks_own_blocks_outlive_many_branches_and_old_branches_do_not() -> None:
    tenant = _Tenant(trunk())
    tenant.used(None, [b"own"], 9)
    for i in range(100):
        tenant.used(b"%d" % i, [b"of %d" % i], 9)
    assert list(tenant.blocks[None]) == [b"own"]
    assert len(tenant.blocks) == 64
    assert list(tenant.gone_over(b"99")) == [b"own"]
    assert {name: list(known) for name, known in tenant.blocks.items()} == {None: [b"of 99"]}


def test_a_request_that_ends_with_nothing_is_forgotten_and_so_are_old_conversations(
    served: tuple[Any, Any, Any, Chats],
) -> None:
    _, clock, scheduler, chats = served
    state = _state_of(scheduler)
    waiting = chats.turn(9, "v1")
    scheduler.add_request(waiting)
    turn = chats.turn(5, "v2")
    turn.sampling_params.extra_args["prompt_switched"] = True
    scheduler.add_request(turn)
    before = state.before[0]
    assert before.knows(waiting)
    cancel(scheduler, waiting.request_id)
    assert not before.knows(waiting)
    run_some(scheduler, None)
    clock.advance_to(clock.now_ns + 10_000_000_000)
    scheduler.add_request(chats.turn(5, "v2"))
    assert state.before is not None
    run_some(scheduler, None)
    clock.advance_to(clock.now_ns + 10_000_000_000)
    scheduler.add_request(chats.turn(5, "v2"))
    assert state.before is None


def test_dead_keys_do_not_outlive_a_reset_of_the_cache(served: tuple[Any, Any, Any, Chats]) -> None:
    _, _, scheduler, chats = served
    for i in range(5):
        scheduler.add_request(chats.turn(i, "v2"))
        run_some(scheduler, None)
    dead = _versions_of(scheduler).dead
    old = chats.turn(9, "v1")
    there = len(dead.worths)
    assert there > 50
    assert scheduler.reset_prefix_cache()
    scheduler.add_request(old)
    # What that conversation has beyond what both prompts begin with.
    assert len(dead.worths) <= there - 15


def _versions_of(scheduler: Any) -> Versions:
    """The patch's state on this scheduler, through its hook."""
    runtime: Any = adapter.runtime_of(scheduler)
    return next(hook.__self__ for hook in runtime.on_add if isinstance(hook.__self__, Versions))


def _state_of(scheduler: Any) -> Any:
    return _versions_of(scheduler)._tenants["a"]
