"""Guards the account of real time: parts add up, the scheduler is left as it was, patches are told from vLLM.

Nothing here says how fast anything is.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from harness.arms import Arm
from harness.display import PlainDisplay
from harness.engine_perf import measure
from harness.engines.flags import EngineFlags, parse_flags
from harness.engines.virtual.account import (
    ENGINE,
    EXECUTOR,
    FRONT_END,
    LABELS,
    LOOP,
    RECORDING,
    SCHEDULER,
    Account,
    Spent,
)
from harness.engines.virtual.engine import VirtualEngine, VirtualRun
from harness.profiles import load_profile, model_dir
from patches.seam.adapter import install
from patches.seam.context import Context
from patches.seam.patch import Hooks, Knobs, Patch
from patches.seam.plan import Chosen, PatchPlan
from tests.engines.traffic import ConstantStep, request, workload

BURN_S = 0.002


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 10**9)), max_size=30))
def test_parts_add_up_to_the_whole(moves: list[tuple[int, int]]) -> None:
    now = 0
    account = Account(lambda: now)
    expected = [0] * 6
    part = LOOP
    for following, lasts_ns in moves:
        now += lasts_ns
        expected[part] += lasts_ns
        assert account.enter(following) == part
        part = following
    spent = account.spent()
    assert spent.wall_s == pytest.approx(now / 1e9)
    assert [
        spent.scheduler_s,
        spent.engine_s,
        spent.executor_s,
        spent.recording_s,
        spent.front_end_s,
        spent.loop_s,
    ] == pytest.approx([expected[p] / 1e9 for p in (SCHEDULER, ENGINE, EXECUTOR, RECORDING, FRONT_END, LOOP)])
    assert spent.vllm_s + spent.patches_s + spent.own_s == pytest.approx(spent.wall_s)


def test_a_watched_scheduler_is_left_as_it_was() -> None:
    def own(flag: bool) -> str:
        return f"own {flag}"

    scheduler = type("Toy", (), {"schedule": lambda self: None, "update_from_output": lambda self, a: a})()
    scheduler.schedule = own
    account = Account()
    with account.watching(scheduler):
        assert scheduler.schedule(True) == "own True"
        assert scheduler.update_from_output(7) == 7
        with pytest.raises(TypeError):
            scheduler.schedule()
    assert vars(scheduler) == {"schedule": own}
    assert account.spent().scheduler_s > 0
    # A call that failed has ended all the same.
    assert account.enter(LOOP) == LOOP


def busy(seam: str) -> Patch:
    """A patch whose hook on this seam burns a known CPU time."""

    def burn(*_: Any) -> None:
        until = time.thread_time() + BURN_S
        while time.thread_time() < until:
            sum(range(50))

    def build(knobs: Knobs, context: Context) -> Hooks:
        hooks: dict[str, Any] = {seam: burn}
        return Hooks(**hooks)

    text: dict[str, Any] = dict.fromkeys(
        ("summary", "why", "how", "baseline", "mechanism", "removable_when"), "burns time for a test"
    )
    return Patch(name="busy", number="", area="scheduling", knobs=Knobs, build=build, seams=(seam,), **text)


def serve(patch: Patch | None) -> VirtualRun:
    """A few hundred steps of a light load."""
    installation = install(PatchPlan((Chosen(patch, Knobs(), "test"),))) if patch is not None else None
    try:
        engine = VirtualEngine(
            model_dir("llama-3.1-8b"), EngineFlags(max_model_len=1024), ConstantStep(), 200
        )
        run = engine.run(workload([request(i, 0.1 * i, output=80) for i in range(6)]))
        engine.shutdown()
    finally:
        if installation is not None:
            installation.undo()
    return run


@pytest.mark.parametrize("seam", ["after_schedule", "after_update"])
def test_the_time_of_a_hook_is_the_patches(seam: str) -> None:
    """One seam is called by the adapter's runtime, the other straight from a wrapper around vLLM."""
    run = serve(busy(seam))
    burnt_s = BURN_S * run.steps
    assert burnt_s > 0.1
    # The sampler sees some dozens of moments; vLLM's own share of such a light load is small beside the hook's.
    assert run.spent.patches_s > run.spent.scheduler_s
    assert run.spent.patches_s > 0.5 * burnt_s


def test_without_patches_nothing_is_sampled_and_nothing_is_theirs() -> None:
    run = serve(None)
    assert run.spent.patches_s == 0
    assert run.spent.scheduler_s == pytest.approx(run.upstream_s)
    assert 0 < run.upstream_s < run.wall_s
    assert all(getattr(run.spent, part) > 0 for part in LABELS if part != "patches_s")


def test_the_display_ends_with_where_the_time_went() -> None:
    lines: list[str] = []
    console: Any = SimpleNamespace(print=lambda text, **_: lines.append(text))
    with PlainDisplay(console, 2, 0) as shown:
        for seed, executor_s in ((0, 1.0), (1, 2.0)):
            spent = Spent(scheduler_s=3.0, executor_s=executor_s).to_json()
            facts = {"wall_s": 4.0, "upstream_s": 3.0, "virtual_s": 9.0, "spent": spent}
            shown.on({"event": "finished", "arm": "stock", "seed": seed, **facts})
    assert lines[-1] == "real time of the engines: vLLM's schedule and update 67%, executor 33%"


def test_the_fixed_overload_fills_the_seats_and_adds_up() -> None:
    profile = load_profile("rtx4090-24g/llama-3.1-8b")
    flags = parse_flags({**profile.stock, "max_num_seqs": 8}, "test")
    first, again = (measure(Arm("stock", "stock", flags), profile, 8) for _ in range(2))
    assert (first.steps, first.running, first.virtual_s) == (again.steps, again.running, again.virtual_s)
    assert 6 < first.running <= 8
    assert first.ratio > 1
    assert 0 < first.own_share < 1
    assert first.look_up_us > 0
    said = first.to_json()
    assert sum(said["spent"].values()) == pytest.approx(first.spent.wall_s)
