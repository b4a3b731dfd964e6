"""`warmup` on real Schedulers and in the virtual engine: what it computes, what nobody sees of it, what it may cost.

Not here: what it is worth (measured), and the real model (tests/real).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import UserError
from patches.kv.hot import HotPrefixes
from patches.kv.prompt_list import read_prompt_list, tokens_of
from patches.seam import adapter
from patches.seam.own import is_own_id
from patches.seam.plan import resolve
from tests.drive import cancel, free_blocks, make_config, make_request, make_scheduler, run_to_end
from tests.scheduling.clocked import STEP_NS, installed, patched, prompt

BOTH = pytest.mark.parametrize("async_scheduling", [False, True])
SYSTEM = prompt(1, 320)


def listed(path: Path, *prompts: list[int]) -> str:
    """A list of these prompts; its path."""
    lines = [json.dumps({"prompt_token_ids": tokens}) for tokens in prompts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def cached(scheduler: Any, request: Any) -> int:
    """Tokens of the request that are in the cache."""
    return int(scheduler.kv_cache_manager.get_computed_blocks(request)[1])


# the list


def test_a_bad_list_is_one_line_that_says_where(tmp_path: Path) -> None:
    path = tmp_path / "list.jsonl"
    for text, part in (
        ("{", "line 1: this is no JSON object"),
        ("[1]", "line 1"),
        ('{"text": "a"}\n\n{"text": "a", "prompt_token_ids": [1]}', "line 3: give exactly one"),
        ('{"prompt_token_ids": [1, -4]}', "line 1: a token id is negative"),
        ('{"prompt_token_ids": []}', "line 1: prompt_token_ids"),
        ('{"prompt_token_ids": ["1"]}', "line 1: prompt_token_ids.0"),
        ('{"text": "a", "salt": "b"}', "line 1: salt"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UserError) as caught:
            resolve("warmup", [f"warmup.list_file={path}"])
        assert part in str(caught.value)
        assert "\n" not in str(caught.value)
    path.write_bytes(b"\xff\xfe")
    for bad in (path, tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="list_file"):
            resolve("warmup", [f"warmup.list_file={bad}"])


def test_text_and_messages_are_left_to_the_models_tokenizer(tmp_path: Path) -> None:
    class Tokenizer:
        def encode(self, text: str) -> list[int]:
            return [len(text)]

        def apply_chat_template(self, messages: list[Any], **options: Any) -> list[int]:
            assert options["tokenize"]
            assert not options["add_generation_prompt"]
            return [7] * len(messages)

    path = tmp_path / "list.jsonl"
    path.write_text('{"text": "abc"}\n{"messages": [{"role": "system", "content": "x"}]}\n', encoding="utf-8")
    assert [tokens_of(each, Tokenizer) for each in read_prompt_list(path)] == [[3], [7]]


# what is hot


def test_the_shared_part_is_hot_and_the_rest_is_not() -> None:
    hot = HotPrefixes(window_s=10, hot_requests=3, most_blocks=8)

    def see(names: str, now: float) -> None:
        hashes = [name.encode() for name in names]
        hot.see(hashes, list(range(2 * len(names))), 2, None, now)

    for i in range(3):
        see(f"ab{i}x", float(i))
    assert [prefix.tokens for prefix in hot.hot(3.0)] == [(0, 1, 2, 3)]
    # Still hot in the next window, no longer in the one after.
    assert hot.hot(12.0)
    assert not hot.hot(31.0)


@given(
    st.lists(st.tuples(st.text("abc", max_size=6), st.floats(0, 30)), max_size=60),
    st.integers(2, 5),
    st.integers(1, 6),
)
def test_hot_prefixes_stay_within_their_bounds(
    seen: list[tuple[str, float]], least: int, most_blocks: int
) -> None:
    hot = HotPrefixes(window_s=5, hot_requests=least, most_blocks=most_blocks, most_nodes=9, most_prefixes=2)
    now, counts = 0.0, dict[str, int]()
    for names, wait in seen:
        now += wait
        hashes = [names[: depth + 1].encode() for depth in range(len(names))]
        hot.see(hashes, list(range(len(names))), 1, None, now)
        for depth in range(len(names)):
            counts[names[: depth + 1]] = counts.get(names[: depth + 1], 0) + 1
        found = hot.hot(now)
        assert len(found) <= 2
        for prefix in found:
            assert len(prefix.tokens) <= most_blocks
            # Never hotter than all requests together make it.
            assert counts[prefix.last_hash.decode()] >= least
        assert len(hot._now) <= 9


# on the scheduler


@BOTH
def test_the_list_is_in_the_cache_before_the_first_request(async_scheduling: bool, tmp_path: Path) -> None:
    config = make_config(async_scheduling=async_scheduling)
    path = listed(tmp_path / "list", SYSTEM, prompt(2, 40), [5])
    with installed("warmup", {"warmup": {"list_file": path}}) as installation:
        scheduler = make_scheduler(config, 600)
        start = free_blocks(scheduler)
        # A bare scheduler has nobody to start it: what the first request leaves idle is the first there is.
        serve(scheduler, make_request(config, "first", prompt(3, 32), max_tokens=1))
        trace = run_to_end(scheduler, [make_request(config, "r", SYSTEM + prompt(4, 20), max_tokens=2)])
        assert sum(sum(step.values()) for step in trace.steps) == 20 + 1
        assert free_blocks(scheduler) == start
        metrics = installation.receipt()["metrics"]["warmup"]
    assert metrics["listed_prompts"] == 2
    # A prompt without a full block cannot be cached.
    assert metrics["left_out_prompts"] == 1
    assert metrics["warmed_prefixes"] == 2
    assert metrics["warmed_blocks_used"] == 20
    assert metrics["own_tokens"] == 320 + 32


@BOTH
def test_nobody_hears_of_requests_of_our_own(async_scheduling: bool, tmp_path: Path) -> None:
    """No output, no count in the engine's statistics, no hook of another patch, no id left behind."""
    config = make_config(async_scheduling=async_scheduling)
    path = listed(tmp_path / "list", SYSTEM)
    everything = "qos,mlfq,wfq,edf,tenant,watermark,ratelimit,prefillbudget,admission,overload,warmup"
    with patched(everything, {"warmup": {"list_file": path}}) as (installation, clock):
        scheduler = make_scheduler(config, 600)

        def tick() -> None:
            clock.advance_to(clock.now_ns + STEP_NS)

        first = make_request(config, "first", prompt(3, 32), max_tokens=3, tenant="a", tier="gold")
        steps = serve(scheduler, first, tick)
        assert [len(step) for step in steps if any(map(is_own_id, step))] == [1, 1, 1]
        stats = scheduler.kv_cache_manager.prefix_cache_stats
        assert (stats.requests, stats.queries, stats.hits) in ((0, 0, 0), (1, 32, 0))
        own = adapter.runtime_of(scheduler).injector  # type: ignore[union-attr]
        assert own is not None
        assert not own.live
        assert not own._named
        assert not own._views
        assert not scheduler.requests
        tallies = installation.receipt()["metrics"]
        assert tallies["warmup"]["own_steps"] == 3


