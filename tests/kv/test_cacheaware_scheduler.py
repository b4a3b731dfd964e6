"""`cacheaware` on real Schedulers, synchronous and asynchronous: its law, its holds, and what it leaves behind.

Not here: what it is worth on a workload.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engines.flags import EngineFlags
from harness.engines.virtual.engine import VirtualEngine
from harness.profiles import model_dir
from patches.seam.runtime import RUNTIME_ATTR
from tests.drive import make_config, make_request, make_scheduler
from tests.engines.traffic import ConstantStep, request, workload
from tests.scheduling.clocked import installed, patched, prompt, serve

BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
SEATS, STEP_TOKENS, BLOCKS = 5, 128, 45


@cache
def config_of(async_scheduling: bool) -> Any:
    """A prompt gets a part of each step only, so that others find room beside it."""
    return make_config(
        max_num_seqs=SEATS,
        max_num_batched_tokens=STEP_TOKENS,
        long_prefill_token_threshold=48,
        async_scheduling=async_scheduling,
    )


class Watch:
    """Counts overtakes from outside: at each pop, who of the same level stands before and stays.

    A pop that comes back in the same pass was no admission.
    """

    def __init__(self, scheduler: Any) -> None:
        self.runtime = scheduler.__dict__[RUNTIME_ATTR]
        self.queue = scheduler.waiting
        self.overtaken: dict[str, int] = {}
        self.total = 0
        self._popped: dict[str, list[str]] = {}
        pop, prepend = self.queue.pop_request, self.queue.prepend_requests

        def pop_request() -> Any:
            taken = pop()
            self._popped[taken.request_id] = [
                other.request_id for other in self.queue if self.runtime.precedes(other, taken)
            ]
            return taken

        def prepend_requests(requests: Any) -> None:
            requests = list(requests)
            for one in requests:
                self._popped.pop(one.request_id, None)
            prepend(requests)

        self.queue.pop_request, self.queue.prepend_requests = pop_request, prepend_requests

    def __call__(self, _: Any = None) -> None:
        """The pass is over."""
        for passed in self._popped.values():
            for name in passed:
                self.overtaken[name] = self.overtaken.get(name, 0) + 1
                self.total += 1
        self._popped.clear()


@dataclass(frozen=True)
class Asked:
    """One request as it is drawn."""

    arrives: int
    shared: tuple[int, int]
    own_tokens: int
    output_tokens: int
    priority: int
    cancelled_after: int | None


ASKED = st.builds(
    Asked,
    arrives=st.integers(0, 40),
    shared=st.tuples(st.integers(0, 2), st.sampled_from([0, 64, 160, 320])),
    own_tokens=st.integers(1, 200),
    output_tokens=st.integers(1, 40),
    priority=st.sampled_from([0, 0, 1]),
    cancelled_after=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 60)),
)


@BOTH
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    drawn=st.lists(ASKED, min_size=8, max_size=30),
    cap=st.integers(0, 5),
    hold_s=st.sampled_from([0.0, 0.1, 2.0]),
    blocks=st.sampled_from([BLOCKS, 400]),
)
def test_the_law_of_overtaking_and_that_all_is_served(
    async_scheduling: bool, drawn: list[Asked], cap: int, hold_s: float, blocks: int
) -> None:
    """With cancels, preemptions, priorities and shared prefixes; the patch's own count is the true one."""
    config = config_of(async_scheduling)
    prefixes = [prompt(90 + i, 320) for i in range(3)]
    knobs = {"cacheaware": {"overtakes_max_times": cap, "hold_max_s": hold_s, "sibling_tokens": 16}}
    with patched("cacheaware", knobs) as (installation, clock):
        asked = {}
        for i, one in enumerate(drawn):
            prefix, length = one.shared
            tokens = prefixes[prefix][:length] + prompt(i, one.own_tokens)
            asked[f"r{i}"] = make_request(
                config,
                f"r{i}",
                tokens,
                max_tokens=one.output_tokens,
                arrival_time=1.0 + one.arrives,
                priority=one.priority,
            )
        scheduler = make_scheduler(config, blocks)
        watch = Watch(scheduler)
        served = serve(
            scheduler,
            clock,
            [(one.arrives, asked[f"r{i}"]) for i, one in enumerate(drawn)],
            [
                (one.arrives + one.cancelled_after, f"r{i}")
                for i, one in enumerate(drawn)
                if one.cancelled_after is not None
            ],
            check=watch,
        )
        watch()
        metrics = installation.receipt()["metrics"]["cacheaware"]
    assert max(watch.overtaken.values(), default=0) <= cap
    assert metrics["cacheaware_overtakes"] == watch.total
    assert metrics["cacheaware_overtakes_max"] == max(watch.overtaken.values(), default=0)
    trace = served.trace
    for i, one in enumerate(drawn):
        if f"r{i}" not in served.cancelled:
            assert len(trace.outputs[f"r{i}"]) == one.output_tokens
    idle = max(
        (len([*run]) for empty, run in itertools.groupby(trace.steps, lambda s: not s) if empty), default=0
    )
    assert idle <= 2 + async_scheduling


