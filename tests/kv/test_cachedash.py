"""`cachedash`: its parts against plain Python, and the patch against the records of a virtual run.

Not here: how it is shown (report, `bench top`), nor that it costs less than 1% of a step (`bench perf --enable cachedash`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engines.flags import EngineFlags
from harness.engines.virtual.engine import VirtualEngine, VirtualRun
from harness.profiles import model_dir
from harness.records import parquet_bytes
from patches.kv import block_history as history
from patches.kv.block_history import BlockHistory, EventLog
from patches.kv.cache_counts import ASKED, OTHERS, CacheCounts, TenantNames, codes
from patches.kv.cachedash import PATCH, CachedashKnobs
from patches.kv.prefixes import PrefixTable
from patches.kv.reuse import ReuseDistance
from patches.seam import adapter
from tests.drive import make_config, make_request, make_scheduler, run_to_end
from tests.engines.traffic import LONG, SHORT, ConstantStep, request, workload
from tests.scheduling.clocked import installed

_BLOCKS = 12


def name_of(block: int) -> bytes:
    return hashlib.blake2b(block.to_bytes(4, "little"), digest_size=8).digest() * 4


@st.composite
def events(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Look-ups (tenant, blocks, found) and evictions (block, culprit), with batch borders between them."""
    out: list[tuple[Any, ...]] = []
    for _ in range(draw(st.integers(1, 25))):
        if draw(st.booleans()):
            blocks = draw(st.lists(st.integers(1, _BLOCKS), min_size=1, max_size=4, unique=True))
            out.append(("look", draw(st.integers(0, 2)), blocks, draw(st.integers(0, len(blocks)))))
        else:
            out.append(("evict", draw(st.integers(1, _BLOCKS)), draw(st.integers(0, 2))))
        if draw(st.integers(0, 4)) == 0:
            out.append(("batch",))
    return out


def plainly(done: Sequence[tuple[Any, ...]]) -> tuple[list[Any], list[Any]]:
    """What the arrays must say, an event at a time."""
    last: dict[int, Any] = {}
    looked, ended = [], []
    clock = 0
    for event in done:
        if event[0] == "look":
            _, tenant, blocks, found = event
            led = None
            for depth, block in enumerate(blocks):
                before = last.get(block)
                cause, by = history.FOUND, history.NOBODY
                if depth >= found:
                    if before is None:
                        cause = history.NEVER
                    elif before[0] == "evict":
                        cause, by = history.EVICTED, before[1]
                    elif led is not None and led[0] == history.EVICTED:
                        cause, by = history.CUT, led[1]
                    else:
                        cause = history.UNLANDED
                    led = led or (cause, by)
                looked.append((tenant, cause, by))
            for depth, block in enumerate(blocks):
                last[block] = ("look", tenant, depth < found, clock)
        elif event[0] == "evict":
            _, block, culprit = event
            before = last.get(block, ("none",))
            asked = before[0] == "look"
            ended.append(
                (
                    before[1] if asked else history.NOBODY,
                    culprit,
                    asked and before[2],
                    clock - before[3] if asked else -1,
                )
            )
            last[block] = ("evict", culprit)
            clock += 1
    return looked, ended


@settings(max_examples=150, deadline=None)
@given(events())
def test_history_in_batches_is_the_history_event_by_event(done: list[tuple[Any, ...]]) -> None:
    table = BlockHistory(1 << 16)
    looked: list[Any] = []
    ended: list[Any] = []
    log = EventLog()
    for event in [*done, ("batch",)]:
        if event[0] == "look":
            _, tenant, blocks, found = event
            log.lookup([name_of(block) for block in blocks], found, tenant)
        elif event[0] == "evict":
            # As in the pool, where a group's number stands behind the hash.
            log.names.append(name_of(event[1]) + b"\0\0\0\0")
            log.culprits.append(event[2])
        else:
            one, two = table.take(log)
            looked += zip(one.tenant.tolist(), one.cause.tolist(), one.by.tolist(), strict=True)
            columns = (two.whose, two.by, two.used, two.age)
            ended += zip(*(column.tolist() for column in columns), strict=True)
            log = EventLog()
    assert (looked, ended) == plainly(done)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 20), max_size=60))
def test_reuse_distance_is_the_number_of_others_in_between(keys: list[int]) -> None:
    told = ReuseDistance(100)
    assert told.share == 4 and told.reach == 8192
    for i, key in enumerate(keys):
        before = [j for j in range(i) if keys[j] == key]
        expected = None if not before else 4 * len(set(keys[before[-1] + 1 : i]))
        assert told.distance(key) == expected


