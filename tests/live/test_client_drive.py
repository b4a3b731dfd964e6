"""Worker processes: shares, the way there and back by files, and what happens when one dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engines.live.client import Drive, Options, drive, estimate_workers, make_target
from harness.engines.live.client.files import read_observed, read_sends, write_observed, write_sends
from harness.engines.live.client.observed import Observed
from harness.engines.live.client.open_loop import Progress
from harness.engines.live.client.sends import sends_of, share
from harness.engines.live.client.tables import request_table, token_table
from harness.errors import RunFailed, UserError
from harness.records import parquet_bytes
from tests.live.mock_server import MockServer, Scenario
from tests.live.small_workload import ask, many, workload


@given(st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=30), st.integers(1, 5))
def test_sessions_stay_whole_and_everything_is_dealt_once(sessions: list[str], workers: int) -> None:
    sends = sends_of(workload(*(ask(f"r{i}", i, session=s) for i, s in enumerate(sessions))))
    shares = share(sends, workers)
    assert sorted(s.request_id for part in shares for s in part) == sorted(s.request_id for s in sends)
    for session in set(sessions) - {""}:
        assert sum(any(s.session == session for s in part) for part in shares) == 1
    for part in shares:
        assert [s.intended_ns for s in part] == sorted(s.intended_ns for s in part)
    assert [[s.request_id for s in part] for part in share(sends, workers)] == [
        [s.request_id for s in part] for part in shares
    ]


def test_requests_survive_their_file(tmp_path: Path) -> None:
    sends = sends_of(workload(ask("a", 0, prompt=5, cancel_ms=9), ask("b", 1, prompt=1, session="s")))
    write_sends(tmp_path / "f", sends)
    for old, new in zip(sends, read_sends(tmp_path / "f"), strict=True):
        assert new.prompt.tolist() == old.prompt.tolist()
        assert all(
            getattr(new, n) == getattr(old, n) for n in ("request_id", "intended_ns", "cancel_ns", "session")
        )


def test_observations_survive_their_file(tmp_path: Path) -> None:
    bare = Observed(
        *("a", 5, None, None, None, None, None, None, "failed", None, "why", None, None, None, 0, None, True),
        *(None, None, np.zeros(0, np.int64), np.zeros(0, np.int32), None),
    )
    full = Observed(
        *("b", 5, 6, 7, 8, 9, 10, 11, "ok", 200, "", 1.5, 20, 16, 3, 3, False, "length", "cmpl-b"),
        *(np.array([8, 10], np.int64), np.array([1, 2], np.int32), np.array([4, 5, 6], np.int32)),
    )
    write_observed(tmp_path / "f", [bare, full])
    for old, new in zip([bare, full], read_observed(tmp_path / "f"), strict=True):
        for field in fields(Observed):
            a, b = getattr(old, field.name), getattr(new, field.name)
            if isinstance(a, np.ndarray):
                assert (b.tolist(), b.dtype) == (a.tolist(), a.dtype)
            else:
                assert a == b, field.name


def test_two_workers_drive_one_workload() -> None:
    told: list[Progress] = []
    with MockServer({"*": Scenario(first_s=0.02, interval_s=0.01, cached=0)}) as mock:
        load = workload(*many(40, 40, tokens=5))
        options = Options(keep_token_ids=True)
        report = drive(load, make_target(mock.url, "m"), options, workers=2, on_progress=told.append)
        seen = mock.seen()
    assert [one.request_id for one in report.requests] == [r.request_id for r in load.requests]
    assert {one.status for one in report.requests} == {"ok"}
    assert [use.requests for use in report.workers] == [20, 20]
    assert sum(use.tokens for use in report.workers) == 200
    assert all(use.cpu_s > 0 for use in report.workers)
    assert report.lateness.requests == 40
    assert all(one.token_ids is not None and len(one.token_ids) == 5 for one in report.requests)
    assert told
    assert told[-1].sent <= 40
    requests, tokens = request_table(load, report), token_table(report)
    assert parquet_bytes("requests", requests)
    assert parquet_bytes("tokens", tokens)
    assert requests["output_tokens"].to_pylist() == [5] * 40
    assert tokens["index"].to_pylist() == [0, 1, 2, 3, 4] * 40
    assert (
        tokens["t_ns"].to_pylist()[:5]
        == np.repeat(report.requests[0].chunk_ns, report.requests[0].chunk_tokens).tolist()
    )
    # both workers and the server keep one clock
    for one in report.requests:
        arrived_ns = seen[one.request_id]["arrived_ns"] - report.epoch_ns
        assert one.sent_ns is not None
        assert one.first_token_ns is not None
        assert one.intended_ns <= one.sent_ns <= arrived_ns <= one.first_token_ns


def test_a_dead_worker_is_said_and_leaves_nothing() -> None:
    with MockServer({"*": Scenario(stall_after=0)}) as mock:
        victims: list[int] = []

        def kill() -> None:
            if not victims:
                victims.append(ready._workers[1]._process.pid)
                os.kill(victims[0], signal.SIGKILL)

        with Drive(workload(*many(4, 1)), make_target(mock.url, "m"), workers=2) as ready:
            pids = [worker._process.pid for worker in ready._workers]
            folder = ready._folder
            assert folder is not None
            with pytest.raises(RunFailed, match="client worker 1 ended by signal 9"):
                ready.run(should_stop=kill)
    assert victims == [pids[1]]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not folder.exists()


def test_a_run_can_be_stopped() -> None:
    begun = time.monotonic()
    with (
        MockServer({"*": Scenario(stall_after=0)}) as mock,
        pytest.raises(RunFailed, match="stopped: the server died"),
    ):
        drive(
            workload(*many(4, 1)),
            make_target(mock.url, "m"),
            workers=1,
            should_stop=lambda: "the server died",
        )
    assert time.monotonic() - begun < 60


def test_the_key_is_in_no_file() -> None:
    with (
        MockServer() as mock,
        Drive(workload(ask("a")), make_target(mock.url, "m", "secret-key"), workers=1) as ready,
    ):
        assert ready._folder is not None
        assert all(b"secret-key" not in path.read_bytes() for path in ready._folder.iterdir())
        report = ready.run()
        assert mock.seen()["a"]["headers"]["Authorization"] == "Bearer secret-key"
    assert report.requests[0].status == "ok"


def test_workers_follow_the_offered_tokens() -> None:
    assert estimate_workers(workload(ask("a")), 8) == 1
    busy = workload(*many(50, 100, tokens=2000))  # 20,000 tokens a second
    assert estimate_workers(busy, 8) == 2
    assert estimate_workers(busy, 1) == 1


def test_an_empty_workload_is_refused() -> None:
    with pytest.raises(UserError, match="no request"):
        Drive(workload(), make_target("http://127.0.0.1:1", "m"))


def test_the_throughput_script_runs(root: Path) -> None:
    """At a rate that any machine bears; what it prints on a quiet one is not this test's business."""
    command = [sys.executable, "scripts/client_throughput.py", "--tools", "ours,guidellm", "--guidellm", ""]
    words = ["--rate", "200", "--tokens", "20", "--token-rate", "100", "--seconds", "1"]
    done = subprocess.run(
        [*command, *words], cwd=root, capture_output=True, text=True, timeout=120, check=True
    )
    assert "10/10 requests, 200 events" in done.stdout
    assert "guidellm           not installed" in done.stdout
    assert done.stderr == ""
