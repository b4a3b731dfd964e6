"""A trace as a workload: its times and lengths, equal tokens for equal blocks, and the same bytes everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from harness.cache_bounds import infinite_hits
from harness.cache_trace import read_trace
from harness.errors import UserError
from tests.workloads import trace_files as files
from workloads import planned_load
from workloads.request import Workload
from workloads.trace_parquet import export, load
from workloads.traces import TraceChoice, Window, build, choose, open_trace, select
from workloads.traces.content import FIRST_ID
from workloads.traces.summary import Gatherer
from workloads.traces.window import read_window

S = 1_000_000_000


def choice(tmp_path: Path, name: str, window: Window | None = None, **other: int) -> TraceChoice:
    return choose(files.write(tmp_path / name, files.SMALL[name]), window=window, **other)  # type: ignore[arg-type]


@pytest.fixture
def moon(tmp_path: Path) -> Workload:
    return build(choice(tmp_path, "mooncake"), 0)


def test_times_and_lengths_are_the_traces(moon: Workload) -> None:
    assert [request.intended_ns for request in moon.requests] == [0, 3 * S // 2, 3 * S]
    assert [len(request.prompt) for request in moon.requests] == [1200, 1100, 700]
    assert [len(request.output) for request in moon.requests] == [20, 30, 5]
    assert [(phase.number, phase.name, phase.end_ns, phase.measured) for phase in moon.phases] == [
        (1, "trace", 4 * S, True)
    ]
    assert [tenant.name for tenant in moon.tenants] == ["trace"]
    assert any("one tenant, 'trace'" in note for note in moon.notes)


def test_prompts_share_exactly_the_blocks_that_have_one_name(moon: Workload) -> None:
    first, second, third = (request.prompt for request in moon.requests)
    assert np.array_equal(first[:1024], second[:1024])
    assert not np.any(first[1024:1040] == second[1024:1040])
    assert np.array_equal(first[:512], third[:512])
    assert not np.any(first[512:528] == third[512:528])
    for request in moon.requests:
        assert request.prompt.dtype == np.int32
        assert request.prompt.min() >= FIRST_ID
        assert max(request.prompt.max(), request.output.max()) < 128_256
        assert sum(part.tokens for part in request.segments) == len(request.prompt)


def test_a_last_block_without_a_name_is_like_no_other(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 2, "hash_ids": [0, 1]},
        {"timestamp": 1, "input_length": 1100, "output_length": 2, "hash_ids": [0, 1]},
    ]
    first, second = build(choose(files.write(tmp_path / "t", files.lines(*rows))), 0).requests
    assert np.array_equal(first.prompt[:1024], second.prompt[:1024])
    assert not np.any(first.prompt[1024:1040] == second.prompt[1024:1040])


def test_prompts_without_names_of_blocks_share_nothing(tmp_path: Path) -> None:
    row = "2023-11-16 18:17:06,400,7\n"
    path = files.write(tmp_path / "t", files.AZURE_2023 + 3 * row)
    rows = planned_load.describe(build(choose(path), 0))
    assert planned_load.total(rows).shared_tokens == 0


def test_sharing_is_what_the_summary_and_an_infinite_cache_say(shared_dir: Path) -> None:
    path = shared_dir / "data" / "traces" / "mooncake_conversation.jsonl"
    source = open_trace(path)
    gathered, _ = read_window(source, Window(), lambda: Gatherer(lambda _: "", None))
    figures = gathered.figures()
    assert figures.shared_blocks == infinite_hits(read_trace(path)) == 105_710
    assert (figures.requests, figures.input.mean, figures.input.p50) == (12_031, 12_035.1, 6909)
    part = choose(path, window=Window(0, 60))
    load_rows = planned_load.describe(build(part, 0))
    assert planned_load.total(load_rows).requests == len(select(part).rows)
    shared = planned_load.total(load_rows).hit_rate_bound
    gathered, _ = read_window(source, Window(0, 60), lambda: Gatherer(lambda _: "", None))
    assert shared == pytest.approx(gathered.figures().shared_share, abs=0.03)


def test_the_window_counts_from_the_earliest_request(tmp_path: Path) -> None:
    part = build(choice(tmp_path, "bailian", Window(0.5, 100)), 0)
    assert [request.intended_ns for request in part.requests] == [S // 4, 60_114_000_000]
    assert part.phases[0].end_ns == 61 * S
    assert part.requests[1].session == "chat-7"
    short = build(choice(tmp_path, "bailian", Window(0.5, 10)), 0)
    assert short.phases[0].end_ns == 10 * S


def test_scales(tmp_path: Path) -> None:
    chosen = choice(tmp_path, "mooncake")
    fast = build(chosen, 0, rate_scale=4)
    assert [request.intended_ns for request in fast.requests] == [0, 3 * S // 8, 3 * S // 4]
    assert fast.phases[0].end_ns == S
    small = build(chosen, 0, length_scale=0.1)
    assert [len(request.prompt) for request in small.requests] == [120, 110, 70]
    assert [len(request.output) for request in small.requests] == [2, 3, 1]
    first, second, _ = (request.prompt for request in small.requests)
    assert np.array_equal(first[:102], second[:102])
    assert not np.any(first[102:110] == second[102:])


def test_the_seed_decides_content_and_nothing_of_the_trace(tmp_path: Path) -> None:
    chosen = choice(tmp_path, "mooncake")
    one, other = build(chosen, 0), build(chosen, 1)
    assert one.sha256 == build(chosen, 0).sha256 != other.sha256
    for a, b in zip(one.requests, other.requests, strict=True):
        assert (a.intended_ns, len(a.prompt), len(a.output)) == (b.intended_ns, len(b.prompt), len(b.output))
        assert not np.array_equal(a.prompt, b.prompt)


def test_every_process_builds_the_same_bytes(tmp_path: Path) -> None:
    path = files.write(tmp_path / "t", files.SMALL["bailian"])
    code = f"from workloads.traces import *; from pathlib import Path; print(build(choose(Path({str(path)!r})), 3).sha256)"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "77")
    }
    assert found == {f"{build(choose(path), 3).sha256}\n"}
    # Guards the token ids themselves: results of one version are compared with those of another.
    prompt = build(choose(path), 3).requests[0].prompt
    assert prompt[:3].tolist() == GOLDEN


GOLDEN = [29019, 126788, 103016]


def test_ties_keep_the_order_of_the_file_and_ids_rise_with_it(tmp_path: Path) -> None:
    rows = [dict(files.MOONCAKE[i % 3], timestamp=5) for i in range(12)]
    built = build(choose(files.write(tmp_path / "t", files.lines(*rows))), 0)
    assert [len(r.prompt) for r in built.requests] == [1200, 1100, 700] * 4
    assert all(a.request_id < b.request_id for a, b in pairwise(built.requests))
    assert [r.index for r in built.requests] == list(range(12))


def test_requests_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    built = build(choice(tmp_path, "mooncake", max_tokens=1130), 0)
    assert [len(request.prompt) for request in built.requests] == [1100, 700]
    assert any("1 row of the window longer than 1,130 tokens" in note for note in built.notes)
    with pytest.raises(UserError, match="all 3 requests of the window are longer than 100 tokens"):
        build(choice(tmp_path, "mooncake", max_tokens=100), 0)


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    chosen = choice(tmp_path, "mooncake", Window(0, 1))
    chosen.path.write_text(files.SMALL["mooncake"] + "\n")
    with pytest.raises(UserError, match="has changed since this run was planned"):
        build(chosen, 0)


def test_an_empty_window_says_what_the_trace_spans(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no request between 10 s and 20 s of the trace, which spans 3\.0 s"):
        build(choice(tmp_path, "mooncake", Window(10, 10)), 0)
    for numbers in ((-1.0, None), (float("inf"), None), (0.0, float("nan")), (0.0, 0.0)):
        with pytest.raises(UserError):
            Window(*numbers)


def test_a_choice_survives_its_json(tmp_path: Path) -> None:
    chosen = choice(tmp_path, "mooncake", Window(1, None, 3), max_tokens=5000)
    assert TraceChoice.from_json(chosen.to_json(), chosen.path) == chosen
    assert str(tmp_path) not in str(chosen.to_json())


def test_it_can_be_written_as_parquet_and_read_back(tmp_path: Path, moon: Workload) -> None:
    export(moon, tmp_path / "t.parquet")
    assert load(tmp_path / "t.parquet").sha256 == moon.sha256
