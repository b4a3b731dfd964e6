"""Guards `mlfq`: levels, demotion and promotion, what the last level may have beside others, and the patch on real schedulers.

The arithmetic runs on plain objects, order and caps on real Schedulers (sync and async), and what a
long prefill leaves to others also in a real EngineCore. Not here: default values of the knobs, what
the patch is worth (the experiment), and how it composes (test_pairs).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from harness.engines.flags import EngineFlags
from harness.engines.virtual.engine import VirtualEngine
from harness.profiles import model_dir
from patches.scheduling.mlfq import PATCH, MlfqKnobs
from patches.seam.patch import Hooks
from tests.drive import Trace, cancel, make_config, make_request, make_scheduler
from tests.engines.traffic import LONG, ConstantStep, request, workload
from tests.scheduling.clocked import installed, patched, prompt, serve
from tests.scheduling.fakes import FakeContext, FakeRequest, FakeScheduler, scheduled
from tests.seam.toys import everything

BOTH = pytest.mark.parametrize("async_scheduling", [False, True])
FAST = settings(max_examples=100, deadline=None, derandomize=True)

BOUNDS = {"level0_tokens": 128, "level1_tokens": 512, "level2_tokens": 2048}
KNOBS = {**BOUNDS, "last_level_free_share": 0.0}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    everything.clear()
    yield
    everything.clear()


class Policy:
    """`mlfq` on plain objects."""

    def __init__(self, **knobs: Any) -> None:
        self.scheduler = FakeScheduler()
        self.context = FakeContext(self.scheduler)
        self.hooks: Hooks = PATCH.build(MlfqKnobs(**{**KNOBS, **knobs}), self.context)  # type: ignore[arg-type]

    def level(self, request: FakeRequest, now: float = 0.0) -> float:
        """Its level; waiting alone never changes it."""
        assert self.hooks.request_key
        value, until = self.hooks.request_key(request, now)
        assert until is None
        return value

    def serve(self, **tokens: int) -> None:
        """One step."""
        assert self.hooks.after_schedule
        self.hooks.after_schedule(scheduled(tokens), 0.0)

    def preempt(self, request: FakeRequest) -> None:
        """The adapter's notice of a preemption."""
        assert self.hooks.on_preempt
        self.hooks.on_preempt(request, 0.0)

    def run(self, name: str, consumed: int) -> FakeRequest:
        """A running request that has consumed so much."""
        running = FakeRequest(name, num_prompt_tokens=1)
        self.scheduler.running.append(running)
        if consumed:
            self.serve(**{name: consumed})
        return running

    def begin(self) -> None:
        """A scheduling pass begins."""
        assert self.hooks.before_schedule
        self.hooks.before_schedule(0.0)

    def gate(self, request: FakeRequest) -> str | None:
        """Why it must wait."""
        assert self.hooks.waiting_gate
        return self.hooks.waiting_gate(request, 0.0)

    def cap(self, request: FakeRequest, new_tokens: int) -> int:
        """What it may have of `new_tokens`."""
        assert self.hooks.token_cap
        return self.hooks.token_cap(request, 0, new_tokens, 0.0)


# levels


@pytest.mark.parametrize(
    ("consumed", "level"),
    [(0, 0), (1, 0), (128, 0), (129, 1), (512, 1), (513, 2), (2048, 2), (2049, 3), (10**6, 3)],
)
def test_a_bound_belongs_to_its_level(consumed: int, level: int) -> None:
    policy = Policy()
    once, bit = FakeRequest("once", num_prompt_tokens=1), FakeRequest("bit", num_prompt_tokens=1)
    policy.serve(once=consumed)
    for _ in range(min(consumed, 3000)):
        policy.serve(bit=1)
    assert policy.level(once) == policy.level(bit) == level


EVENTS = st.lists(st.one_of(st.integers(1, 400), st.just("preempt"), st.just("wait")), max_size=40)


@FAST
@given(events=EVENTS)
def test_levels_follow_service_and_preemption_and_nothing_else(events: list[Any]) -> None:
    """Against a model: level = what consumption earned, less one for each preemption above level 0."""
    policy = Policy()
    request = FakeRequest("r", num_prompt_tokens=1)
    policy.scheduler.running.append(request)
    consumed = lifted = 0
    for number, event in enumerate(events):
        before = policy.level(request, float(number))
        if event == "preempt":
            policy.preempt(request)
            lifted += before > 0
            assert policy.level(request) == max(0, before - 1)
        elif event == "wait":
            assert policy.level(request, 1e6 * number) == before
        else:
            policy.serve(r=event)
            consumed += event
            assert policy.level(request) >= before
        earned = sum(consumed > bound for bound in BOUNDS.values())
        assert policy.level(request) == earned - lifted >= 0
    assert policy.context.gauges["mlfq_promotions"]() == lifted