def test_what_is_kept_is_bounded() -> None:
    reuse = ReuseDistance(10_000)
    assert reuse.share == 8
    for key in range(20_000):
        reuse.distance(key)
    assert reuse.distance(0) is None and reuse.distance(19_999) == 8
    prefixes = PrefixTable(8)
    for i in range(1000):
        prefixes.add(name_of(i % 100 if i % 3 else 7), 0, 2, 1)
    assert len(prefixes) <= 8
    counts = [one for _, one in prefixes.most_asked()]
    assert prefixes.most_asked()[0][0] == name_of(7)[:8].hex()
    assert sum(one.requests for one in counts) + prefixes.dropped.requests == 1000
    tenants = TenantNames()
    numbers = [tenants.number(f"t{i}") for i in range(400)]
    assert max(numbers) == 253 and tenants.name(numbers[399]) == OTHERS
    assert BlockHistory(1000).nbytes == 1024 * 16


def test_windows_grow_when_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patches.kv.cache_counts._MOST_ROWS", 8)
    tenants = TenantNames()
    tenants.number("a")
    kept = CacheCounts(tenants, {}, 1.0)
    kept.start(100.5)
    for second in range(100, 130):
        kept.add(codes(ASKED, 0), second)
        kept.close(second + 1.0)
    kept.sum_up()
    rows = list(kept.rows())
    assert len(rows) <= 9
    assert sum(row[-1] for row in rows) == sum(range(100, 130)) == kept.total(ASKED)
    ends = [row[0] for row in rows]
    assert ends == sorted(ends) and all(end % kept.window_s == 0 for end in ends) and kept.window_s >= 4


# the patch


TRAFFIC = [
    *(request(i, 0.3 * i, prompt=560, output=120, tenant=LONG, shared=320) for i in range(14)),
    *(request(50 + i, 0.3 + 0.2 * i, prompt=100, output=40, tenant=SHORT, shared=64) for i in range(60)),
    # The first documents once more, long after others have taken their place.
    *(
        replace(request(i, 40 + i, prompt=560, output=8, tenant=LONG, shared=320), request_id=f"again{i}")
        for i in range(3)
    ),
]


def served(enable: str, blocks: int = 110) -> tuple[VirtualRun, dict[str, Any]]:
    with installed(enable) as installation:
        engine = VirtualEngine(
            model_dir("llama-3.1-8b"),
            EngineFlags(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=1024),
            ConstantStep(),
            blocks,
        )
        try:
            return engine.run(workload(TRAFFIC)), installation.receipt()
        finally:
            engine.shutdown()


