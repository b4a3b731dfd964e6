"""Guards `tenant`: who is held, who is cut and who is a victim; floors, ceilings, borrowing.

The arithmetic on plain objects around the adapter's real queue of tenants, the rest on real Schedulers,
sync and async. Random schedules with cancels and preemptions, and the pair law, are in test_wfq_schedulers.
"""

from __future__ import annotations

from typing import Any

import pytest

from harness.errors import UserError
from patches.fixes.step_claims import Claim, Pass
from patches.fixes.tenant import PATCH
from patches.seam.plan import resolve
from tests.drive import make_config, make_scheduler
from tests.scheduling.clocked import patched, serve
from tests.scheduling.fakes import FakeRequest
from tests.scheduling.tenants import of
from tests.scheduling.wfq_policy import Policy

BOTH = pytest.mark.parametrize("async_scheduling", [False, True])


def policy(*, seats: int = 8, blocks: int = 10_000, **knobs: Any) -> Policy:
    """The patch with so many seats and free blocks."""
    made = Policy(PATCH, **knobs)
    made.scheduler.max_num_active_reqs = seats
    made.scheduler.free_blocks = made.scheduler.all_blocks = blocks
    return made


def running(made: Policy, tenant: str, count: int, prompt: int = 32, **who: Any) -> list[FakeRequest]:
    """So many requests of the tenant, admitted one pass each while nobody else waits; their blocks are taken."""
    out = []
    for i in range(count):
        out.append(made.run(f"{tenant}run{i}", prompt, tenant=tenant, **who))
        made.scheduler.free_blocks -= -(-prompt // 16)
    return out


def admitted(made: Policy) -> list[str]:
    """Whom one pass admits, in order, with its whole prompt each; at most as many as there are seats."""
    names = []
    while made.context.queue and len(made.scheduler.running) < made.scheduler.max_num_active_reqs:
        request = made.pick()
        made.scheduler.free_blocks -= -(-request.num_tokens // 16)
        names.append(request.request_id)
    made.serve(**{r.request_id: r.num_prompt_tokens for r in made.scheduler.running if r.request_id in names})
    return names


# who is held


def test_where_tenants_are_ranked_only_those_served_sooner_claim_seats_and_tokens() -> None:
    made = Pass(100, 100, 1.0, ranks={"a": 1.0, "b": 3.0})
    made.claim("a", Claim(1, 10, 5))
    made.claim("b", Claim(2, 20, 7))
    assert made.of_others("c") == Claim(3, 30, 12)
    assert made.of_others("c", 2.0) == Claim(1, 30, 5)
    assert made.of_others("a", 0.5) == Claim(0, 20, 0)


def test_a_tenant_alone_may_have_everything() -> None:
    made = policy(seats=8)
    for i in range(12):
        made.add(f"a{i}", 32)
    assert len(admitted(made)) == 8
    assert made.gauge("tenant_held_seats") == 0


def test_who_has_its_share_of_seats_leaves_the_rest_to_who_lacks_it() -> None:
    made = policy(seats=8)
    running(made, "a", 6)
    for i in range(4):
        made.add(f"a{i}", 32)
    for i in range(4):
        made.add(f"b{i}", 32)
    # Two seats are left, and b lacks four.
    assert admitted(made) == ["b0", "b1"]
    assert made.gauge("tenant_held_seats") > 0
    assert "seats" in made.context.queue.reason(made.scheduler.requests.get("a0") or first_waiting(made, "a"))
    # One of a's ends: it still has more than its share.
    made.finish(made.scheduler.running[0])
    assert admitted(made) == ["b2"]


def first_waiting(made: Policy, tenant: str) -> FakeRequest:
    """The first of the tenant's waiting requests."""
    return next(r for r in made.context.queue if r.request_id.startswith(tenant))


def test_who_lacks_is_served_and_then_it_is_first_come_first_served_again() -> None:
    made = policy(seats=8)
    running(made, "a", 4)
    for name in ("a0", "a1", "b0"):
        made.add(name, 32)
    # b wants one seat only: it is kept, what else is free is not.
    assert set(admitted(made)) == {"a0", "a1", "b0"}


def test_weights_set_the_floors() -> None:
    made = policy(seats=8)
    running(made, "a", 6, weight=3.0)
    made.add("a0", 32, weight=3.0)
    for i in range(4):
        made.add(f"b{i}", 32, weight=1.0)
    # A quarter of eight.
    assert admitted(made) == ["b0", "b1"]
    made = policy(seats=8, tenant_weight={"a": 1.0})
    running(made, "a", 6, weight=3.0)
    assert made.context.gauges
    with pytest.raises(UserError, match="greater than 0"):
        resolve("tenant", knobs={"tenant": {"tenant_weight": {"a": -1.0}}})


def test_above_the_ceiling_nobody_borrows_from_who_lacks() -> None:
    # Plenty is free, so the reserve alone would hold nobody.
    for ceiling, expected in ((1.5, ["b0"]), (8.0, ["a0", "b0"])):
        made = policy(seats=16, ceiling_factor=ceiling)
        running(made, "a", 12)
        made.add("a0", 32)
        made.add("b0", 32)
        first = made.pick().request_id
        assert first == expected[0]


def test_blocks_are_shared_likewise() -> None:
    made = policy(seats=64, blocks=100)
    running(made, "a", 7, prompt=160)
    made.add("a0", 160)
    made.add("b0", 320)
    # 30 are free: with a's 10 the 20 of b would not be there.
    assert admitted(made) == ["b0"] or made.gauge("tenant_held_blocks") == 0
    made = policy(seats=64, blocks=100)
    running(made, "a", 8, prompt=160)
    made.add("a0", 160)
    made.add("b0", 320)
    assert made.pick().request_id == "b0"
    assert made.gauge("tenant_held_blocks") == 1


def test_nobody_is_held_while_nothing_runs() -> None:
    made = policy(seats=1)
    made.add("a0", 32)
    made.add("b0", 32)
    assert admitted(made) == ["a0"]


def test_what_another_gate_holds_makes_nobody_leave_anything() -> None:
    made = Policy(PATCH)
    made.scheduler.max_num_active_reqs = 8
    gate = made.hooks.waiting_gate
    assert gate is not None
    made.context.start(made.hooks, (lambda r, now: "red" if r.request_id[0] == "b" else None, gate))
    running(made, "a", 6)
    made.add("a0", 32)
    for i in range(3):
        made.add(f"b{i}", 32)
    assert admitted(made) == ["a0"]


def test_everything_is_forgotten() -> None:
    made = policy(seats=4)
    requests = [made.add(f"{name}{i}", 40, weight=0.1) for i in range(3) for name in "abc"]
    admitted(made)
    made.preempt(made.scheduler.running[0])
    for request in requests:
        made.finish(request)
    state = made.hooks.waiting_gate.__self__  # type: ignore[union-attr]
    shares = state._shares
    assert (shares._accounts, shares._records, state._prefilling, shares._weight) == ({}, {}, {}, 0.0)


# who is cut


def test_a_prefill_gets_its_share_of_the_step_and_what_others_leave() -> None:
    made = policy()
    long = made.add("z", 6000)
    assert made.pick() is long
    made.serve(z=1000)
    assert made.cap(long, 2048) == 2048
    made.serve(z=16)
    made.add("a0", 300)
    # a wants 300 of its half.
    assert made.cap(long, 2048) == 2048 - 300
    made.serve(z=16)
    for i in range(1, 30):
        made.add(f"a{i}", 300)
    assert made.cap(long, 2048) == 1024
    made.serve(z=16)


def test_whose_prefill_was_cut_starts_no_other() -> None:
    made = policy()
    long = made.add("z1", 6000)
    assert made.pick() is long
    made.serve(z1=1000)
    made.add("z2", 100)
    made.add("a0", 300)
    made.cap(long, 2048)
    assert admitted(made) == ["a0"]
    assert made.gauge("tenant_held_tokens") >= 1
    assert admitted(made) == ["z2"]


# who is a victim


def test_hints_grow_with_the_excess_and_are_0_within_the_share() -> None:
    made = policy(blocks=100)
    a = running(made, "a", 6, prompt=160)
    b = running(made, "b", 1, prompt=160)
    hint = made.hooks.victim_hint
    assert hint is not None
    assert hint(a[0]) == pytest.approx(1 + 60 / 50 - 1)
    assert hint(b[0]) == 0.0
    for name in "cdefg":
        made.add(f"{name}0", 16)
    assert hint(a[0]) == 2.0


# on real Schedulers


def burst(enable: str, async_scheduling: bool) -> list[int]:
    """Tenant a has all 8 seats and 20 more in line when four of b come; steps until each of b's gets in."""
    config = make_config(max_num_seqs=8, async_scheduling=async_scheduling)
    with patched(enable) as (_, clock):
        first = [of(config, f"a{i}", 40, tokens=6 + 4 * i, at=float(i)) for i in range(28)]
        late = [of(config, f"b{i}", 40, tokens=4, at=100.0 + i) for i in range(4)]
        served = serve(
            make_scheduler(config, 400), clock, [*((0, r) for r in first), *((3, r) for r in late)]
        )
    if not async_scheduling:
        assert all(served.trace.steps)
    assert len(served.trace.finished) == 32
    return [served.trace.first_step[f"b{i}"] - 3 for i in range(4)]


@BOTH
def test_freed_seats_go_to_who_lacks_its_floor(async_scheduling: bool) -> None:
    assert max(burst("tenant", async_scheduling)) <= 20
    assert min(burst("", async_scheduling)) > 40


@BOTH
def test_the_share_of_who_wants_nothing_is_used_by_others(async_scheduling: bool) -> None:
    """One tenant, or several that never lack anything: as without the patch."""

    def run(enable: str, tenants: str) -> Any:
        config = make_config(max_num_seqs=6, max_num_batched_tokens=512, async_scheduling=async_scheduling)
        with patched(enable) as (_, clock):
            requests = [of(config, f"{tenants[i % len(tenants)]}{i}", 100, at=float(i)) for i in range(24)]
            return serve(make_scheduler(config, 400), clock, [(2 * i, r) for i, r in enumerate(requests)])

    assert run("tenant", "a").trace.steps == run("", "a").trace.steps
    assert run("tenant", "ab").trace.steps == run("", "ab").trace.steps


@BOTH
def test_victims_come_from_the_tenant_above_its_share(async_scheduling: bool) -> None:
    """Stock would take the last to come, which is b's only one."""
    preempted = {}
    for enable in ("tenant", ""):
        config = make_config(max_num_seqs=8, async_scheduling=async_scheduling)
        with patched(enable) as (_, clock):
            requests = [of(config, f"a{i}", 60, tokens=90, at=float(i)) for i in range(4)]
            requests.append(of(config, "b0", 60, tokens=90, at=9.0))
            served = serve(make_scheduler(config, 32), clock, [(0, r) for r in requests])
        preempted[enable] = served.trace.preempted
        assert len(served.trace.finished) == 5
    assert preempted[""][0] == "b0"
    assert "b0" not in preempted["tenant"]


@BOTH
def test_a_newcomer_gets_its_share_of_the_steps_that_a_long_prefill_fills(async_scheduling: bool) -> None:
    first = {}
    for enable in ("tenant", ""):
        config = make_config(max_num_batched_tokens=256, async_scheduling=async_scheduling)
        with patched(enable) as (_, clock):
            long = of(config, "z", 3800, at=1.0)
            new = of(config, "a", 100, at=2.0)
            served = serve(make_scheduler(config, 400), clock, [(0, long), (4, new)])
        first[enable] = served.trace.first_step["a"]
        if enable:
            assert served.trace.steps[4] == {"z": 156, "a": 100}
    assert first["tenant"] == 4
    assert first[""] >= 14