@FAST
@given(steps=st.lists(st.integers(1, 700), max_size=40))
def test_the_key_is_computed_anew_whenever_a_bound_is_crossed(steps: list[int]) -> None:
    """Otherwise the running order and the choice of victims would go by a stale level."""
    policy = Policy()
    request = policy.run("r", 0)
    crossed = []
    for tokens in steps:
        before = policy.level(request)
        policy.serve(r=tokens)
        if policy.level(request) != before:
            crossed.append("r")
    assert policy.context.rekeyed == crossed
    assert policy.context.gauges["mlfq_demotions"]() == len(crossed)


def test_promotion_does_not_reset_consumption() -> None:
    policy = Policy()
    request = policy.run("r", 513)
    policy.preempt(request)
    assert policy.level(request) == 1
    # From 513 it is 1,535 to the bound of level 2 and one more to pass it: then a level lower, as before.
    policy.serve(r=1535)
    assert policy.level(request) == 1
    policy.serve(r=1)
    assert policy.level(request) == 2


def test_finished_requests_are_forgotten() -> None:
    policy = Policy()
    request = policy.run("r", 3000)
    policy.preempt(request)
    assert policy.hooks.on_finish
    policy.hooks.on_finish(request, 1.0)
    again = FakeRequest("r", num_prompt_tokens=1)
    assert policy.level(again) == 0
    policy.serve(r=129)
    assert policy.level(again) == 1


def test_knobs_refuse_nonsense_and_have_units() -> None:
    for bad in ({"level1_tokens": 128, "level0_tokens": 128}, {"level0_tokens": 0}, {"level3_tokens": 5}):
        with pytest.raises(ValidationError):
            MlfqKnobs(**bad)
    assert all(PATCH.unit(name) for name in MlfqKnobs.model_fields)


# the last level beside others

CONSUMED = st.sampled_from([0, 128, 129, 512, 600, 2048, 2049, 5000])


@FAST
@given(
    running=st.lists(st.tuples(CONSUMED, st.booleans()), min_size=1, max_size=6),
    waiting=st.lists(CONSUMED, max_size=4),
    share=st.integers(1, 2000),
    at_once=st.integers(1, 3),
    asked=st.integers(1, 4096),
)
def test_cap_and_gate_laws(
    running: list[tuple[int, bool]], waiting: list[int], share: int, at_once: int, asked: int
) -> None:
    """Only the last level is cut or held, never to nothing, and not if nobody else is there."""
    policy = Policy(last_level_step_tokens=share, last_level_prefill_requests=at_once)
    policy.scheduler.free_blocks = policy.scheduler.all_blocks
    for number, (consumed, prefills) in enumerate(running):
        policy.run(f"r{number}", consumed).is_prefill_chunk = prefills
    queued = [FakeRequest(f"w{number}", num_prompt_tokens=1) for number in range(len(waiting))]
    for held, consumed in zip(queued, waiting, strict=True):
        policy.serve(**{held.request_id: consumed})
    policy.scheduler.queued.extend(queued)
    policy.begin()
    last = [r for r in policy.scheduler.running if r.is_prefill_chunk and policy.level(r) == 3]
    granted = []
    for prefill in policy.scheduler.running:
        if not prefill.is_prefill_chunk:
            continue
        kept = policy.cap(prefill, asked)
        assert 1 <= kept <= asked
        if prefill in last:
            granted.append(kept)
        if prefill not in last or (len(running) == 1 and not waiting):
            assert kept == asked
    if len(last) < len(running):
        # What the last level gets is for all of it together; 1 token each is the least.
        assert sum(granted) <= share + len(granted)
        assert not granted or granted[0] == min(asked, share)
    for held in queued:
        if policy.level(held) < 3 or len(last) < at_once:
            assert policy.gate(held) is None


def test_the_last_level_is_held_while_enough_of_it_prefill() -> None:
    policy = Policy(last_level_prefill_requests=2)
    policy.scheduler.free_blocks = policy.scheduler.all_blocks
    longs = [policy.run(f"long{i}", 5000) for i in range(2)]
    policy.run("decode", 40)
    short, held = FakeRequest("short", num_prompt_tokens=1), FakeRequest("held", num_prompt_tokens=4000)
    policy.scheduler.queued.extend([short, held])
    for prefilling in (2, 1, 0):
        for number, long in enumerate(longs):
            long.is_prefill_chunk = number < prefilling
        policy.begin()
        assert policy.gate(short) is None
        assert (policy.gate(held) is not None) == (prefilling == 2)