@BOTH
def test_one_under_way_is_ended_when_somebody_waits(async_scheduling: bool, tmp_path: Path) -> None:
    config = make_config(async_scheduling=async_scheduling, max_num_seqs=1)
    path = listed(tmp_path / "list", SYSTEM)
    with patched("warmup", {"warmup": {"list_file": path, "idle_tokens": 64}}) as (_, clock):
        scheduler = make_scheduler(config, 600)
        serve(scheduler, make_request(config, "first", prompt(3, 32), max_tokens=1))
        runtime = adapter.runtime_of(scheduler)
        assert runtime is not None
        own = runtime.injector
        assert own is not None
        scheduler.kv_cache_manager.reset_prefix_cache()
        runtime.injector.ask(_prefix(SYSTEM, idle_tokens=64))  # type: ignore[union-attr]
        # The engine is idle: a pass puts one in. Then somebody comes, before its output is there.
        out = scheduler.schedule()
        assert [rid for rid in out.num_scheduled_tokens if is_own_id(rid)]
        assert list(out.num_scheduled_tokens.values()) == [64]
        real = make_request(config, "real", prompt(9, 50), max_tokens=1)
        scheduler.add_request(real)
        out = scheduler.schedule()
        # The only seat is free for it, in the very next pass.
        assert out.num_scheduled_tokens == {"real": 50}
        assert own.withdrawn == 1
        # What ours computed is in the cache all the same.
        assert cached(scheduler, make_request(config, "look", SYSTEM)) == 64
        cancel(scheduler, "real")
        assert clock.now_ns == 0


def _prefix(tokens: list[int], **share: Any) -> Any:
    from patches.seam.own import OwnPrefix, Share

    return OwnPrefix("warmup", "x", tokens, None, Share(**share))


