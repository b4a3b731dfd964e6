"""`shield` on the real Scheduler: whose prefixes survive, what it counts, and that nothing of it is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from patches.kv.needs import Needs
from patches.kv.shield import PATCH, Returns, ShieldKnobs
from patches.kv.zones import ZonedFreeQueue
from tests.drive import free_blocks, make_config, make_request, make_scheduler, run_to_end
from tests.kv.test_kv_segments import Block
from tests.scheduling.clocked import installed, patched, prompt, serve

BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


def block(name: bytes) -> Any:
    return Block(1, block_hash=name + bytes(4))


# needs


def test_worth_lies_between_two_and_four_and_rises_with_need() -> None:
    needs = Needs()
    a, b, c = (bytes([i]) * 32 for i in range(3))
    assert not needs.any() if hasattr(needs, "any") else not needs
    needs.add("one", (a, b), 16)
    needs.add("two", (a, c), 48)
    worths = [needs(block(name)) for name in (a, c, b)]
    assert 2 < worths[2] < worths[1] < worths[0] < 4
    assert needs(block(bytes(31) + b"x")) == needs(Block(0)) == 0
    assert needs.remove("one") == (a, b)
    assert needs(block(b)) == 0
    assert needs(block(a)) == needs(block(c)) == worths[1]
    needs.add("two", (a,), 1)
    assert set(needs) == {a}
    assert needs.remove("nobody") == ()
    needs.remove("two")
    assert not needs and not needs._by_whom


def test_the_chance_to_come_back_is_the_tenants_own_and_few_are_remembered() -> None:
    returns = Returns()
    assert returns.likelihood("a") == 1
    for _ in range(4):
        returns.note("a", False)
        returns.note("b", True)
    assert returns.likelihood("a") == 0.5
    assert returns.likelihood("b") == 1
    for number in range(5000):
        returns.note(f"t{number}", False)
    assert len(returns._counts) == 1024
    assert returns.likelihood("a") == 1, "forgotten"


def test_knobs() -> None:
    assert all(PATCH.unit(name) for name in ShieldKnobs.model_fields)
    for bad in ({"ahead_requests": -1}, {"refresh_steps": 0}):
        with pytest.raises(ValidationError):
            ShieldKnobs(**bad)


# on the scheduler


def counted(tokens: list[dict[str, int]]) -> dict[str, int]:
    """Tokens scheduled for each request."""
    out: dict[str, int] = {}
    for step in tokens:
        for name, count in step.items():
            out[name] = out.get(name, 0) + count
    return out


def waiting_behind_documents(enable: str, async_scheduling: bool, ahead: int = 64) -> tuple[int, Any]:
    """A chat waits behind documents that fill the pool; how much of it is computed when its turn comes, and the receipt."""
    config = make_config(async_scheduling=async_scheduling, max_num_seqs=1)
    chat = prompt(1, 320)
    knobs = {"shield": {"ahead_requests": ahead, "refresh_steps": 1}} if enable else None
    with installed(enable, knobs) as installation:
        scheduler = make_scheduler(config, 81)
        free = free_blocks(scheduler)
        run_to_end(scheduler, [make_request(config, "before", chat, max_tokens=1)])
        line = [make_request(config, f"doc{i}", prompt(10 + i, 640), max_tokens=2) for i in range(4)]
        line.append(make_request(config, "chat", chat + prompt(2, 16), max_tokens=1))
        trace = run_to_end(scheduler, line)
        scheduler.schedule()
        assert free_blocks(scheduler) == free
        return counted(trace.steps)["chat"], installation.receipt()


@BOTH
def test_what_waits_in_the_queue_is_spared_from_what_is_served_before_it(async_scheduling: bool) -> None:
    assert waiting_behind_documents("", async_scheduling)[0] == 336
    computed, receipt = waiting_behind_documents("shield", async_scheduling)
    assert computed == 16
    assert receipt["metrics"]["shield"]["spared_hits"] == 20
    assert receipt["metrics"]["shield"]["needed_blocks"] == 0
    assert waiting_behind_documents("shield,slru", async_scheduling)[0] == 16
    assert waiting_behind_documents("shield", async_scheduling, ahead=2)[0] == 336, "out of its sight"


@BOTH
def test_a_preempted_request_finds_its_prefix_again_although_others_end_meanwhile(
    async_scheduling: bool,
) -> None:
    """What they free is younger, so LRU gives up the preempted one's blocks first."""

    def recomputed(enable: str) -> int:
        config = make_config(async_scheduling=async_scheduling, max_num_seqs=4, max_num_batched_tokens=512)
        knobs = {"shield": {"ahead_requests": 0}} if "shield" in enable else None
        with patched(enable, knobs) as (_, clock):
            scheduler = make_scheduler(config, 121)
            again: list[int] = []
            lost: dict[str, int] = {}
            preempt = scheduler._preempt_request
            schedule = scheduler.schedule

            def watch_preempt(request: Any, *args: Any, **kwargs: Any) -> None:
                lost[request.request_id] = request.num_computed_tokens - request.num_output_placeholders
                preempt(request, *args, **kwargs)

            def watch_schedule() -> Any:
                output = schedule()
                cached = output.scheduled_cached_reqs
                for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                    if name in cached.resumed_req_ids and name in lost:
                        again.append(max(0, lost.pop(name) - computed))
                return output

            scheduler._preempt_request, scheduler.schedule = watch_preempt, watch_schedule
            # Three grow until the last one is preempted; then one ends, and short ones are served ahead of it.
            arrivals = [(i, make_request(config, f"r{i}", prompt(i, 500), max_tokens=180)) for i in range(3)]
            serve(scheduler, clock, arrivals)
            assert again, "nothing was preempted"
            return sum(again)

    assert recomputed("shield") <= recomputed("")