def test_the_last_level_leaves_blocks_to_others() -> None:
    """To the block: 250 for the prompt and a tenth of 1,000 that stay free."""
    policy = Policy(last_level_free_share=0.1)
    policy.run("decode", 40)
    long = FakeRequest("long", num_prompt_tokens=4000, num_tokens=4000)
    short = FakeRequest("short", num_prompt_tokens=10, num_tokens=10)
    policy.scheduler.queued.extend([long, short])
    for free, held in ((1000, False), (350, False), (349, True), (0, True)):
        policy.scheduler.free_blocks = free
        policy.begin()
        assert (policy.gate(long) is not None) == held
        assert policy.gate(short) is None


# on real schedulers


def beside_a_long_prefill(
    async_scheduling: bool, new: int, *, step_tokens: int = 256, budget: int = 512
) -> tuple[Trace, dict[str, Any]]:
    """A prefill of 3,600 tokens is under way when `new` requests of 100 tokens come, before step 3."""
    config = make_config(max_num_batched_tokens=budget, async_scheduling=async_scheduling)
    long = make_request(config, "long", prompt(9, 3600), max_tokens=3, arrival_time=1.0)
    others = [
        make_request(config, f"new{i}", prompt(i, 100), max_tokens=3, arrival_time=2.0 + i)
        for i in range(new)
    ]
    knobs = {"mlfq": {**KNOBS, "last_level_step_tokens": step_tokens}}
    with patched("mlfq", knobs) as (installation, clock):
        served = serve(make_scheduler(config, 400), clock, [(0, long), *((3, r) for r in others)])
        receipt = installation.receipt()
    assert all(len(tokens) == 3 for tokens in served.trace.outputs.values())
    assert max(sum(step.values()) for step in served.trace.steps) <= budget
    return served.trace, receipt


@BOTH
@pytest.mark.parametrize(
    "new",
    [
        pytest.param(
            1, marks=pytest.mark.xfail(strict=True, reason="one that waits beside a prefill counts as nobody")
        ),
        2,
    ],
)
def test_a_long_prefill_leaves_new_ones_their_tokens(async_scheduling: bool, new: int) -> None:
    trace, receipt = beside_a_long_prefill(async_scheduling, new)
    assert trace.steps[3] == {"long": 256, **{f"new{i}": 100 for i in range(new)}}
    assert receipt["hooks"]["mlfq"]["by_hook"]["token_cap"] > 0
    # Once they are gone the budget is all its own again.
    assert 512 in [step.get("long") for step in trace.steps[4:]]


@BOTH
def test_without_that_cap_it_takes_all(async_scheduling: bool) -> None:
    trace, receipt = beside_a_long_prefill(async_scheduling, 2, step_tokens=10_000)
    assert trace.first_step["new0"] == 7
    assert "token_cap" not in receipt["hooks"]["mlfq"]["by_hook"]


@BOTH
def test_alone_it_is_not_cut(async_scheduling: bool) -> None:
    trace, receipt = beside_a_long_prefill(async_scheduling, 0)
    assert [step["long"] for step in trace.steps[:7]] == [512] * 7
    assert "token_cap" not in receipt["hooks"]["mlfq"]["by_hook"]


def long_ones(async_scheduling: bool, *, decode: bool) -> tuple[Trace, dict[str, Any]]:
    """Three long prompts at once, beside one that decodes or all by themselves."""
    config = make_config(max_num_batched_tokens=512, async_scheduling=async_scheduling)
    longs = [
        make_request(config, f"long{i}", prompt(i, 3000), max_tokens=2, arrival_time=2.0 + i)
        for i in range(3)
    ]
    small = [make_request(config, "small", prompt(9, 20), max_tokens=100, arrival_time=1.0)]
    knobs = {"mlfq": {**KNOBS, "last_level_step_tokens": 256, "last_level_prefill_requests": 1}}
    with patched("mlfq", knobs) as (installation, clock):
        arrivals = [(0, r) for r in small if decode] + [(2, r) for r in longs]
        served = serve(make_scheduler(config, 800), clock, arrivals)
        receipt = installation.receipt()
    assert sum(served.trace.finished.get(f"long{i}") == "length" for i in range(3)) == 3
    return served.trace, receipt


@BOTH
def test_long_prompts_prefill_one_at_a_time_beside_others(async_scheduling: bool) -> None:
    trace, receipt = long_ones(async_scheduling, decode=True)
    assert trace.order() == ["small", "long0", "long1", "long2"]
    for step in trace.steps:
        assert sum(tokens > 1 for name, tokens in step.items() if name.startswith("long")) <= 1
        if "small" in step:
            assert sum(step.values()) <= 256 + 4
    assert receipt["hooks"]["mlfq"]["by_hook"]["waiting_gate"] > 0


