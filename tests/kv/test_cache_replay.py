"""`bench cache`: the reader, the bounds, the replay in vLLM's pool, and what the patch is worth on real traffic.

The hit rates on the public trace guard the policy itself; they are taken on its first part to be quick.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from harness.cache_bounds import belady_hits, infinite_hits
from harness.cache_policies import QUEUES
from harness.cache_replay import measure, replay
from harness.cache_trace import BlockTrace, read_trace, served
from harness.commands import cache_cmd
from harness.errors import UserError

Paths = tuple[tuple[int, ...], ...]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def row(timestamp: float, *ids: int) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": 1, "output_length": 1, "hash_ids": list(ids)}


def random_trace(seed: int, requests: int) -> BlockTrace:
    """Paths in a tree with two ways at each depth, numbered as a heap is."""
    rng = random.Random(seed)
    paths = []
    for _ in range(requests):
        node, path = 0, []
        for _ in range(rng.randint(1, 4)):
            node = 2 * node + 1 + (rng.random() < 0.3)
            path.append(node)
        paths.append(tuple(path))
    return BlockTrace(tuple(paths))


# reading


def test_requests_come_in_order_of_time_and_ties_in_order_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", row(5, 0, 1), "", row(2, 0, 2), row(5, 3))
    trace = read_trace(path)
    assert trace.requests == ((0, 2), (0, 1), (3,))
    assert trace.blocks == 5


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ('{"timestamp": 1, "hash_ids": [0, 1', "not JSON"),
        ('{"timestamp": 1}', "hash_ids is missing"),
        ('{"timestamp": "now", "hash_ids": [0]}', "timestamp"),
        ('{"timestamp": 1, "hash_ids": [0, "1"]}', "hash_ids holds '1'"),
        ('{"timestamp": 1, "hash_ids": []}', "hash_ids is empty"),
        ('{"timestamp": 1, "hash_ids": [0, -4]}', "below 0"),
        ('{"timestamp": 1, "hash_ids": [1, 0]}', "block 1 has another block before it than in line 1"),
        ('{"timestamp": 1, "hash_ids": [7, 8, 7]}', "block 7 has another block before it"),
        ("[1, 2]", "expected an object"),
        ("NaN", "NaN is no number"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: str, says: str) -> None:
    path = write(tmp_path / "t.jsonl", row(0, 0, 1), bad)
    with pytest.raises(UserError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}: line 2: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_empty_and_binary_files_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="no request"):
        read_trace(write(tmp_path / "empty.jsonl"))
    binary = tmp_path / "t.parquet"
    binary.write_bytes(b"PAR1\xff\xfe\x00")
    with pytest.raises(UserError, match="not a text file"):
        read_trace(binary)


def test_a_trace_may_be_packed(tmp_path: Path) -> None:
    plain = write(tmp_path / "t.jsonl", row(5, 0, 1), row(2, 0, 2))
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(b"\xef\xbb\xbf" + plain.read_bytes().replace(b"\n", b"\r\n")))
    assert read_trace(packed) == read_trace(plain)


def test_ids_of_content_alone_are_read_as_prefixes(tmp_path: Path) -> None:
    rows = [{"chat_id": i, **row(i, *ids)} for i, ids in enumerate([(7, 8, 7), (8, 7), (7, 8)])]
    trace = read_trace(write(tmp_path / "bailian.jsonl", *rows))
    assert trace.requests == ((0, 1, 2), (3, 4), (0, 1))


def test_a_trace_that_names_no_blocks_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03,9,1")
    with pytest.raises(UserError, match="names no blocks of prompts"):
        read_trace(path)


def test_the_scan_doubles_the_traffic_and_repeats_nothing() -> None:
    trace = BlockTrace(((0, 1), (0, 1, 2)))
    mixed = list(served(trace, True))
    assert mixed[::2] == list(trace.requests)
    scan = [block for request in mixed[1::2] for block in request]
    assert [len(request) for request in mixed[1::2]] == [2, 3]
    assert len(set(scan)) == 5 and max(scan) < 0


# bounds


def best_hits(requests: Paths, blocks: int) -> int:
    """The most hits over all ways to choose what stays after each request, by trying them all."""

    def found(request: tuple[int, ...], kept: frozenset[int]) -> int:
        return sum(1 for _ in itertools.takewhile(kept.__contains__, request))

    states = {frozenset[int](): 0}
    for request in requests:
        after: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            total = hits + found(request, kept)
            others = sorted(kept - set(request))
            for count in range(min(len(others), blocks - len(request)) + 1):
                for rest in itertools.combinations(others, count):
                    state = frozenset({*request, *rest})
                    after[state] = max(after.get(state, 0), total)
        states = after
    return max(states.values())


@pytest.mark.parametrize("seed", range(6))
def test_belady_is_the_best_that_any_choice_can_reach(seed: int) -> None:
    trace = random_trace(seed, 12)
    for blocks in (4, 6):
        assert belady_hits(trace, blocks, scan=False) == best_hits(trace.requests, blocks)


def test_infinite_counts_each_repetition() -> None:
    assert infinite_hits(BlockTrace(((0, 1), (0, 1, 2), (0, 3)))) == 3


# replay


def slow_lru(requests: Paths, blocks: int) -> int:
    """Hits of LRU, written down plainly: a list, oldest first."""
    cached: list[int] = []
    hits = 0
    for request in requests:
        found = list(itertools.takewhile(cached.__contains__, request))
        hits += len(found)
        cached = [block for block in cached if block not in found]
        cached = cached[max(0, len(cached) + len(request) - blocks) :]
        cached += [block for block in reversed(request) if block not in cached]
    return hits


@pytest.mark.parametrize("scan", [False, True])
def test_lru_in_the_pool_is_lru(scan: bool) -> None:
    trace = random_trace(7, 200)
    for blocks in (4, 7, 12):
        result = measure(trace, "lru", blocks, scan=scan)
        assert result.hits == slow_lru(tuple(served(trace, scan)), blocks)
        assert result.requested == trace.blocks * (1 + scan)


@pytest.mark.parametrize("policy", list(QUEUES))
@pytest.mark.parametrize("in_flight", [1, 3])
def test_no_policy_passes_the_bounds(policy: str, in_flight: int) -> None:
    trace = random_trace(3, 400)
    for blocks in (5, 9, 14):
        got = measure(trace, policy, blocks, scan=True, in_flight=in_flight).hits
        assert 0 < got <= infinite_hits(trace)
        if in_flight == 1:
            assert got <= belady_hits(trace, blocks, True)


def test_a_request_longer_than_the_pool_keeps_what_fits() -> None:
    result = replay(((0, 1, 2, 3), (0, 1, 2, 3), (0,)), QUEUES["slru"], 3)
    assert (result.requested, result.hits, result.truncated) == (7, 4, 2)


def test_upstream_is_left_as_it_was() -> None:
    from vllm.v1.core import block_pool
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

    replay(((0,),), QUEUES["slru"], 3)
    assert block_pool.FreeKVCacheBlockQueue is FreeKVCacheBlockQueue


# what the patch is worth


@pytest.mark.parametrize(
    ("name", "blocks", "scan", "least_gain"),
    [
        ("conversation", 2500, False, 0.20),
        ("conversation", 10000, False, -0.01),
        ("conversation", 5000, True, 0.20),
        ("synthetic", 2500, False, -0.01),
        ("synthetic", 5000, True, 0.20),
    ],
)
def test_slru_on_the_first_part_of_a_public_trace(
    shared_dir: Path, name: str, blocks: int, scan: bool, least_gain: float
) -> None:
    path = shared_dir / "data" / "traces" / f"mooncake_{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path.name} is not beside this checkout")
    trace = BlockTrace(read_trace(path).requests[:3000])
    lru, slru = (measure(trace, policy, blocks, scan=scan).hit_rate for policy in ("lru", "slru"))
    assert slru >= lru * (1 + least_gain)


def test_knowing_the_next_requests_is_worth_more_than_the_past_on_a_public_trace(shared_dir: Path) -> None:
    path = shared_dir / "data" / "traces" / "mooncake_synthetic.jsonl"
    if not path.is_file():
        pytest.skip(f"{path.name} is not beside this checkout")
    trace = BlockTrace(read_trace(path).requests[:2000])
    lru, slru, both = (
        measure(trace, policy, 2500, scan=False).hit_rate for policy in ("lru", "slru", "slru-next64")
    )
    assert both >= max(1.2 * lru, 1.1 * slru)


# the command


@pytest.fixture
def bench() -> typer.Typer:
    app = typer.Typer()
    cache_cmd.register(app)
    app.command("other")(lambda: None)  # with one command only, typer would drop its name
    return app


def test_the_command_prints_a_table_and_writes_json(bench: typer.Typer, tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl", *(row(i, *request) for i, request in enumerate(random_trace(1, 60).requests))
    )
    out = tmp_path / "out.json"
    args = [
        "cache",
        str(path),
        "--blocks",
        "8,3",
        "--policies",
        "lru,slru,belady,infinite",
        "--json",
        str(out),
    ]
    result = CliRunner().invoke(bench, args, catch_exceptions=False)
    assert result.exit_code == 0
    assert "longer than 3 blocks" in result.output
    rows = json.loads(out.read_text())["rows"]
    assert [(r["scan_mix"], r["blocks"], r["policy"]) for r in rows] == [
        (scan, size, policy)
        for scan in (0, 1)
        for size in (3, 8)
        for policy in ("lru", "slru", "belady", "infinite")
    ]
    assert all(
        0 <= r["hit_rate"] <= 1 and r["hit_rate"] == pytest.approx(r["hits"] / r["requested"]) for r in rows
    )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--policies", "slrru"], "did you mean slru?"),
        (["--policies", ","], "--policies is empty"),
        (["--blocks", "0"], "not a positive whole number"),
        (["--blocks", "5,1e3"], "'1e3' is not a positive"),
        (["--blocks", "-5"], "not a positive"),
        (["--scan-mix", "2"], "neither 0 nor 1"),
        (["--in-flight", "0"], "must be 1 or more"),
    ],
)
def test_bad_options_are_user_errors(bench: typer.Typer, tmp_path: Path, args: list[str], says: str) -> None:
    path = write(tmp_path / "t.jsonl", row(0, 0))
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(bench, ["cache", str(path), *args], catch_exceptions=False)
    assert says in str(caught.value)