@BOTH
@pytest.mark.parametrize("enable", ["shield", "shield,slru", "shield,qos,wfq"])
def test_pressure_cancels_and_preemption_leak_nothing_and_leave_no_need(
    enable: str, async_scheduling: bool
) -> None:
    config = make_config(async_scheduling=async_scheduling, max_num_seqs=16)
    shared = [prompt(seed, 64) for seed in range(3)]
    with patched(enable, {"shield": {"ahead_requests": 8, "refresh_steps": 1}}) as (installation, clock):
        scheduler = make_scheduler(config, 60)
        arrivals = [
            (
                i // 2,
                make_request(
                    config,
                    f"r{i}",
                    shared[i % 3] + prompt(100 + i, 20 + 37 * (i % 5)),
                    max_tokens=40,
                    tenant=f"t{i % 3}",
                ),
            )
            for i in range(60)
        ]
        serve(scheduler, clock, arrivals, [(20 + i, f"r{3 * i}") for i in range(20)])
        scheduler.schedule()
        metrics = installation.receipt()["metrics"]["shield"]
        assert metrics["needed_blocks"] == metrics["spared_blocks"] == 0
        assert metrics["preempted_tokens"] >= metrics["recomputed_tokens"] > 0
        queue = scheduler.kv_cache_manager.block_pool.free_block_queue
        assert isinstance(queue, ZonedFreeQueue)
        assert free_blocks(scheduler) == len(queue.get_all_free_blocks())


def test_a_step_in_which_the_head_of_the_queue_stays_costs_no_look_however_long_it_is() -> None:
    config = make_config(max_num_seqs=1)
    with patched("shield", {"shield": {"refresh_steps": 1}}):
        scheduler = make_scheduler(config, 81)
        for i in range(100):
            scheduler.add_request(make_request(config, f"r{i}", prompt(i, 40), max_tokens=30))
        looks = count_looks(scheduler)
        counts: list[tuple[int, int]] = []
        run_to_end(scheduler, each=lambda step, sched: counts.append((step, len(looks))), max_steps=20_000)
        # A request takes 30 steps, and only when one has left the queue is there anything to see.
        assert len(looks) <= len(counts) / 15
        assert max(looks) == 64


def count_looks(scheduler: Any) -> list[int]:
    """A list that grows with the number of requests of each look at the queue."""
    from patches.seam.runtime import RUNTIME_ATTR

    runtime = scheduler.__dict__[RUNTIME_ATTR]
    original: Callable[[int], list[Any]] = runtime.first_waiting
    looks: list[int] = []

    def first_waiting(most: int) -> list[Any]:
        found = original(most)
        looks.append(len(found))
        return found

    runtime.first_waiting = first_waiting
    return looks


def test_nothing_is_left_after_undo() -> None:
    from vllm.v1.core import block_pool, sched
    from vllm.v1.core.sched.scheduler import Scheduler

    owners = (Scheduler, block_pool.BlockPool, block_pool, sched)
    before = [dict(vars(owner)) for owner in owners]
    with installed("shield"):
        assert isinstance(block_pool.BlockPool(4, True, 16).free_block_queue, ZonedFreeQueue)
    assert [dict(vars(owner)) for owner in owners] == before
    assert not isinstance(block_pool.BlockPool(4, True, 16).free_block_queue, ZonedFreeQueue)
