"""Guards what holds whichever patches are on: a few subsets in which every two meet, and (at night) any subset.

Random traffic of three tenants with deadlines, on real Schedulers, synchronous and asynchronous, with cancellations, a
pool that is too small, and few seats. Not here: each patch's own rules, and what the combination is worth.
"""

from __future__ import annotations

import importlib
import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.engines.flags import EngineFlags
from harness.engines.virtual.engine import VirtualEngine
from harness.profiles import load_profile, model_dir
from patches.catalogue import CATALOGUE
from patches.seam import endings, registry, targets
from patches.seam.plan import resolve
from patches.seam.seams import SEAMS
from tests.drive import make_config, make_request, make_scheduler
from tests.engines.traffic import LONG, SHORT, ConstantStep, request, workload
from tests.scheduling.clocked import installed, patched, prompt, serve
from tests.scheduling.covering import covering_subsets

BUILT = tuple(entry.name for entry in CATALOGUE if entry.built)
SEATS, STEP_TOKENS, BLOCKS = 5, 128, 45
# (tenant, tier, priority, weight, milliseconds to the first token): a step takes 20 ms here.
TENANTS = (
    ("gold-a", "gold", 0, 4, 400.0),
    ("silver-0", "silver", 1, 2, 1_000.0),
    ("bronze-0", "bronze", 2, 1, 6_000.0),
)
# Small, so that the small traffic here meets them.
KNOBS: dict[str, dict[str, Any]] = {
    "qos": {"short_prompt_tokens": 200, "victim_prompt_tokens": 0, "preempt_cooldown_s": 0.1},
    "mlfq": {"level0_tokens": 64, "level1_tokens": 128, "level2_tokens": 256, "last_level_step_tokens": 64},
}


def clash(one: str, other: str) -> bool:
    """Whether these two may not be enabled together."""
    patches = registry.find(one), registry.find(other)
    owned = {seam for seam in patches[0].seams if SEAMS[seam].exclusive} & set(patches[1].seams)
    return bool(owned) or other in patches[0].conflicts or one in patches[1].conflicts


SUBSETS = tuple(",".join(subset) for subset in covering_subsets(BUILT, clash))
# Those that need a connector, which a bare Scheduler lacks, run in an engine.
CONNECTED = frozenset(name for name in BUILT if registry.find(name).engine_flags is not None)


def bare(subset: str) -> str:
    """The subset without what needs a connector."""
    return ",".join(name for name in subset.split(",") if name not in CONNECTED)


@dataclass(frozen=True)
class Asked:
    """One request as it is drawn; steps count from the run's start."""

    arrives: int
    prompt_tokens: int
    shared_tokens: int
    output_tokens: int
    tenant: int
    cancelled_after: int | None


ASKED = st.builds(
    Asked,
    arrives=st.integers(0, 60),
    prompt_tokens=st.integers(1, 420),
    shared_tokens=st.sampled_from([0, 0, 64, 160]),
    output_tokens=st.integers(1, 60),
    tenant=st.integers(0, len(TENANTS) - 1),
    cancelled_after=st.one_of(st.none(), st.none(), st.integers(0, 80)),
)
TRAFFIC = st.lists(ASKED, min_size=10, max_size=30)


@cache
def config_of(async_scheduling: bool) -> Any:
    """A small engine: its pool cannot hold much more than one of the largest requests."""
    return make_config(
        max_num_seqs=SEATS, max_num_batched_tokens=STEP_TOKENS, async_scheduling=async_scheduling
    )


def requests_of(config: Any, drawn: list[Asked]) -> dict[str, tuple[Asked, Any]]:
    """Real requests by id; made while the plan is in force, since they carry the adapter's ticket."""
    common = prompt(99, 160)
    made = {}
    for number, asked in enumerate(drawn):
        name, tier, priority, weight, slo_ms = TENANTS[asked.tenant]
        request = make_request(
            config,
            f"r{number}",
            common[: asked.shared_tokens] + prompt(number, asked.prompt_tokens),
            max_tokens=asked.output_tokens,
            arrival_time=1.0 + asked.arrives,
            priority=priority,
            tenant=name,
            tier=tier,
        )
        request.sampling_params.extra_args |= {"weight": weight, "slo_ttft_ms": slo_ms}
        made[f"r{number}"] = (asked, request)
    return made


def check(enable: str, async_scheduling: bool, drawn: list[Asked]) -> None:
    """Serve it, and hold it against the laws; `serve` itself checks that every block came back."""
    config = config_of(async_scheduling)
    knobs = {name: values for name, values in KNOBS.items() if name in enable.split(",")}
    with patched(enable, knobs) as (_, clock):
        asked = requests_of(config, drawn)
        served = serve(
            make_scheduler(config, BLOCKS),
            clock,
            [(one.arrives, request) for one, request in asked.values()],
            [
                (one.arrives + one.cancelled_after, name)
                for name, (one, _) in asked.items()
                if one.cancelled_after is not None
            ],
        )
    trace = served.trace
    for name, (one, _) in asked.items():
        if name in served.cancelled:
            assert name not in trace.finished
        elif trace.finished[name] == "length":
            assert len(trace.outputs[name]) == one.output_tokens
        else:
            # Only a patch ends a request otherwise, and it says why in words that the API knows.
            assert endings.parse(trace.stop_reasons[name]) is not None, trace.stop_reasons[name]
            assert any("expire" in registry.find(name).seams for name in enable.split(","))
    for step in trace.steps:
        assert sum(step.values()) <= STEP_TOKENS and len(step) <= SEATS
    # Nothing idles while somebody waits: a step may be empty when all that was there has just ended, or when, with
    # asynchronous scheduling, the output of the one before has still to come; not twice in a row beyond that.
    idle = max(
        (len([*run]) for empty, run in itertools.groupby(trace.steps, lambda s: not s) if empty), default=0
    )
    assert idle <= 2 + async_scheduling


