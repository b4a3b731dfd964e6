"""Closed loop: a measured run replayed on the virtual engine, calibration frozen.

Guards the whole chain from kernel tables to TTFT. The one public run is mostly queueing, so small errors of
its means say little about an idle engine: the requests that did not queue are checked on their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from harness.measured_config import flags_of
from harness.measured_profile import profile_for
from harness.measured_run import read_measured_run
from harness.validate import validate
from harness.validation_figures import Validation, percentile


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "request_id": f"bench-{i}",
            "input_toks": 64,
            "output_toks": 8,
            "arrival_time": 1000.0 + i,
            "queued_ts": 50.0 + i,
            "scheduled_ts": 50.0001 + i,
            "first_token_ts": 50.05 + i,
            "last_token_ts": 50.2 + i,
        }
        for i in range(count)
    ]


META: dict[str, Any] = {
    "model": "/models/Llama-3.1-8B",
    "engine_kwargs": {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "max_model_len": 4096},
    "hardware": {"device_name": "NVIDIA GeForce RTX 4090", "device_total_memory_bytes": 25250627584},
    "kv_cache": {"num_gpu_blocks": 500},
}


def write(folder: Path, requests: list[dict[str, Any]], meta: dict[str, Any], *, ids: bool = True) -> Path:
    content = []
    for i, r in enumerate(requests):
        row: dict[str, Any] = {"input_toks": r["input_toks"], "output_toks": r["output_toks"]}
        content.append(row | {"input_tok_ids": [5 + i] * int(r["input_toks"])} if ids else row)
    (folder / "requests.jsonl").write_text("".join(json.dumps(r) + "\n" for r in requests), encoding="utf-8")
    (folder / "workload.jsonl").write_text("".join(json.dumps(r) + "\n" for r in content), encoding="utf-8")
    (folder / "run_meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def replay(request: pytest.FixtureRequest) -> Validation:
    shared: Path = request.getfixturevalue("shared_dir")
    return validate(shared / "data" / "rtx4090-llama31-8b")


@pytest.mark.slow
def test_the_measured_run_is_reproduced(replay: Validation) -> None:
    assert replay.requests == 300
    assert replay.blocks == 2588
    for metric, statistics in replay.metrics.items():
        assert abs(statistics["mean"].error_pct) < 2.0, metric
        assert abs(statistics["p99"].error_pct) < 5.0, metric
    assert 150 < replay.preemptions < 250
    assert replay.extrapolated["any"] == 0.0
    assert replay.unmeasured["any"] == 0.0


@pytest.mark.slow
def test_requests_that_did_not_queue(replay: Validation) -> None:
    unqueued = replay.unqueued
    assert unqueued is not None
    assert unqueued.requests >= 5
    assert abs(unqueued.mean.error_pct) < 10.0 or abs(unqueued.error_steps) < 1.0
    # One that came while the engine still caught up with its first launch is further off.
    assert unqueued.close >= unqueued.requests - 1


@pytest.mark.slow
def test_speed_and_json(replay: Validation, capsys: pytest.CaptureFixture[str]) -> None:
    written = json.loads(json.dumps(replay.to_json(), allow_nan=False))
    assert {"speedup", "metrics"} <= set(written)
    for metric in ("ttft", "tpot", "e2e"):
        assert set(written["metrics"][metric]) == {
            "mean_err_pct",
            "p50_err_pct",
            "p90_err_pct",
            "p99_err_pct",
        }
    with capsys.disabled():
        print(
            f"\n{replay.speedup:.1f} times real time, {replay.wall_s / replay.upstream_s:.2f} times vLLM's own",
            end="",
        )
    assert replay.speedup > 1.0  # a sanity bound only: 30 and more on an idle core


def test_a_small_run_of_ones_own(tmp_path: Path) -> None:
    result = validate(write(tmp_path, rows(3), META))
    assert (result.requests, result.blocks) == (3, 500)
    # 64 tokens on an idle RTX 4090: one step of about 19 ms.
    assert 0.015 < result.metrics["ttft"]["mean"].replayed < 0.025
    assert result.metrics["ttft"]["mean"].measured == pytest.approx(0.05)
    assert result.metrics["tpot"]["mean"].measured == pytest.approx(0.15 / 7)
    again = validate(tmp_path)
    assert again.schedule_digest == result.schedule_digest
    fewer = validate(tmp_path, blocks=256)
    assert fewer.blocks == 256
    assert fewer.flags.max_model_len == 4080
    assert any("lowered from 4096 to 4080" in note for note in fewer.notes)
    with pytest.raises(UserError, match="--blocks 6 or more"):
        validate(tmp_path, blocks=5)


def test_unrecorded_blocks_are_derived_and_said(tmp_path: Path) -> None:
    meta = META | {"kv_cache": {}}
    result = validate(write(tmp_path, rows(2), meta, ids=False))
    # Fewer tokens and requests than the profile's stock leave a little more for the cache.
    assert 2588 < result.blocks < 2800
    assert any("derived" in note for note in result.notes)
    assert any("share no prefix" in note for note in result.notes)


def test_flags_come_from_the_run(tmp_path: Path) -> None:
    run = read_measured_run(write(tmp_path, rows(1), META))
    notes: list[str] = []
    flags = flags_of(run, profile_for(run, None, None, notes), notes)
    assert (flags.max_num_seqs, flags.max_num_batched_tokens, flags.max_model_len) == (64, 1024, 4096)
    assert flags.async_scheduling


def test_rows_without_a_token_are_left_out(tmp_path: Path) -> None:
    cut = rows(3)
    cut[1]["first_token_ts"] = cut[1]["last_token_ts"] = None
    run = read_measured_run(write(tmp_path, cut, META))
    assert (len(run.requests), run.skipped) == (2, 1)


def test_percentiles_are_nearest_rank() -> None:
    assert [percentile([3.0, 1.0, 2.0], p) for p in (1, 50, 67, 99)] == [1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input_toks": 0}, r"requests.jsonl: line 2: input_toks: "),
        ({"first_token_ts": 1.0}, r"requests.jsonl: line 2: .*must not decrease"),
        ({"request_id": "bench-0"}, r"line 2: request_id 'bench-0' occurs twice"),
        ({"arrival_time": "soon"}, r"line 2: arrival_time: "),
    ],
)
def test_a_malformed_row_says_file_and_line(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    bad = rows(3)
    folder = write(tmp_path, bad, META)
    bad[1] |= change
    (folder / "requests.jsonl").write_text("".join(json.dumps(r) + "\n" for r in bad), encoding="utf-8")
    with pytest.raises(UserError, match=says):
        read_measured_run(folder)


def test_broken_files_say_which(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"requests.jsonl: no such file"):
        read_measured_run(tmp_path)
    write(tmp_path, rows(2), META)
    (tmp_path / "requests.jsonl").write_text('{"request_id": \n', encoding="utf-8")
    with pytest.raises(UserError, match=r"requests.jsonl: line 1: Invalid JSON"):
        read_measured_run(tmp_path)
    (tmp_path / "requests.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"requests.jsonl: no rows"):
        read_measured_run(tmp_path)
    write(tmp_path, rows(2), META)
    (tmp_path / "workload.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=r"2 requests, but .*workload.jsonl has 0 rows"):
        read_measured_run(tmp_path)
    write(tmp_path, rows(2), META)
    (tmp_path / "run_meta.json").write_text("[]", encoding="utf-8")
    with pytest.raises(UserError, match=r"run_meta.json: must be a JSON object"):
        read_measured_run(tmp_path)


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        (
            {"hardware": {"device_name": "Some GPU"}},
            r"no profile of the GPU 'Some GPU'; choose one with --profile",
        ),
        (
            {"resolved_config": {"model_config": {"quantization": "fp8"}}},
            r"quantised weights \[quantization fp8\]: not modelled",
        ),
        ({"kv_cache": {"num_gpu_blocks": -1}}, r"num_gpu_blocks is -1"),
        ({"engine_kwargs": {"max_num_seqs": 0}}, r"run_meta.json: engine flag 'max_num_seqs' is 0"),
    ],
)
def test_what_cannot_be_replayed_is_refused(tmp_path: Path, meta: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        validate(write(tmp_path, rows(1), META | meta))
