"""scripts/record_run.py writes what `bench validate` reads.

Guards the round trip through a real engine; what the times are worth is not checked, on a CPU least of all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.measured_run import read_measured_run
from scripts.record_run import read_workload

ENGINE = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "block_size": 32,
    "num_gpu_blocks_override": 64,
    "kv_cache_memory_bytes": 64 * 2**20,
}


def record(root: Path, model: Path, workload: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, str(root / "scripts" / "record_run.py"), "--model", str(model)),
            *("--workload", str(workload), "--out", str(out), "--engine", json.dumps(ENGINE)),
        ],
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_recorded_run_can_be_read(small_model: Path, root: Path, tmp_path: Path) -> None:
    sent = [list(range(3 + i, 43 + 2 * i)) for i in range(6)]
    workload = tmp_path / "workload.jsonl"
    rows = [
        {"input_toks": len(ids), "output_toks": 5, "arrival_time_ns": i * 10_000_000, "input_tok_ids": ids}
        for i, ids in enumerate(sent)
    ]
    workload.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    done = record(root, small_model, workload, tmp_path / "out")
    assert done.returncode == 0, done.stderr[-2000:]
    run = read_measured_run(tmp_path / "out")
    assert len(run.requests) == len(sent)
    assert run.prompts_known
    for request, ids in zip(run.requests, sent, strict=True):
        assert np.array_equal(request.prompt, ids)
        assert request.output_tokens == 5
        assert request.scheduled_s is not None
        assert request.queued_s <= request.scheduled_s < request.first_token_s < request.last_token_s
    assert run.recorded("num_gpu_blocks") == 64
    assert run.recorded("max_num_batched_tokens") == 256
    assert run.recorded("dtype") == "torch.float32"
    assert run.has_resolved_scheduler


def test_a_workload_that_cannot_be_sent_says_where(tmp_path: Path) -> None:
    workload = tmp_path / "workload.jsonl"
    workload.write_text('{"input_tok_ids": [1], "output_toks": 2}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: no arrival_time_ns"):
        read_workload(workload)