def test_every_two_patches_meet_in_each_way() -> None:
    """Both on, either one, neither: for every two of the catalogue that may be enabled together."""
    subsets = [set(subset.split(",")) for subset in SUBSETS]
    for one, other in itertools.combinations(BUILT, 2):
        ways = {(one in subset, other in subset) for subset in subsets}
        if clash(one, other):
            assert ways == {(True, False), (False, True), (False, False)}
        else:
            assert len(ways) == 4, (one, other)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("subset", sorted({bare(subset) for subset in SUBSETS} - {""}))
@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(drawn=TRAFFIC)
def test_subsets_in_which_every_two_patches_meet(
    subset: str, async_scheduling: bool, drawn: list[Asked]
) -> None:
    check(subset, async_scheduling, drawn)


@pytest.mark.parametrize("subset", [subset for subset in SUBSETS if CONNECTED & {*subset.split(",")}])
def test_with_a_connector_every_request_ends_too(subset: str) -> None:
    """In a real engine, whose executor plays the workers: a pool too small, cancellations, tenants with deadlines."""
    links = load_profile("rtxpro6000-96g-shared/llama-3.1-8b").transfers
    traffic = [
        request(
            i,
            0.03 * i,
            prompt=(60, 300, 700)[i % 3],
            output=12 + 5 * (i % 4),
            tenant=(SHORT, LONG)[i % 2],
            cancel_s=0.03 * i + 0.3 if i % 7 == 3 else None,
            shared=(0, 256)[i % 3 > 0],
        )
        for i in range(40)
    ]
    knobs = {name: values for name, values in KNOBS.items() if name in subset.split(",")}
    plan = resolve(subset, knobs=knobs)
    flags = EngineFlags(max_model_len=1024, max_num_batched_tokens=256, max_num_seqs=6, **plan.engine_flags)
    with installed(subset, knobs):
        engine = VirtualEngine(model_dir("llama-3.1-8b"), flags, ConstantStep(), 120, links=links)
        try:
            pool = engine.core.scheduler.kv_cache_manager.block_pool
            run = engine.run(workload(traffic))
            assert pool.get_num_free_blocks() == run.usable_blocks
        finally:
            engine.shutdown()
    statuses = run.tables["requests"].column("status").to_pylist()
    assert len(statuses) == len(traffic) and {*statuses} <= {"ok", "cancelled", "rejected", "expired"}
    assert statuses.count("ok") >= len(traffic) // 3


@pytest.mark.slow
@pytest.mark.nightly
@settings(max_examples=400, deadline=None, derandomize=False, database=None)
@given(chosen=st.sets(st.sampled_from(BUILT), min_size=1), async_scheduling=st.booleans(), drawn=TRAFFIC)
def test_any_subset(chosen: set[str], async_scheduling: bool, drawn: list[Asked]) -> None:
    assume(chosen - CONNECTED)
    assume(not any(clash(*pair) for pair in itertools.combinations(sorted(chosen), 2)))
    check(bare(",".join(sorted(chosen))), async_scheduling, drawn)


# What Python, and vLLM with each request that is made, set anew.
OWN_GLOBALS = {"__builtins__", "NONE_HASH"}


def entries_of_vllm() -> dict[tuple[str, str], Any]:
    """What each name means in every module and class of vLLM that a seam relies on, and in their callers."""
    files = {*targets.FILES.values(), "v1/core/sched/scheduler.py", "v1/core/block_pool.py"}
    found: dict[tuple[str, str], Any] = {}
    for file in sorted(files):
        module = importlib.import_module(
            "vllm." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        )
        owners = [module, *(value for value in vars(module).values() if isinstance(value, type))]
        for owner in owners:
            if getattr(owner, "__module__", module.__name__).startswith("vllm."):
                name = f"{module.__name__}.{getattr(owner, '__qualname__', '')}"
                found |= {(name, key): value for key, value in vars(owner).items() if key not in OWN_GLOBALS}
    return found


@pytest.mark.parametrize("subset", [SUBSETS[0]], ids=["all"])
def test_undo_leaves_vllm_as_it_was(subset: str) -> None:
    """Every entry of every module and class concerned is the very object that it was, also after a run."""
    check("", False, [Asked(0, 100, 0, 5, 0, None)])
    before = entries_of_vllm()
    # All of it, whether or not a Scheduler could be built with it here.
    with patched(subset):
        during = entries_of_vllm()
    assert len([key for key, was in before.items() if during.get(key) is not was]) > 5
    check(bare(subset), True, [Asked(0, 100, 0, 5, 0, None), Asked(1, 300, 64, 5, 2, 3)])
    after = entries_of_vllm()
    assert before.keys() == after.keys()
    assert [key for key, was in before.items() if after[key] is not was] == []