def run(
    enable: str, async_scheduling: bool, cancels: Any = (), knobs: Any = None, blocks: int = 400
) -> tuple[Any, dict[str, Any]]:
    """A leader whose prefix of 480 tokens takes ten steps, three siblings in its wake, and a stranger."""
    config = config_of(async_scheduling)
    shared = prompt(1, 480)
    with patched(enable, {"cacheaware": knobs or {}} if enable else {}) as (installation, clock):
        prompts = {"leader": shared + prompt(2, 16), "stranger": prompt(9, 40)}
        prompts |= {f"sibling{i}": shared + prompt(3 + i, 16) for i in range(3)}
        arrivals = {"leader": 0, "stranger": 2}
        made = [
            (
                arrivals.get(name, 1),
                make_request(config, name, tokens, max_tokens=3, arrival_time=1.0 + arrivals.get(name, 1)),
            )
            for name, tokens in prompts.items()
        ]
        served = serve(make_scheduler(config, blocks), clock, made, cancels)
        receipt = installation.receipt() if enable else {}
    return served.trace, receipt


def prefilled(trace: Any) -> int:
    """Prompt tokens that were computed: all but one for each answer's token, which are few."""
    return sum(sum(step.values()) for step in trace.steps)


@BOTH
def test_siblings_wait_for_their_leader_and_a_stranger_does_not(async_scheduling: bool) -> None:
    stock, _ = run("", async_scheduling)
    ours, receipt = run("cacheaware", async_scheduling)
    metrics = receipt["metrics"]["cacheaware"]
    assert metrics["cacheaware_siblings_held"] == 3
    # Each sibling finds the whole prefix: what is computed is the leader's 496, the stranger's 40 and 16 or so for each.
    assert prefilled(ours) <= 496 + 40 + 3 * 32 + 5 * 4
    assert prefilled(stock) > prefilled(ours) + 480
    assert ours.first_step["sibling0"] > ours.first_step["leader"] + 2
    assert ours.first_step["stranger"] < ours.first_step["sibling0"]
    assert metrics["cacheaware_hit_rate"] > 0.6


@BOTH
def test_siblings_go_on_when_the_leader_is_gone(async_scheduling: bool) -> None:
    """The next of them leads."""
    trace, _ = run("cacheaware", async_scheduling, cancels=[(3, "leader")])
    assert "leader" not in trace.finished
    assert min(trace.first_step[f"sibling{i}"] for i in range(3)) <= 3
    assert all(len(trace.outputs[f"sibling{i}"]) == 3 for i in range(3))


@BOTH
def test_the_longest_hold_holds(async_scheduling: bool) -> None:
    """A step takes 20 ms: held for one and a half, a sibling goes on in the third."""
    _, receipt = run("cacheaware", async_scheduling, knobs={"hold_max_s": 0.03, "sibling_tokens": 1})
    assert receipt["metrics"]["cacheaware"]["cacheaware_holds_cut"] > 0
    _, receipt = run("cacheaware", async_scheduling, knobs={"hold_siblings": False})
    assert receipt["metrics"]["cacheaware"]["cacheaware_siblings_held"] == 0


@BOTH
def test_what_is_cached_goes_before_it_is_pushed_out(async_scheduling: bool) -> None:
    """Strangers as large as the pool stand before a request whose prefix is there."""
    config = make_config(max_num_seqs=1, max_num_batched_tokens=512, async_scheduling=async_scheduling)
    shared = prompt(1, 320)

    def order(enable: str) -> list[str]:
        with patched(enable) as (_, clock):
            made = [make_request(config, "first", shared, max_tokens=2, arrival_time=1.0)]
            made += [
                make_request(config, f"stranger{i}", prompt(50 + i, 480), max_tokens=2, arrival_time=2.0 + i)
                for i in range(3)
            ]
            made.append(make_request(config, "again", shared + prompt(7, 16), max_tokens=2, arrival_time=9.0))
            return serve(make_scheduler(config, 45), clock, [(0, one) for one in made]).trace.order()

    assert order("")[-1] == "again"
    # One cost 320 tokens and the strangers 480 each, so it was first; then its heir, 16 uncached.
    assert order("cacheaware")[:2] == ["first", "again"]


def engine_run(enable: str, knobs: Any = None) -> tuple[str, float]:
    """Digest of the schedule, and the share of prompt tokens that were hits, for bursts with common prefixes."""
    requests = []
    for i in range(60):
        group = i % 4
        requests.append(
            request(i, 0.25 * (i // 6), prompt=400 + 40 * (i % 3), output=10, shared=0 if group == 3 else 384)
        )
    flags = EngineFlags(
        max_model_len=1024, max_num_batched_tokens=256, long_prefill_token_threshold=96, max_num_seqs=6
    )
    with installed(enable, knobs):
        engine = VirtualEngine(model_dir("llama-3.1-8b"), flags, ConstantStep(), 110)
        try:
            done = engine.run(workload(requests))
        finally:
            engine.shutdown()
    cached = int(done.tables["requests"].to_pandas()["cached_tokens"].sum())
    return done.schedule_digest, cached / sum(len(one.prompt) for one in requests)


def test_in_the_engine_it_hits_more_and_two_runs_are_one() -> None:
    stock, stock_rate = engine_run("")
    ours, rate = engine_run("cacheaware")
    assert ours != stock
    assert rate > stock_rate
    assert engine_run("cacheaware")[0] == ours
    assert engine_run("cacheaware", {"cacheaware": {"hold_siblings": False}})[0] != ours


def test_undo_leaves_vllm_as_it_was() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    before = dict(vars(Scheduler))
    with installed("cacheaware"):
        assert dict(vars(Scheduler)) != before
    assert dict(vars(Scheduler)) == before
