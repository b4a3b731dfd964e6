"""Laws of the free queue on real Schedulers under `shield`, alone, with `slru`, and beside hints that change at random.

Synchronous and asynchronous, with a pool that is too small, few seats, preemptions and cancellations. Guards: blocks are
conserved, none is both free and referenced, no findable block has an unfindable parent, and all of it is undone.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given, settings

from patches.kv.zones import ZonedFreeQueue
from tests.drive import make_scheduler
from tests.scheduling.clocked import patched, serve
from tests.scheduling.test_laws import BLOCKS, TRAFFIC, Asked, config_of, requests_of
from tests.seam.toys import whims

WHIMS = "tests.seam.toys.whims"
PLANS = ("shield", "shield,slru", f"shield,slru,{WHIMS}", f"shield,{WHIMS}", "shield,slru,wfq,qos")
KNOBS: dict[str, dict[str, Any]] = {"shield": {"ahead_requests": 3, "refresh_steps": 2}}


def check_pool(scheduler: Any, requests: list[Any]) -> None:
    """The laws, as of now."""
    pool = scheduler.kv_cache_manager.block_pool
    listed = pool.free_block_queue.get_all_free_blocks()
    assert len(listed) == len({block.block_id for block in listed}) == pool.get_num_free_blocks()
    assert all(block.ref_cnt == 0 for block in listed)
    referenced = sum(1 for block in pool.blocks if block.ref_cnt > 0 and not block.is_null)
    assert referenced + len(listed) == len(pool.blocks) - 1
    for request in requests:
        findable = [pool.get_cached_block(name, [0]) is not None for name in request.block_hashes]
        assert findable == sorted(findable, reverse=True), (
            f"{request.request_id}: a block outlived its parent"
        )


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("enable", PLANS)
@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@given(drawn=TRAFFIC)
def test_laws(enable: str, async_scheduling: bool, drawn: list[Asked]) -> None:
    config = config_of(async_scheduling)
    with patched(enable, KNOBS) as (_, clock):
        asked = requests_of(config, drawn)
        scheduler = make_scheduler(config, BLOCKS)
        queue = scheduler.kv_cache_manager.block_pool.free_block_queue
        assert isinstance(queue, ZonedFreeQueue)
        requests = [request for _, request in asked.values()]

        def check(sched: Any) -> None:
            whims.change(sched, requests)
            check_pool(sched, requests)

        serve(
            scheduler,
            clock,
            [(one.arrives, request) for one, request in asked.values()],
            [
                (one.arrives + one.cancelled_after, name)
                for name, (one, _) in asked.items()
                if one.cancelled_after is not None
            ],
            check=check,
        )
        check_pool(scheduler, requests)


def test_the_law_of_chains_holds_for_vllms_own_queue_and_can_fail() -> None:
    """Without patches too; and a queue that gives up heads first is caught."""

    @settings(max_examples=3, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(drawn=TRAFFIC)
    def run(drawn: list[Asked]) -> None:
        config = config_of(False)
        with patched("") as (_, clock):
            asked = requests_of(config, drawn)
            scheduler = make_scheduler(config, BLOCKS)
            pool = scheduler.kv_cache_manager.block_pool
            original = pool.free_block_queue.append_n
            if wrong:
                pool.free_block_queue.append_n = lambda blocks: original(blocks[::-1])
            requests = [request for _, request in asked.values()]
            serve(
                scheduler,
                clock,
                [(one.arrives, request) for one, request in asked.values()],
                check=lambda sched: check_pool(sched, requests),
            )

    wrong = False
    run()
    wrong = True
    with pytest.raises(AssertionError, match="outlived its parent"):
        run()
