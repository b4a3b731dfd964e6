"""Guards the sampler's process: how it starts and ends, and what it leaves however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.engines.live.gpu import Sampler, integrate, load

S = 1_000_000_000


def wait_for_rows(path: Path, size: int) -> None:
    """Until the partial file has grown past a size."""
    partial = path.with_name(f".{path.name}.partial")
    until = time.monotonic() + 20
    while partial.stat().st_size <= size:
        assert time.monotonic() < until, "no rows came"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            # of a process that has ended and that nobody waits for, only the name is left
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.usefixtures("fake_process")
def test_a_window_measured_by_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML_COUNT", "3")
    monkeypatch.setenv("FAKE_NVML_FAIL", "temperature_v:-1:3:0:99999")
    path = tmp_path / "seed-1" / "gpu.parquet"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "2,0,1"}
    epoch = time.monotonic_ns()
    with Sampler.start(path, epoch_ns=epoch, hz=50, first=2, env=environment) as sampler:
        assert sampler.absent is None
        assert [gpu.index for gpu in sampler.gpus] == [2, 0]
        start = time.monotonic_ns() - epoch
        time.sleep(0.5)
        end = time.monotonic_ns() - epoch
        assert not path.exists()
        report = sampler.stop()
        assert sampler.stop() is report
    assert (report.path, report.complete, report.problem, report.driver) == (path, True, "", "999.1")
    assert report.conduct["ticks"] >= 2
    assert report.conduct["late_p99_ms"] >= 0
    assert {one["field"] for one in report.conduct["nulls"]} == {"temperature_c"}
    assert is_gone(sampler.pid)
    assert [file.name for file in path.parent.iterdir()] == ["gpu.parquet"]
    samples = load(path)
    assert samples.gpus == sampler.gpus
    # on the run's clock, and covering the window however the machine was busy
    energy = integrate(samples, start, end)
    assert energy.joules == pytest.approx(2 * 100 * (end - start) / S, rel=0.01)


@pytest.mark.usefixtures("fake_process")
def test_a_stall_of_the_driver_is_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML_STALL", "1:400")
    path = tmp_path / "gpu.parquet"
    with Sampler.start(path, epoch_ns=time.monotonic_ns(), hz=50) as sampler:
        time.sleep(0.5)
    assert sampler.stop().conduct["missed"] >= 15
    samples = load(path)
    track = samples.track(samples.gpus[0].uuid)
    assert track.column("read_us")[1] >= 400_000
    energy = integrate(samples, int(track.t_ns[0]), int(track.t_ns[-1]), max_gap_ns=S * 4 // 10)
    assert not energy.valid
    assert "it was not sampled for" in energy.reason


@pytest.mark.usefixtures("fake_process")
def test_a_killed_sampler_leaves_what_can_be_saved(tmp_path: Path) -> None:
    path = tmp_path / "gpu.parquet"
    with Sampler.start(path, epoch_ns=time.monotonic_ns(), hz=100) as sampler:
        first_batch = path.with_name(f".{path.name}.partial").stat().st_size
        wait_for_rows(path, first_batch)
        os.kill(sampler.pid, signal.SIGKILL)
        assert is_gone(sampler.pid)
        assert not path.exists()
        report = sampler.stop()
    assert (report.complete, report.path) == (False, path)
    assert "the GPU sampler ended by itself (exit code -9)" in report.problem
    samples = load(path)
    times = samples.track(samples.gpus[0].uuid).t_ns
    assert len(times) > 1
    assert "before the window's end" in integrate(samples, int(times[0]), int(times[-1]) + S).reason
    assert [file.name for file in tmp_path.iterdir()] == ["gpu.parquet"]


@pytest.mark.usefixtures("fake_process")
def test_a_signal_ends_it_in_good_order(tmp_path: Path) -> None:
    path = tmp_path / "gpu.parquet"
    with Sampler.start(path, epoch_ns=time.monotonic_ns(), hz=0.1) as sampler:
        os.kill(sampler.pid, signal.SIGINT)
        os.kill(sampler.pid, signal.SIGTERM)
        assert is_gone(sampler.pid)
        assert path.is_file()
        assert sampler.stop().complete


@pytest.mark.usefixtures("fake_process")
@pytest.mark.parametrize("held_open", [False, True])
def test_it_ends_with_its_parent(tmp_path: Path, held_open: bool) -> None:
    path = tmp_path / "gpu.parquet"
    # a grandchild of the run may hold the pipe open: the sampler must see that its parent is gone all the same
    program = f"""
import os, sys, time
from pathlib import Path
from harness.engines.live.gpu import Sampler
sampler = Sampler.start(Path({str(path)!r}), epoch_ns=time.monotonic_ns())
if {held_open} and os.fork() == 0:
    os.close(1)
    time.sleep(60)
    os._exit(0)
print(sampler.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        parent.kill()
        parent.wait()
        assert is_gone(pid)
        assert path.is_file()
    finally:
        # what the parent forked is alone in its group
        try:
            os.killpg(parent.pid, signal.SIGKILL)
        except ProcessLookupError:
            assert not held_open
        parent.stdout.close()


def test_no_driver_library_is_said_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a file that is no library stands before any real one in the search
    (tmp_path / "lib").mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "lib"))
    (tmp_path / "lib" / "libnvidia-ml.so.1").write_bytes(b"")
    path = tmp_path / "out" / "gpu.parquet"
    with Sampler.start(path, epoch_ns=time.monotonic_ns()) as sampler:
        assert sampler.absent is not None
        assert sampler.absent.code == "no_library"
        assert is_gone(sampler.pid)
    report = sampler.stop()
    assert (report.path, report.complete, report.absent, report.problem) == (None, True, sampler.absent, "")
    assert not path.parent.exists()


@pytest.mark.usefixtures("fake_process")
def test_a_driver_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML_STALL", "0:60000")
    with Sampler.start(tmp_path / "gpu.parquet", epoch_ns=time.monotonic_ns(), timeout_s=2) as sampler:
        assert sampler.absent is not None
        assert sampler.absent.code == "no_answer"
        assert is_gone(sampler.pid)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("fake_process")
def test_a_driver_that_hangs_later_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML_STALL", "2:60000")
    path = tmp_path / "gpu.parquet"
    sampler = Sampler.start(path, epoch_ns=time.monotonic_ns(), hz=100)
    time.sleep(0.3)
    report = sampler.stop(timeout_s=0.5)
    assert not report.complete
    assert "did not end in 0.5 s" in report.problem
    assert is_gone(sampler.pid)
    assert report.path == path


@pytest.mark.usefixtures("fake_process")
def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Sampler.start(tmp_path / "file" / "gpu.parquet", epoch_ns=time.monotonic_ns()) as sampler:
        assert sampler.absent is not None
        assert "could not be written" in sampler.absent.text


@pytest.mark.parametrize(("hz", "first"), [(0, None), (1000, None), (float("nan"), None), (10, 0)])
def test_settings_out_of_range(tmp_path: Path, hz: float, first: int | None) -> None:
    with pytest.raises(ValueError, match=r"is (0|1000|nan), not "):
        Sampler.start(tmp_path / "gpu.parquet", epoch_ns=0, hz=hz, first=first)