@BOTH
@pytest.mark.xfail(
    strict=True, reason="two that are larger than the unreserved pool hold each other up for ever"
)
def test_the_gate_never_holds_everybody(async_scheduling: bool) -> None:
    """Each alone would fit into the empty pool and be let in; together they must not both wait for nobody."""
    config = make_config(async_scheduling=async_scheduling)
    with patched("mlfq", {"mlfq": {**BOUNDS, "last_level_free_share": 0.1}}):
        scheduler = make_scheduler(config, 201)
        for i in range(2):
            scheduler.add_request(make_request(config, f"large{i}", prompt(i, 2960), max_tokens=2))
        scheduled_tokens = [scheduler.schedule().total_num_scheduled_tokens for _ in range(3)]
        cancel(scheduler, "large0", "large1")
    assert scheduled_tokens[0] > 0


@BOTH
@pytest.mark.xfail(strict=True, reason="others of the last level count as others, and the budget stays idle")
def test_long_prompts_by_themselves_use_whole_steps(async_scheduling: bool) -> None:
    trace, _ = long_ones(async_scheduling, decode=False)
    prefills = [sum(step.values()) for step in trace.steps if max(step.values(), default=0) > 1]
    # 9,000 tokens, 512 a step; the last step of each prompt may be a short one.
    assert len(prefills) <= -(-9000 // 512) + 3


@BOTH
def test_what_has_consumed_much_waits_behind_what_has_not(async_scheduling: bool) -> None:
    """Preempted, stock would put it first in the line; here three new ones go before it."""
    config = make_config(max_num_seqs=1, async_scheduling=async_scheduling)
    long = make_request(config, "long", prompt(1, 600), max_tokens=20, arrival_time=1.0)
    new = [
        make_request(config, f"new{i}", prompt(2 + i, 40), max_tokens=3, arrival_time=2.0 + i)
        for i in range(3)
    ]

    def check(sched: Any) -> None:
        if sched.requests.get("new2") and not long.num_preemptions:
            everything.PREEMPT.add("long")

    with patched("mlfq,tests.seam.toys.everything", {"mlfq": KNOBS}) as (installation, clock):
        served = serve(make_scheduler(config, 200), clock, [(0, long), *((5, r) for r in new)], check=check)
        receipt = installation.receipt()
    assert served.trace.preempted == ["long"]
    assert list(served.trace.finished) == ["new0", "new1", "new2", "long"]
    assert receipt["metrics"]["mlfq"]["mlfq_promotions"] == 1
    assert len(served.trace.outputs["long"]) == 20


def test_each_bound_crossed_is_one_demotion() -> None:
    """120 prompt tokens, then decodes: 128 and 512 are passed, and the last token is never computed."""
    config = make_config()
    lone = make_request(config, "r", prompt(1, 120), max_tokens=400)
    with patched("mlfq", {"mlfq": KNOBS}) as (installation, clock):
        served = serve(make_scheduler(config, 200), clock, [(0, lone)])
        receipt = installation.receipt()
    assert sum(step.get("r", 0) for step in served.trace.steps) == 120 + 399
    assert receipt["metrics"]["mlfq"] == {"mlfq_demotions": 2.0, "mlfq_promotions": 0.0}


def test_undo_restores_vllm_exactly() -> None:
    owners = (Scheduler, AsyncScheduler, scheduler_module)
    before = [dict(vars(owner)) for owner in owners]
    with patched("mlfq"):
        assert [dict(vars(owner)) for owner in owners] != before
    assert [dict(vars(owner)) for owner in owners] == before


# in a real EngineCore


def test_short_requests_start_at_once_beside_a_long_prefill() -> None:
    """A document of 3,900 tokens fills 16 steps of 256; pairs of requests that come meanwhile do not wait for its end."""
    document = request(0, 0.0, prompt=3900, output=4, tenant=LONG)
    shorts = [request(i, 0.1 * ((i + 1) // 2), prompt=40, output=6) for i in range(1, 11)]
    flags = EngineFlags(max_model_len=4096, max_num_batched_tokens=256)
    with installed("mlfq", {"mlfq": {**KNOBS, "last_level_step_tokens": 128}}) as installation:
        engine = VirtualEngine(model_dir("llama-3.1-8b"), flags, ConstantStep(), 400)
        try:
            table = engine.run(workload([document, *shorts])).tables["requests"].to_pandas()
        finally:
            engine.shutdown()
    table = table.set_index("request_id")
    assert (table.status == "ok").all()
    assert installation.tallies["mlfq"].by_hook["token_cap"] >= 5
    # A step takes 45.6 ms at most, and one may be in flight when a request comes.
    wait_ns = (table.scheduled_ns - table.intended_ns).drop("r000")
    assert (wait_ns <= 2 * 45_600_000).all()
    assert (table.drop("r000").scheduled_ns < table.loc["r000"].first_token_ns).all()
