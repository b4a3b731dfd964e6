"""Guards `wfq`'s arithmetic: charges, lifts, refunds, what a running prefill leaves.

On plain objects around the adapter's real queue of tenants. Not here: that vLLM calls the hooks as
assumed, and fairness over a whole run (test_wfq_schedulers).
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UserError
from patches.seam.plan import resolve
from tests.scheduling.wfq_policy import Policy

# charges


def test_what_was_scheduled_is_charged_by_weight() -> None:
    policy = Policy()
    policy.run("a", 100, weight=4.0)
    policy.run("b", 100, weight=1.0)
    assert (policy.rank("a"), policy.rank("b")) == (25.0, 25.0 + 100.0 - 25.0)
    policy.serve(a=1, b=1)
    assert (policy.rank("a"), policy.rank("b")) == (25.25, 101.0)
    assert policy.gauge("wfq_charged_tokens") == 202


@pytest.mark.parametrize(("beside", "first"), [((), "b1"), (("qos",), "a1"), (("tenant",), "b1")])
def test_beside_a_patch_that_orders_requests_tenants_are_equals_within_a_grain(
    beside: tuple[str, ...], first: str
) -> None:
    """a has had 80 and b 50, of a grain of 100: exact order takes b, and within a grain the first that came."""
    policy = Policy(beside=beside, grain_tokens=100)
    policy.run("a", 50)
    policy.add("a1", 10)
    policy.add("b1", 10)
    policy.serve(a=30)
    assert policy.pick().request_id == first


def test_a_knob_sets_weights_in_place_of_the_identitys() -> None:
    policy = Policy(tenant_weight={"a": 10.0})
    policy.run("a", 100, weight=1.0)
    assert policy.rank("a") == 10.0


def test_a_weight_that_is_not_above_zero_is_refused() -> None:
    with pytest.raises(UserError, match="greater than 0"):
        resolve("wfq", knobs={"wfq": {"tenant_weight": {"a": 0.0}}})


def test_picks_of_one_pass_count_at_once_and_are_settled_by_what_was_scheduled() -> None:
    policy = Policy()
    requests = [policy.add(name, 100) for name in ("a1", "a2", "b1", "b2")]
    assert [policy.pick() for _ in range(4)] == [requests[0], requests[2], requests[1], requests[3]]
    assert policy.rank("a") == policy.rank("b") == 200.0
    policy.serve(a1=30, b1=100)
    assert (policy.rank("a"), policy.rank("b")) == (30.0, 100.0)


def test_who_was_asked_for_fewer_tokens_counts_with_those() -> None:
    """Most of the prompt is cached: the cap hook learns what would be computed just before the pick."""
    policy = Policy()
    request = policy.add("a", 1000)
    assert policy.cap(request, 40) == 40
    policy.pick()
    assert policy.rank("a") == 40.0


def test_what_is_put_back_counts_for_nothing() -> None:
    policy = Policy()
    first = policy.add("a1", 100)
    policy.add("b1", 100)
    assert policy.pick() is first
    policy.scheduler.running.remove(first)
    policy.context.queue.prepend_requests([first])
    assert policy.rank("a") == 0.0
    policy.context.queue.begin_step(1.0)
    assert policy.pick() is first


def test_tokens_computed_again_after_a_preemption_are_free() -> None:
    policy = Policy()
    request = policy.run("a", 100)
    policy.serve(a=1)
    policy.serve(a=1)
    assert policy.rank("a") == 102.0
    policy.preempt(request)
    assert policy.pick() is request
    # 40 of them are still cached, then it goes on past where it was.
    request.num_computed_tokens = 40
    policy.serve(a=50)
    assert policy.rank("a") == 102.0
    policy.serve(a=15)
    assert policy.rank("a") == 105.0
    policy.serve(a=1)
    assert policy.rank("a") == 106.0
    assert policy.gauge("wfq_recomputed_tokens") == 62


def test_rejected_drafts_are_given_back_even_in_the_last_output() -> None:
    policy = Policy()
    policy.run("other")
    request = policy.run("a", 100, weight=2.0)
    policy.serve(a=5)
    policy.update({"a": 4}, {"a": 2})
    assert policy.rank("a") == (100 + 2) / 2
    policy.serve(a=5)
    policy.finish(request)
    policy.update({"a": 4}, {"a": 1})
    assert policy.rank("a") == (100 + 3) / 2
    assert policy.gauge("wfq_refunded_tokens") == 7


def test_output_that_was_dropped_is_no_refund() -> None:
    policy = Policy()
    policy.run("a", 100)
    policy.serve(a=5)
    policy.update({"a": 4}, {})
    assert policy.rank("a") == 105.0


# lifts


def test_who_comes_back_is_lifted_to_the_least_of_those_who_want_service() -> None:
    policy = Policy()
    early = policy.run("c1", 10)
    for i in range(5):
        policy.add(f"a{i}", 100)
    for _ in range(3):
        policy.serve(**{policy.pick().request_id: 100})
    policy.finish(early)
    assert (policy.rank("a"), policy.rank("c")) == (300.0, 10.0)
    late = policy.add("c2", 100)
    assert policy.rank("c") == policy.rank("a") == 300.0
    assert policy.gauge("wfq_lifts") == 1
    # No credit for its pause: it gets its turn, not five in a row.
    for i in range(3, 6):
        policy.add(f"c{i}", 100)
    assert {policy.pick().request_id, policy.pick().request_id} == {"a3", "c2"}
    assert late in policy.scheduler.running


def test_who_comes_back_is_ahead_by_a_burst() -> None:
    """b starts 150 behind a and is as far after two requests of 100."""
    policy = Policy(burst_tokens=150)
    policy.run("a0", 600)
    for name in ("a1", "a2", "a3"):
        policy.add(name, 100)
    policy.serve(a0=1)
    first, *others = [policy.add(name, 100) for name in ("b1", "b2", "b3")]
    assert [policy.pick().request_id for _ in range(3)] == ["b1", "b2", "a1"]
    policy.serve(b1=100, b2=100, a1=100)
    # A second pause brings no second burst as long as the first is not made up for.
    before = policy.rank("b")
    for one in (first, *others):
        policy.finish(one)
    policy.add("b4", 100)
    assert policy.rank("b") == before == policy.rank("a") - 50


@pytest.mark.parametrize("beside", ["admission", "overload"])
def test_there_is_no_burst_where_lines_are_kept_short(beside: str) -> None:
    policy = Policy(beside=(beside,), burst_tokens=150)
    policy.run("a0", 600)
    policy.add("a1", 100)
    policy.add("b1", 100)
    assert policy.rank("b") == policy.rank("a")


def test_one_without_room_is_passed_by_better_classes_until_its_patience_is_over() -> None:
    policy = Policy(beside=("edf",), grain_tokens=0, room_patience_s=5.0)
    policy.run("a0", 100, weight=4.0)
    policy.scheduler.free_blocks = 10
    head = policy.add("b1", 400)
    equal, small, better = policy.add("c1", 400), policy.add("c2", 20), policy.add("a1", 20, weight=4.0)
    asked = [head, equal, small, better]

    def held(at_s: float) -> list[str]:
        assert policy.hooks.waiting_gate and policy.hooks.after_schedule
        policy.serve()
        return [r.request_id for r in asked if policy.hooks.waiting_gate(r, at_s) is not None]

    # Those of its own class stay behind it, whether they need much or little.
    assert held(1.0) == held(5.9) == ["b1", "c1", "c2"]
    # Then the scan ends at it, as long as it finds none; and as soon as there is room nobody is held.
    assert held(6.0) == held(6.05) == ["c1", "c2"]
    policy.scheduler.free_blocks = 25
    assert held(6.1) == []
    policy.scheduler.free_blocks = 10
    policy.finish(better)
    policy.finish(policy.scheduler.running[0])
    # With nobody better present there is nobody to let pass.
    asked.remove(better)
    assert held(20.0) == []


@pytest.mark.parametrize("beside", [(), ("edf", "watermark")])
def test_nobody_is_passed_where_no_classes_are_known_or_another_lets_them_pass(
    beside: tuple[str, ...],
) -> None:
    policy = Policy(beside=beside, room_patience_s=5.0)
    policy.run("a0", 100, weight=4.0)
    policy.scheduler.free_blocks = 10
    head = policy.add("b1", 400)
    policy.add("a1", 20, weight=4.0)
    assert policy.hooks.waiting_gate
    assert policy.hooks.waiting_gate(head, 1.0) is None


def test_who_is_ahead_stays_ahead_through_a_short_pause() -> None:
    policy = Policy()
    slow = policy.add("b1", 1000)
    assert policy.pick() is slow
    policy.serve(b1=10)
    # A new one begins where b is.
    lone = policy.run("a1", 500)
    policy.finish(lone)
    policy.add("a2", 100)
    assert policy.rank("a") == 510.0 > policy.rank("b") == 10.0


def test_who_used_the_machine_alone_owes_nothing_for_it() -> None:
    """What it had while nobody else came is not held against it; and it may not be used up by others at once."""
    policy = Policy()
    policy.run("keep", 1, tenant="a")
    for i in range(1, 6):
        policy.run(f"a{i}", 1000)
    policy.add("b1", 1000)
    assert policy.rank("a") == 5001.0
    assert policy.rank("b") == 4001.0


def test_a_new_busy_period_begins_with_equal_counters() -> None:
    policy = Policy()
    policy.finish(policy.run("a1", 1000))
    policy.add("a2", 10)
    policy.add("b1", 10)
    assert policy.rank("a") == policy.rank("b")


def test_a_new_tenant_starts_where_the_others_are() -> None:
    policy = Policy()
    policy.add("a1", 1000)
    policy.pick()
    policy.serve(a1=600)
    policy.add("b1", 100)
    assert policy.rank("b") == 600.0


def test_tenants_without_anything_to_remember_are_forgotten() -> None:
    policy = Policy()
    long = policy.add("z", 100_000)
    assert policy.pick() is long
    policy.serve(z=10)
    for i in range(1000):
        policy.finish(policy.run(f"r{i}", 10, tenant=f"tenant{i}"))
        policy.serve(z=10)
    state = policy.hooks.tenant_rank.__self__  # type: ignore[union-attr]
    assert len(state._ledger._accounts) < 200
    assert len(state._ledger.time._active) < 1100


# what a running prefill leaves


def long_one(policy: Policy) -> object:
    """A prefill of tenant z that has had 1,000 tokens and runs on."""
    long = policy.add("z", 4000)
    assert policy.pick() is long
    policy.serve(z=1000)
    return long


@pytest.mark.parametrize(("lead", "left"), [(0, 0), (200, 200), (700, 300)])
def test_a_running_prefill_leaves_what_is_owed(lead: int, left: int) -> None:
    """Up to the same counter, and at most what waits."""
    policy = Policy()
    long = long_one(policy)
    policy.add("a1", 300)
    if lead:
        policy.serve(z=lead)
    assert policy.cap(long, 2047) == 2047 - left  # type: ignore[arg-type]


def test_it_leaves_nothing_that_nobody_could_use() -> None:
    policy = Policy()
    long = long_one(policy)
    policy.add("a1", 300)
    policy.serve(z=500)
    policy.scheduler.max_num_active_reqs = 1
    assert policy.cap(long, 2047) == 2047  # type: ignore[arg-type]
    policy.serve()
    policy.scheduler.max_num_active_reqs = 64
    policy.scheduler.free_blocks = 10
    assert policy.cap(long, 2047) == 2047  # type: ignore[arg-type]


def test_after_a_step_in_which_nobody_used_it_it_leaves_nothing_for_a_while() -> None:
    policy = Policy(yield_retry_steps=3)
    long = long_one(policy)
    policy.add("a1", 300)
    policy.serve(z=500)
    cut = []
    for _ in range(9):
        cut.append(policy.cap(long, 2047) < 2047)  # type: ignore[arg-type]
        policy.serve()
    assert cut == [True, False, False, False] * 2 + [True]
    policy = Policy(prefills_yield=False)
    long = long_one(policy)
    policy.add("a1", 300)
    policy.serve(z=500)
    assert policy.cap(long, 2047) == 2047  # type: ignore[arg-type]


# laws


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4),
    prompts=st.lists(st.integers(1, 300), min_size=4, max_size=4),
    passes=st.lists(st.integers(1, 4), min_size=10, max_size=40),
)
def test_backlogged_tenants_get_the_same_per_weight(
    weights: list[float], prompts: list[int], passes: list[int]
) -> None:
    """Whatever the sizes and the picks a pass: never further apart than one pick of each."""
    policy = Policy()
    tenants = "abcd"[: len(weights)]
    served = dict.fromkeys(tenants, 0.0)
    size = dict(zip(tenants, prompts, strict=False))
    weight = dict(zip(tenants, weights, strict=True))
    number = 0

    def refill(tenant: str) -> None:
        nonlocal number
        number += 1
        policy.add(f"{tenant}{number}", size[tenant], weight=weight[tenant])

    for tenant in tenants:
        for _ in range(max(passes) + 1):
            refill(tenant)
    bound = 2 * max(size[t] / weight[t] for t in tenants)
    for picks in passes:
        policy.context.queue.begin_step(0.0)
        taken = [policy.pick() for _ in range(picks)]
        policy.serve(**{r.request_id: r.num_prompt_tokens for r in taken})
        for request in taken:
            tenant = request.request_id[0]
            served[tenant] += size[tenant] / weight[tenant]
            refill(tenant)
            policy.finish(request)
        assert max(served.values()) - min(served.values()) <= bound + 1e-6
