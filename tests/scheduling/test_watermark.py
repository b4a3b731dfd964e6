"""Guards `watermark`: levels, who they hold, the forecast, quotas and pauses, and fewer preemptions on real schedulers.

Not here: the arithmetic of the forecast (test_steptime), random schedules and how it composes (test_capacity_together),
and what the patch is worth (the experiment).
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from harness.engines.flags import EngineFlags
from harness.engines.virtual.engine import VirtualEngine
from harness.profiles import model_dir
from patches.scheduling.watermark import GREEN, PATCH, RED, YELLOW, WatermarkKnobs, next_level
from tests.drive import make_config, make_request, make_scheduler
from tests.engines.traffic import LONG, SHORT, ConstantStep, request, workload
from tests.scheduling.capacity_policy import Bench
from tests.scheduling.clocked import installed, patched, prompt, serve

FAST = settings(max_examples=100, deadline=None, derandomize=True)
BOTH = pytest.mark.parametrize("async_scheduling", [False, True])


def bench(**knobs: Any) -> Bench:
    """The patch on 1,000 blocks (and the null block) of 16 tokens; who runs holds nothing unless the test says so."""
    b = Bench(PATCH, WatermarkKnobs(**{"short_prompt_tokens": 512, "peak_share": 1.0, **knobs}))
    b.scheduler.all_blocks, b.scheduler.free_blocks = 1001, 1000
    return b


# levels


@FAST
@given(shares=st.lists(st.floats(0, 1), max_size=30))
def test_levels_rise_at_once_and_fall_late(shares: list[float]) -> None:
    knobs = WatermarkKnobs.model_validate({})
    level = GREEN
    for share in shares:
        before, level = level, next_level(level, share, knobs)
        at_least = RED if share >= 0.85 else YELLOW if share >= 0.70 else GREEN
        assert at_least <= level <= max(before, at_least)
        if level > at_least:
            assert share >= (0.85 if level == RED else 0.70) - 0.05
    assert next_level(RED, 0.81, knobs) == RED
    assert next_level(RED, 0.79, knobs) == YELLOW
    assert next_level(RED, 0.10, knobs) == GREEN


@pytest.mark.parametrize(
    ("used", "passing"),
    [
        (600, {"gold", "gold-long", "silver", "bronze-long"}),
        (750, {"gold", "gold-long", "silver"}),
        (900, {"gold", "silver"}),
    ],
)
def test_whom_the_levels_hold(used: int, passing: set[str]) -> None:
    """Silver is short and better than bronze, which runs."""
    b = bench(forecast=False)
    b.run("decode", 100, priority=2)
    b.run("better", 100)
    queued = {
        "gold": b.add("gold", 100),
        "gold-long": b.add("gold-long", 2000),
        "silver": b.add("silver", 100, priority=1),
        "bronze-long": b.add("bronze-long", 2000, priority=2),
    }
    b.scheduler.free_blocks = 1000 - used
    assert {name for name, one in queued.items() if b.gate(one) is None} == passing


def test_the_last_seats_are_left_to_the_best() -> None:
    """Of 20 seats a lower class may take 18, whatever the memory."""
    b = bench(peak_share=0.9, reserve_deviations_ratio=0.0)
    b.scheduler.max_num_active_reqs = 20
    for number in range(17):
        b.run(f"gold{number}", 16)
    low, best = b.add("low", 16, priority=1), b.add("best", 16)
    assert (b.gate(low), b.gate(best)) == (None, None)
    b.run("gold17", 16)
    assert b.gate(low) is not None
    assert b.gate(best) is None


def test_a_burst_of_better_ones_finds_room() -> None:
    """Nine better ones of ten blocks run: one deviation is three of them, 30 blocks and 3 seats."""
    b = bench(peak_share=1.0, reserve_deviations_ratio=1.0, first_output_tokens=1, short_prompt_tokens=0)
    for number in range(9):
        b.run(f"gold{number}", 160)
    low, best = b.add("low", 16 * 40, priority=1), b.add("best", 16 * 40)
    # 40 for its prompt, one for each answer's token, and the reserve.
    for free, passes in ((82, True), (60, False)):
        b.scheduler.free_blocks = free
        b.end_pass({})
        assert (b.gate(low) is None) == passes
        assert b.gate(best) is None
    b.scheduler.free_blocks = 500
    for seats, passes in ((13, True), (12, False)):
        b.scheduler.max_num_active_reqs = seats
        b.end_pass({})
        assert (b.gate(low) is None) == passes


def test_prompts_that_are_being_computed_count_in_full() -> None:
    """250 blocks are used, and prompts under way will take 500 more."""
    b = bench(forecast=False)
    b.run("gold", 10)
    b.run("under way", 16_000, prefills=True, priority=1)
    low = b.add("low", 10, priority=1)
    b.scheduler.free_blocks = 750
    assert b.gate(low) is not None
    b.finish(b.scheduler.running[-1])  # type: ignore[arg-type]
    assert b.gate(low) is None


def test_who_is_held_passes_if_the_forecast_has_room() -> None:
    """900 blocks are used by ten; answers of their tenant are 160 tokens long, so each grows by ten blocks."""
    for generated, passes in ((0, False), (150, True)):
        b = bench()
        b.run("gold", 10)
        for number in range(4):
            done = b.run(f"old{number}", 16, tenant="a", priority=1)
            done.num_tokens += 160
            b.finish(done)
        for number in range(10):
            one = b.run(f"r{number}", 1440, tenant="a", priority=1)
            one.num_tokens += generated
            one.num_computed_tokens += generated
        b.scheduler.free_blocks = 100
        assert (b.gate(b.add("low", 640, tenant="a", priority=1)) is None) == passes


def test_aborted_answers_teach_nothing() -> None:
    b = bench(first_output_tokens=1000)
    gone = b.run("gone", 10, tenant="a")
    gone.num_tokens += 1
    b.finish(gone, "FINISHED_ABORTED")
    b.run("gold", 10)
    b.run("low", 10, tenant="a", priority=1)
    b.scheduler.free_blocks = 110
    assert b.gate(b.add("new", 960, tenant="a", priority=1)) is not None


def test_the_head_of_those_held_is_waited_for() -> None:
    """After its patience nobody of its class passes before it, and it passes when its prompt fits."""
    b = bench(patience_s=5.0, peak_share=0.5)
    b.run("gold", 10)
    b.run("bronze", 10, priority=2)
    head, small = b.add("head", 3200, priority=1), b.add("small", 600, priority=1)
    b.scheduler.free_blocks = 150
    for now in (0.0, 4.9):
        b.context.now = now
        assert b.gate(head) is not None
        b.end_pass({"gold": 1})
    b.context.now = 5.0
    assert b.gate(head) is not None
    reason = b.gate(small)
    assert reason is not None
    assert "earlier" in reason
    assert b.gate(b.add("gold-2", 16)) is None
    b.scheduler.free_blocks = 200
    assert b.gate(head) is None
    b.admit(head, 3200)
    b.scheduler.free_blocks = 900
    assert b.gate(small) is None


@settings(FAST, max_examples=200)
@given(
    waiting=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 8000)), min_size=1, max_size=6),
    free=st.integers(0, 1000),
    forecast=st.booleans(),
)
def test_the_gate_never_holds_when_nothing_runs(
    waiting: list[tuple[int, int]], free: int, forecast: bool
) -> None:
    b = bench(forecast=forecast)
    queued = [b.add(f"r{i}", tokens, priority=p) for i, (p, tokens) in enumerate(waiting)]
    b.scheduler.free_blocks = free
    assert all(b.gate(request) is None for request in queued)


# tokens


def test_quotas_go_down_with_class_and_usage_and_bind_beside_others_only() -> None:
    b = bench(quota_always=True, quota_factor=0.5, least_quota_tokens=10)
    gold = b.run("gold", 10)
    lows = [b.run(f"low{p}", 8000, prefills=True, priority=p) for p in (1, 2)]
    best = b.run("best", 8000, prefills=True)
    b.scheduler.free_blocks = 500
    b.end_pass({})
    assert [b.cap(low, 2048) for low in (best, *lows)] == [2048, 512, 256]
    b.scheduler.free_blocks = 250
    assert [b.cap(low, 2048) for low in lows] == [256, 128]
    for one in (gold, best, lows[0]):
        b.finish(one)
    assert b.cap(lows[1], 2048) == 2048


def test_short_prompts_have_no_quota_and_do_not_pause() -> None:
    b = bench(quota_always=True, least_quota_tokens=10, short_prompt_tokens=2048)
    b.run("gold", 10)
    short, long = (b.run(f"low{n}", n, prefills=True, priority=1) for n in (2000, 3000))
    b.scheduler.free_blocks = 1
    b.end_pass({})
    assert b.cap(short, 1500) == 1500
    assert b.cap(long, 1500) < 100


def test_without_a_shortage_ahead_there_is_no_quota() -> None:
    b = bench()
    b.run("gold", 10)
    low = b.run("low", 2000, prefills=True, priority=1)
    b.scheduler.free_blocks = 250
    b.end_pass({})
    assert b.cap(low, 1000) == 1000


def test_a_prefill_pauses_while_decodes_may_need_every_block_but_not_for_ever() -> None:
    b = bench(patience_s=2.0)
    for number in range(5):
        b.run(f"gold{number}", 10)
    low = b.run("low", 3200, prefills=True, priority=1)
    b.scheduler.free_blocks = 36
    b.end_pass({})
    # 512 tokens are 32 blocks: four are left for five.
    assert b.cap(low, 512) == 0
    b.scheduler.free_blocks = 37
    assert b.cap(low, 512) > 0
    b.scheduler.free_blocks = 36
    assert b.cap(low, 512) == 0
    b.context.now += 2.5
    assert b.cap(low, 512) > 0


def test_victims() -> None:
    b = bench()
    gold, low = b.run("gold", 2000), b.run("low", 2000, priority=1)
    short = b.run("short", 10, priority=1)
    assert b.hooks.victim_hint
    assert [b.hooks.victim_hint(r) for r in (gold, low, short)] == [0, 0, 0]
    b.scheduler.free_blocks = 10
    b.end_pass({})
    assert [b.hooks.victim_hint(r) for r in (gold, low, short)] == [0, 0.5, 0]


def test_knobs_refuse_nonsense_and_have_units() -> None:
    for bad in ({"yellow_share": 0.9}, {"red_share": 1.0}, {"level": 5}):
        with pytest.raises(ValidationError):
            WatermarkKnobs(**bad)
    numbers = [name for name in WatermarkKnobs.model_fields if name not in ("forecast", "quota_always")]
    assert all(PATCH.unit(name) for name in numbers)


# on real schedulers


@BOTH
@pytest.mark.parametrize("patch", ["watermark", ""])
def test_growth_that_is_foreseen_preempts_nobody(async_scheduling: bool, patch: str) -> None:
    """Eight of one class, each of 100 tokens that become 300, in room for three: stock admits six of them at once."""
    config = make_config(async_scheduling=async_scheduling)
    with patched(patch, {patch: {"first_output_tokens": 200}} if patch else {}) as (_, clock):
        requests = [
            make_request(config, f"r{i}", prompt(i, 100), max_tokens=200, arrival_time=float(i))
            for i in range(8)
        ]
        served = serve(make_scheduler(config, 61), clock, [(0, r) for r in requests])
    assert set(served.trace.finished.values()) == {"length"}
    assert bool(served.trace.preempted) == (not patch)


# in a real EngineCore


def test_an_engine_short_of_memory_preempts_less() -> None:
    """Documents come faster than memory lets them go; important short ones are not held."""
    documents = [request(i, 0.05 * i, prompt=1500, output=200, tenant=LONG) for i in range(12)]
    shorts = [request(100 + i, 0.3 * i, prompt=60, output=20, tenant=SHORT) for i in range(20)]
    flags = EngineFlags(max_model_len=4096, max_num_batched_tokens=1024, scheduling_policy="priority")
    preempted = {}
    for patch in ("watermark", ""):
        foreseen = {patch: {"first_output_tokens": 200, "peak_share": 0.95}} if patch else {}
        with installed(patch, foreseen) as installation:
            engine = VirtualEngine(model_dir("llama-3.1-8b"), flags, ConstantStep(), 420)
            try:
                run = engine.run(workload([*documents, *shorts]))
            finally:
                engine.shutdown()
            if patch:
                assert installation.tallies["watermark"].by_hook["waiting_gate"] > 0
        table = run.tables["requests"].to_pandas().set_index("request_id")
        assert (table.status == "ok").all()
        preempted[patch] = int(table.preemptions.sum())
        if patch:
            waits = (table.scheduled_ns - table.intended_ns)[[f"r{100 + i:03d}" for i in range(20)]]
            assert (waits <= 3 * 123_000_000).all()
    assert preempted["watermark"] <= preempted[""] / 2
    assert preempted[""] > 0