ARRIVALS = st.lists(
    st.tuples(st.integers(1, 700), st.integers(1, 30), st.integers(0, 12), st.booleans()),
    min_size=1,
    max_size=14,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrivals=ARRIVALS,
    blocks=st.integers(120, 260),
    beside=st.sampled_from([0, 32]),
    is_async=st.booleans(),
    warm=st.integers(1, 400),
)
def test_traffic_is_served_as_without_it(
    arrivals: list[tuple[int, int, int, bool]],
    blocks: int,
    beside: int,
    is_async: bool,
    warm: int,
    tmp_path: Path,
) -> None:
    """The law: between two passes with somebody waiting or in prefill lies at most one of ours, of bounded size.

    And what the traffic gets of each pass, and of the cache, is what it gets without: the same tokens, in the same
    order, with the same hits, whatever was warmed (here: what nobody asks for).
    """
    config = make_config(
        async_scheduling=is_async, max_num_seqs=3, max_num_batched_tokens=256, max_model_len=1024
    )
    path = listed(tmp_path / "list", *[prompt(50 + i, warm) for i in range(3)])

    def requests() -> list[Any]:
        made = []
        for i, (length, output, _, shared) in enumerate(arrivals):
            head = SYSTEM[:200] if shared else []
            made.append(make_request(config, f"r{i}", head + prompt(100 + i, length), max_tokens=output))
        return made

    def whole() -> tuple[list[dict[str, int]], list[int]]:
        scheduler = make_scheduler(config, blocks)
        start = free_blocks(scheduler)
        pending = requests()
        gaps = [gap for _, _, gap, _ in arrivals]
        steps: list[dict[str, int]] = []
        chunks: list[int] = []
        # Each comes when the one before has ended, or while it runs, some passes later.
        for number, request in enumerate(pending):
            before = run_some(scheduler, gaps[number])
            scheduler.add_request(request)
            steps += before
        steps += run_some(scheduler, None)
        assert free_blocks(scheduler) == start
        real = []
        for step in steps:
            ours = {rid: n for rid, n in step.items() if is_own_id(rid)}
            theirs = {rid: n for rid, n in step.items() if not is_own_id(rid)}
            if ours and theirs:
                assert sum(ours.values()) <= beside, "one of ours beside traffic"
                assert set(theirs.values()) == {1}, "one of ours beside a prefill"
            assert len(ours) <= 1
            chunks += ours.values()
            if theirs:
                real.append(theirs)
        return real, chunks

    expected, none = whole()
    assert not none
    with installed(
        "warmup", {"warmup": {"list_file": path, "idle_tokens": 64, "beside_tokens": beside}}
    ) as installation:
        got, chunks = whole()
        assert all(chunk <= 64 for chunk in chunks)
        metrics = installation.receipt()["metrics"]["warmup"]
        assert metrics["own_longest_chunk_tokens"] <= 64
    assert got == expected


def serve(scheduler: Any, request: Any, tick: Callable[[], None] = lambda: None) -> list[dict[str, int]]:
    """Serve a request, and what of ours comes after it."""
    scheduler.add_request(request)
    return run_some(scheduler, None, tick)


def run_some(
    scheduler: Any, passes_with_traffic: int | None, tick: Callable[[], None] = lambda: None
) -> list[dict[str, int]]:
    """Run until so many passes served traffic, or nothing is left, ours included; for None the latter."""
    depth = 2 if scheduler.scheduler_config.async_scheduling else 1
    steps: list[dict[str, int]] = []
    in_flight: list[Any] = []
    served = 0
    while True:
        more = scheduler.has_requests() and (passes_with_traffic is None or served < passes_with_traffic)
        if more and len(in_flight) < depth:
            tick()
            out = scheduler.schedule()
            steps.append(dict(out.num_scheduled_tokens))
            served += any(not is_own_id(rid) for rid in out.num_scheduled_tokens)
            partial = {rid: scheduler.requests[rid].is_prefill_chunk for rid in out.num_scheduled_tokens}
            in_flight.append((out, partial))
            if out.total_num_scheduled_tokens:
                continue
        if not in_flight:
            return steps
        _apply(scheduler, *in_flight.pop(0))


def _apply(scheduler: Any, out: Any, partial: dict[str, bool]) -> None:
    from tests.drive import _outputs

    for client in scheduler.update_from_output(out, _outputs(out, partial, 7)).values():
        assert not any(is_own_id(output.request_id) for output in client.outputs)


@BOTH
def test_what_many_share_is_computed_again_in_an_idle_moment(async_scheduling: bool) -> None:
    config = make_config(async_scheduling=async_scheduling)
    with patched("warmup", {"warmup": {"hot_requests": 3}}) as (installation, clock):
        scheduler = make_scheduler(config, 600)
        for i in range(3):
            serve(scheduler, make_request(config, f"r{i}", SYSTEM + prompt(10 + i, 30), max_tokens=1))
        assert scheduler.reset_prefix_cache()
        clock.advance_to(2_000_000_000)
        serve(scheduler, make_request(config, "other", prompt(70, 40), max_tokens=1))
        assert cached(scheduler, make_request(config, "look", SYSTEM + prompt(99, 5))) == 320
        assert installation.receipt()["metrics"]["warmup"]["own_longest_chunk_tokens"] == 128


def test_nothing_is_left_after_undo(tmp_path: Path) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    before = dict(vars(Scheduler)), dict(vars(EngineCore))
    path = listed(tmp_path / "list", SYSTEM)
    with installed("warmup", {"warmup": {"list_file": path}}):
        assert vars(EngineCore)["__init__"] is not before[1]["__init__"]
    assert (dict(vars(Scheduler)), dict(vars(EngineCore))) == before