def test_a_virtual_run_writes_what_its_other_records_say() -> None:
    run, receipt = served("cachedash")
    cache = run.tables["cache"].to_pandas()
    requests = run.tables["requests"].to_pandas()
    sums = cache.groupby("measure")["value"].sum()
    assert parquet_bytes("cache", run.tables["cache"]) == parquet_bytes(
        "cache", served("cachedash")[0].tables["cache"]
    )
    by_tenant = cache.groupby(["measure", "tenant"])["value"].sum()
    for tenant, part in requests.groupby("tenant"):
        assert by_tenant["requests", tenant] == len(part)
        assert by_tenant["asked_blocks", tenant] == ((part["prompt_tokens"] - 1) // 16).sum()
        assert by_tenant["found_blocks", tenant] * 16 == part["cached_tokens"].sum() > 0
        missed = by_tenant["missed_blocks", tenant]
        assert missed + by_tenant["found_blocks", tenant] == by_tenant["asked_blocks", tenant]
    assert sums["preemptions"] == requests["preemptions"].sum() > 0
    lost = cache[(cache["measure"] == "recomputed_tokens") & (cache["kind"] == "preemption")]["value"].sum()
    assert lost == requests["recomputed_tokens"].sum() > 0
    assert sums["evicted_blocks"] == run.tables["steps"].to_pandas()["evicted"].sum() > 0
    causes = Counter(cache[cache["measure"] == "missed_blocks"].groupby("kind")["value"].sum().to_dict())
    assert causes["never"] > 0 and causes["evicted"] + causes["cut"] > 0
    again = cache[(cache["measure"] == "recomputed_tokens") & (cache["kind"] == "eviction")]["value"].sum()
    assert again == 16 * (causes["evicted"] + causes["cut"])
    # Over time, in windows of five seconds.
    assert cache["t_ns"].between(1, round(run.virtual_s * 1e9) + 5 * 10**9).all()
    assert cache["t_ns"].nunique() > 3
    metrics = receipt["metrics"]["cachedash"]
    assert metrics["cache_found_blocks"] == sums["found_blocks"]
    assert metrics["recomputed_after_eviction_tokens"] == again
    assert receipt["hooks"]["cachedash"]["hits"] > 0


def test_it_changes_nothing() -> None:
    engine = VirtualEngine(
        model_dir("llama-3.1-8b"),
        EngineFlags(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=1024),
        ConstantStep(),
        110,
    )
    try:
        stock = engine.run(workload(TRAFFIC))
    finally:
        engine.shutdown()
    assert stock.schedule_digest == served("cachedash")[0].schedule_digest
    assert "cache" not in stock.tables


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_it_says_who_pushed_whose_blocks_out(async_scheduling: bool) -> None:
    config = make_config(async_scheduling=async_scheduling)
    rng = np.random.default_rng(1)
    chat, doc = rng.integers(3, 1000, 129).tolist(), rng.integers(3, 1000, 200).tolist()
    with installed("cachedash"):
        scheduler = make_scheduler(config, 17)
        report = adapter.runtime_of(scheduler).reports["cachedash"]  # type: ignore[union-attr]
        assert json.loads(report(""))["sums"] == []
        for i, (prompt, tenant) in enumerate(((chat, "a"), (chat, "a"), (doc, 'b"\n'), (chat, "a"))):
            run_to_end(scheduler, [make_request(config, f"r{i}", prompt, max_tokens=1, tenant=tenant)])
        told = json.loads(report("table"))
    sums = {tuple(names): value for *names, value in told["sums"]}
    # 8 blocks of the chat, of which the document's 13 of 16 leave some; the look-up ends at the first that is gone.
    assert sums["missed_blocks", "a", "never", ""] == 8
    assert sums["missed_blocks", 'b"\n', "never", ""] == 12
    gone = sums["missed_blocks", "a", "evicted", 'b"\n']
    assert gone == 5 == sums["evicted_blocks", "a", "used", 'b"\n']
    assert sums["found_blocks", "a", "device", ""] == 8 + 3
    assert sums["recomputed_tokens", "a", "eviction", ""] == 16 * gone
    prefixes = told["prefixes"]
    assert [row[1:] for row in prefixes] == [["a", 3, 24, 11], ['b"\n', 1, 12, 0]]
    assert set(told["table"]) == {"t_ns", "measure", "tenant", "kind", "by", "value"}


def test_salts_are_told_apart() -> None:
    config = make_config()
    prompt = np.random.default_rng(2).integers(3, 1000, 129).tolist()
    with installed("cachedash"):
        scheduler = make_scheduler(config, 101)
        for name, salt in (("a", "one"), ("b", "two"), ("c", "one"), ("d", "two")):
            sent = make_request(config, name, prompt, max_tokens=1, tenant=name)
            sent.cache_salt = salt
            sent.block_hashes.clear()
            sent.update_block_hashes()
            run_to_end(scheduler, [sent])
        told = json.loads(adapter.runtime_of(scheduler).reports["cachedash"](""))  # type: ignore[union-attr]
    sums = {
        tuple(names): value for *names, value in told["sums"] if names[0] in ("missed_blocks", "found_blocks")
    }
    assert sums == {
        ("missed_blocks", "a", "never", ""): 8,
        ("missed_blocks", "b", "other_salt", ""): 8,
        ("found_blocks", "c", "device", ""): 8,
        ("found_blocks", "d", "device", ""): 8,
    }


def test_a_sibling_that_came_too_early_is_told() -> None:
    """Two requests with one long prefix, admitted while the first of them is still being computed, chunk by chunk."""
    config = make_config(max_num_batched_tokens=64)
    shared = np.random.default_rng(3).integers(3, 1000, 320).tolist()
    with installed("cachedash"):
        scheduler = make_scheduler(config, 201)
        first = make_request(config, "first", [*shared, 1, 2, 3], max_tokens=1, tenant="a")
        second = make_request(
            config, "second", [*shared, 4, 5, 6], max_tokens=1, tenant="b", arrival_time=1.0
        )
        scheduler.scheduler_config.long_prefill_token_threshold = 32
        run_to_end(scheduler, [first, second])
        told = json.loads(adapter.runtime_of(scheduler).reports["cachedash"](""))  # type: ignore[union-attr]
    sums = {tuple(names): value for *names, value in told["sums"]}
    assert sums["missed_blocks", "b", "unlanded", ""] + sums["found_blocks", "b", "device", ""] == 20
    assert sums["missed_blocks", "b", "unlanded", ""] > 0


def test_knobs_have_units() -> None:
    assert all(PATCH.unit(name) for name in CachedashKnobs.model_fields)
