"""Guards the tape: whole records whatever ends its writer, growth, and files that are no tape.

Also how the engine's request ids are told apart. Does not guard what is written on it (test_telemetry_steps).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.engines.live.telemetry import layout
from harness.engines.live.telemetry.collect import collect
from harness.engines.live.telemetry.join import client_id, join
from harness.engines.live.telemetry.reader import read_tape
from harness.engines.live.telemetry.tape import Tape
from harness.errors import RunFailed
from harness.schema import arrow_schema

HEADER = {"created_ns": 5, "epoch_ns": 1_000, "pid": 1}


def step(tape: Tape, t_ns: int, chunks: list[tuple[int, int]]) -> None:
    values = dict.fromkeys(layout.STEP_INTS, 0) | {"t_ns": t_ns, "start_ns": t_ns, "end_ns": t_ns + 2_000}
    tape.write_chunks(layout.STEP_BODY, layout.STEP, chunks, *values.values(), 0.5)


def arrive(tape: Tape, row: int, engine_id: str, t_ns: int) -> None:
    tape.write_text(layout.ARRIVE_BODY, layout.ARRIVE, engine_id.encode(), row, t_ns, -1, 10)


def event(tape: Tape, row: int, kind: str, t_ns: int, value: float) -> None:
    tape.write_text(layout.EVENT_BODY, layout.EVENT, kind.encode(), row, t_ns, value)


def test_what_is_written_is_read_also_past_the_first_size(tmp_path: Path) -> None:
    path = tmp_path / "engine-1-0.tape"
    tape = Tape(path, HEADER)
    number = 20_000
    for i in range(number):
        step(tape, i, [(i, 2), (3, 4)] if i % 2 else [])
    arrive(tape, 0, "cmpl-ü-0-12345678", 7)
    # a tape that is still open is read as well
    for closed in (False, True):
        if closed:
            tape.close()
        read = read_tape(path)
        assert read.header == HEADER and len(read.steps) == number
        assert [s[0] for s in read.steps] == list(range(number))
        assert [s[-1] for s in read.steps[4:6]] == [[], [(5, 2), (3, 4)]]
        assert [r.engine_id for r in read.requests] == ["cmpl-ü-0-12345678"]
        assert read.requests[0].received_ns is None and read.requests[0].finish_reason is None
    assert path.stat().st_size > 1 << 20


def test_a_killed_writer_loses_nothing_that_was_written(tmp_path: Path, root: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.live.test_telemetry_tape import HEADER, Tape, step\n"
        "tape = Tape(Path(sys.argv[1]) / 'engine-1-0.tape', HEADER)\n"
        "for i in range(100): step(tape, 1_000 + i, [(1, 2)])\n"
        "print('written', flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"written\n"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    telemetry = collect(tmp_path)
    assert telemetry.steps["t_ns"].to_pylist() == list(range(100))
    assert telemetry.steps.schema.equals(arrow_schema("steps"))
    assert telemetry.batches["step_us"].to_pylist() == [2.0] * 100


def test_a_record_that_was_not_committed_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "engine-1-0.tape"
    tape = Tape(path, HEADER)
    step(tape, 1, [])
    with path.open("rb") as file:
        file.seek(layout.COMMITTED_AT)
        (committed,) = layout.COMMITTED.unpack(file.read(8))
    step(tape, 2, [])
    tape.close()
    with path.open("r+b") as file:
        file.seek(layout.COMMITTED_AT)
        file.write(layout.COMMITTED.pack(committed))
    assert [s[0] for s in read_tape(path).steps] == [1]


@pytest.mark.parametrize("spoil", ["empty", "magic", "cut", "kind", "length"])
def test_no_tape_is_one_clear_line(tmp_path: Path, spoil: str) -> None:
    path = tmp_path / "engine-1-0.tape"
    tape = Tape(path, HEADER)
    step(tape, 1, [])
    tape.close()
    blob = bytearray(path.read_bytes())
    first = len(blob) - layout.STEP_BODY.size
    if spoil == "empty":
        blob.clear()
    elif spoil == "magic":
        blob[0] = 0
    elif spoil == "cut":
        del blob[-1]
    elif spoil == "kind":
        blob[first] = 99
    else:
        blob[first + 1 : first + 5] = b"\0\0\0\0"
    path.write_bytes(blob)
    with pytest.raises(RunFailed, match="cannot be read as telemetry") as caught:
        collect(tmp_path)
    assert "\n" not in str(caught.value)


def test_nothing_at_all_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="left no telemetry"):
        collect(tmp_path)
    (tmp_path / "install-7.fault").write_text("DriftError: Scheduler.schedule changed\n")
    telemetry = collect(tmp_path)
    assert telemetry.faults == ("install-7.fault: DriftError: Scheduler.schedule changed",)
    assert telemetry.steps.num_rows == telemetry.requests.num_rows == telemetry.events.num_rows == 0


@pytest.mark.parametrize(
    ("engine_id", "name"),
    [
        ("cmpl-r001-0-0a1b2c3d", "r001"),
        ("cmpl-a-0-1-0a1b2c3d", "a-0"),
        ("3_cmpl-r001-0-0a1b2c3d", "r001"),
        ("chatcmpl-r-1-0a1b2c3d", "r-1"),
        ("cmpl-r001-0", None),
        ("r001", None),
        ("embd-r001-0-0a1b2c3d", None),
    ],
)
def test_ids_lead_back_to_the_client(engine_id: str, name: str | None) -> None:
    assert client_id(engine_id) == name


def test_the_ids_are_made_as_upstream_makes_them() -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.parallel_sampling import ParentRequest

    request = EngineCoreRequest(
        request_id="cmpl-p3-000017-0",
        prompt_token_ids=[1],
        mm_features=None,
        sampling_params=SamplingParams(n=2),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    InputProcessor.assign_request_id(request)
    assert request.request_id != "cmpl-p3-000017-0"
    assert client_id(request.request_id) == "p3-000017"
    child, _ = ParentRequest(request).get_child_info(1)
    assert child != request.request_id and client_id(child) == "p3-000017"


def test_join_and_two_engines(tmp_path: Path) -> None:
    first = Tape(tmp_path / "engine-9-0.tape", HEADER)
    arrive(first, 0, "cmpl-warm-0-00000000", 1_001)
    arrive(first, 1, "cmpl-b-0-11111111", 1_002)
    event(first, 1, "preempt", 1_005, 8.0)
    event(first, 0, "preempt", 1_006, 1.0)
    event(first, layout.NO_REQUEST, "cache_reset", 1_007, 1.0)
    # restarted
    second = Tape(tmp_path / "engine-3-0.tape", {**HEADER, "created_ns": 6, "pid": 3})
    arrive(second, 0, "cmpl-a-0-22222222", 1_010)
    arrive(second, 1, "cmpl-b-0-33333333", 1_011)
    event(second, 0, "preempt", 1_012, 3.0)
    event(second, 0, "resume", 1_013, 1.0)
    first.close()
    second.close()
    telemetry = collect(tmp_path)
    assert [engine["pid"] for engine in telemetry.engines] == [1, 3]
    joined = join(telemetry, ["a", "b", "c"])
    assert joined.requests["engine_id"].to_pylist() == ["cmpl-a-0-22222222", "cmpl-b-0-11111111", None]
    assert joined.requests["queued_ns"].to_pylist() == [10, 2, None]
    assert joined.requests["recomputed_tokens"].to_pylist() == [2, 0, None]
    assert (joined.unseen, joined.repeated, joined.strangers) == (("c",), ("b",), ("cmpl-warm-0-00000000",))
    assert [(e["t_ns"], e["kind"], e["request"]) for e in joined.events.to_pylist()] == [
        (5, "preempt", 1),
        (7, "cache_reset", None),
        (12, "preempt", 0),
        (13, "resume", 0),
    ]
    # another start of the run than the one that the engines were told
    assert collect(tmp_path, epoch_ns=0).requests["queued_ns"].to_pylist() == [1_001, 1_002, 1_010, 1_011]
