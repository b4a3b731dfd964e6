"""Guards what is read of a GPU, through nvidia-ml-py and ctypes into a library that plays the driver.

Not guarded: that the real driver behaves as its reference says.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pynvml
import pytest

from harness.engines.live.gpu import Absent, integrate, load, throttled
from harness.engines.live.gpu.loop import Conduct, sample
from harness.engines.live.gpu.nvml import Opened, open_gpus
from harness.engines.live.gpu.samples import GPUS_KEY
from harness.engines.live.gpu.writer import Writer, partial_of, salvage
from tests.live.gpu.conftest import FakeTime

S = 1_000_000_000
MS = 1_000_000
EPOCH = 5 * S
LOST = 15


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what the fake library does."""

    def put(**settings: object) -> None:
        for name, value in settings.items():
            monkeypatch.setenv(f"FAKE_NVML_{name.upper()}", str(value))

    return put


def opened(visible: str | None = None, order: str | None = None, first: int | None = None) -> Opened:
    found = open_gpus(visible, order, first)
    assert isinstance(found, Opened)
    return found


def record(time: FakeTime, path: Path, seconds: float, found: Opened | None = None) -> Conduct:
    """Sample on the test's clock, ten times a second."""
    found = found or opened()
    gpus = json.dumps([gpu.json() for gpu in found.gpus]).encode()
    writer = Writer(path, {GPUS_KEY: gpus})
    time.stop_ns = time.now_ns + round(seconds * S)
    conduct = sample(
        found.devices, writer, clock=time.clock, wait=time.wait, period_ns=100 * MS, epoch_ns=EPOCH
    )
    writer.finish()
    return conduct


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def test_one_reading(fake_time: FakeTime, script: Callable[..., None]) -> None:
    script(throttle="68@0")
    found = opened()
    assert found.driver == "999.1"
    fake_time.set(7 * S)
    assert found.devices[0].read(fake_time.clock, EPOCH, 2 * S) == {
        "t_ns": 2 * S,
        "due_ns": 2 * S,
        "read_us": 0.0,
        "gpu": 0,
        "uuid": "GPU-00000000-0000-0000-0000-000000000000",
        "error": "",
        "gpu_util": 0.8,
        "memory_util": 0.3,
        "memory_used_bytes": 10 << 30,
        "power_w": 100.0,
        # 1,000 J from before, and 2 s of 100 W
        "energy_mj": 1_200_000,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 2619,
        "temperature_c": 60,
        "throttle_mask": 68,
        "throttle": "sw_power_cap,hw_thermal",
    }


def test_five_hundred_watts_for_ten_seconds(
    fake_time: FakeTime, script: Callable[..., None], tmp_path: Path
) -> None:
    # case 10 of the list, from the driver's call to the joules
    script(power="100@0,500@2,100@12")
    record(fake_time, tmp_path / "gpu.parquet", 13)
    energy = integrate(load(tmp_path / "gpu.parquet"), 2 * S, 12 * S)
    assert energy.valid
    assert energy.method == "counter"
    assert energy.joules == pytest.approx(5000, abs=0.01)
    # the power reading at the very end already is that of the time after: half a sample's worth
    assert energy.power_j == pytest.approx(5000 - 400 * 0.1 / 2, abs=0.01)


def test_a_field_missing_from_the_first_sample_is_null_there(
    fake_time: FakeTime, script: Callable[..., None], tmp_path: Path
) -> None:
    # case 16 of the list, for every field in turn
    fields = ["energy", "power", "util", "memory", "clock", "temperature_v", "events"]
    script(fail=",".join(f"{name}:0:3:0:0" for name in fields))
    found = opened()
    record(fake_time, tmp_path / "gpu.parquet", 0.1, found)
    first, second = rows_of(tmp_path / "gpu.parquet")
    always = {"t_ns", "due_ns", "read_us", "gpu", "uuid", "error"}
    # the clocks are two calls of one field
    assert {name for name, value in first.items() if value is not None} == always | {"memory_clock_mhz"}
    assert first["error"] == ""
    assert all(value is not None for value in second.values())
    assert found.devices[0].nulls["power_w", "Not Supported"] == 1


def test_fields_that_a_gpu_never_gives(
    fake_time: FakeTime, script: Callable[..., None], tmp_path: Path
) -> None:
    script(fail="energy:0:3:0:999,temperature_v:0:999:0:999,util:0:3:0:999", power="100@0,500@2,100@12")
    record(fake_time, tmp_path / "gpu.parquet", 13)
    energy = integrate(load(tmp_path / "gpu.parquet"), 2 * S, 11 * S + 900 * MS)
    assert (energy.method, energy.counter_j) == ("power", None)
    assert energy.joules == pytest.approx(4950, abs=0.01)


def test_an_older_driver_is_asked_the_older_way(fake_time: FakeTime, script: Callable[..., None]) -> None:
    script(fail="events:0:13:0:0,temperature_v:0:13:0:0", throttle="64@0")
    device = opened().devices[0]
    for _ in range(2):
        row = device.read(fake_time.clock, EPOCH, 0)
        assert (row["throttle"], row["temperature_c"]) == ("hw_thermal", 61)
    assert not device.nulls


def test_a_gpu_that_vanishes(fake_time: FakeTime, script: Callable[..., None], tmp_path: Path) -> None:
    script(count=2, fail=f"all:1:{LOST}:30:9999")
    record(fake_time, tmp_path / "gpu.parquet", 13)
    samples = load(tmp_path / "gpu.parquet")
    gone = [row for row in rows_of(tmp_path / "gpu.parquet") if row["error"]]
    assert {row["gpu"] for row in gone} == {1}
    assert all(row["power_w"] is None for row in gone)
    energy = integrate(samples, 2 * S, 12 * S)
    assert not energy.valid
    assert "GPU-10000000" in energy.reason
    assert "it did not answer at 3.0 s (GPU is lost)" in energy.reason
    assert energy.by_gpu[0].joules == pytest.approx(1000)
    # before it went all is well
    assert integrate(samples, 0, 2 * S).joules == pytest.approx(400)


def test_a_gpu_that_is_lost_from_the_start(fake_time: FakeTime, script: Callable[..., None]) -> None:
    script(count=2, fail=f"handle:1:{LOST}:0:99")
    found = opened()
    assert [gpu.fault for gpu in found.gpus] == ["", "GPU is lost"]
    assert len(found.devices) == 1
    # unless it is none of the run's
    assert [gpu.fault for gpu in opened("0").gpus] == [""]


def test_a_gpu_of_other_users_is_none_of_ours(fake_time: FakeTime, script: Callable[..., None]) -> None:
    script(count=2, fail="handle:0:4:0:99")
    assert [gpu.index for gpu in opened().gpus] == [1]


def test_a_counter_reset(fake_time: FakeTime, script: Callable[..., None], tmp_path: Path) -> None:
    script(reset=5)
    record(fake_time, tmp_path / "gpu.parquet", 13)
    energy = integrate(load(tmp_path / "gpu.parquet"), 2 * S, 12 * S)
    assert (energy.method, energy.by_gpu[0].resets) == ("power", 1)
    assert energy.joules == pytest.approx(1000)


def test_throttling_reaches_the_verdict(
    fake_time: FakeTime, script: Callable[..., None], tmp_path: Path
) -> None:
    script(throttle="4@0,96@1,0@2")
    record(fake_time, tmp_path / "gpu.parquet", 3)
    samples = load(tmp_path / "gpu.parquet")
    assert throttled(samples, S, 2 * S - 1) == (
        "sw_thermal in 100.0% of the samples",
        "hw_thermal in 100.0% of the samples",
    )
    assert throttled(samples, 2 * S, 3 * S) == ()


def test_visible_devices_and_how_many_of_them(fake_time: FakeTime, script: Callable[..., None]) -> None:
    script(count=4)
    assert [gpu.index for gpu in opened().gpus] == [0, 1, 2, 3]
    assert [gpu.index for gpu in opened("3,GPU-1").gpus] == [3, 1]
    assert [gpu.index for gpu in opened("3,1", first=1).gpus] == [3]
    assert open_gpus("") == Absent("none_visible", "CUDA_VISIBLE_DEVICES= shows none of 4 GPU(s)")
    script(mixed=1)
    assert [gpu.sure for gpu in opened("3").gpus] == [False]
    assert [gpu.sure for gpu in opened("3", "PCI_BUS_ID").gpus] == [True]


def test_a_slice_has_its_own_memory_and_no_energy_of_its_own(
    fake_time: FakeTime, script: Callable[..., None], tmp_path: Path
) -> None:
    script(mig=1)
    found = opened("MIG-0")
    record(fake_time, tmp_path / "gpu.parquet", 1, found)
    row = rows_of(tmp_path / "gpu.parquet")[0]
    assert (row["uuid"], row["memory_used_bytes"], row["gpu_util"]) == ("MIG-0", 3 << 30, None)
    assert (row["power_w"], row["sm_clock_mhz"]) == (100.0, 1980)
    assert "slices (MIG)" in integrate(load(tmp_path / "gpu.parquet"), 0, S // 2).reason
    assert opened().gpus[0].mig
    assert opened("MIG-1").gpus[0].fault == "Not Found"


@pytest.mark.parametrize(
    ("code", "reason"),
    [(9, "no_driver"), (18, "driver_mismatch"), (4, "no_permission"), (999, "nvml_error")],
)
def test_a_driver_that_does_not_start(
    fake_time: FakeTime, script: Callable[..., None], code: int, reason: str
) -> None:
    script(init=code)
    absent = open_gpus(None)
    assert isinstance(absent, Absent)
    assert absent.code == reason


def test_a_machine_with_a_driver_and_no_gpu(fake_time: FakeTime, script: Callable[..., None]) -> None:
    script(count=0)
    assert open_gpus(None) == Absent("no_gpu", "the NVIDIA driver lists no GPU")


def test_late_ticks_are_missed_not_made_up_for(fake_time: FakeTime, tmp_path: Path) -> None:
    class Slow:
        reads = 0

        def read(self, clock: Callable[[], int], epoch_ns: int, due_ns: int) -> dict[str, Any]:
            self.reads += 1
            fake_time.set(fake_time.now_ns + (350 if self.reads == 3 else 10) * MS)
            return {"due_ns": due_ns}

    taken: list[dict[str, Any]] = []

    class Sink:
        def add(self, rows: list[dict[str, Any]], now_ns: int) -> None:
            taken.extend(rows)

    fake_time.stop_ns = fake_time.now_ns + S
    conduct = sample(
        [Slow()], Sink(), clock=fake_time.clock, wait=fake_time.wait, period_ns=100 * MS, epoch_ns=EPOCH
    )
    # the third took until 550 ms: the ticks at 300 and 400 are lost, that at 500 is 50 ms late
    assert [row["due_ns"] // MS for row in taken] == [0, 100, 200, 500, 600, 700, 800, 900, 1000]
    assert (conduct.ticks, conduct.missed) == (9, 2)
    assert conduct.json()["late_max_ms"] == pytest.approx(50)


def test_what_a_killed_writer_leaves(fake_time: FakeTime, tmp_path: Path) -> None:
    device = opened().devices[0]
    path = tmp_path / "gpu.parquet"
    writer = Writer(path, {GPUS_KEY: b"[]"})
    for second in range(3):
        writer.add([device.read(fake_time.clock, EPOCH, second)], second * S)
    assert not path.exists()
    assert [file.name for file in tmp_path.iterdir()] == [".gpu.parquet.partial"]
    writer._file.close()
    # cut off in the middle of the last batch
    blob = partial_of(path).read_bytes()
    partial_of(path).write_bytes(blob[:-100])
    assert salvage(path) == 2
    assert [row["due_ns"] for row in rows_of(path)] == [0, 1]
    assert [file.name for file in tmp_path.iterdir()] == ["gpu.parquet"]


def test_without_a_compiler_the_same_path_through_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """C functions made of Python ones: the calls, their arguments and what comes back, with no library to build."""
    handle = out = ctypes.c_void_p
    number = ctypes.c_uint

    def function(answer: Callable[..., int], *types: Any) -> Any:
        return ctypes.CFUNCTYPE(ctypes.c_int, *types)(answer)

    def put(kind: Any, value: int) -> Callable[..., int]:
        def answer(*given: int) -> int:
            kind.from_address(given[-1]).value = value
            return 0

        return answer

    def text(value: bytes) -> Callable[..., int]:
        def answer(*given: int) -> int:
            address, size = given[-2:]
            ctypes.memmove(address, value + b"\0", min(size, len(value) + 1))
            return 0

        return answer

    class Library:
        nvmlInitWithFlags = function(lambda _: 0, number)
        nvmlDeviceGetCount_v2 = function(put(number, 1), out)
        nvmlSystemGetDriverVersion = function(text(b"1.2"), out, number)
        nvmlDeviceGetHandleByIndex_v2 = function(put(ctypes.c_size_t, 1), number, out)
        nvmlDeviceGetUUID = function(text(b"GPU-py"), handle, out, number)
        nvmlDeviceGetName = function(text(b"Python"), handle, out, number)
        nvmlDeviceGetTotalEnergyConsumption = function(put(ctypes.c_ulonglong, 1 << 40), handle, out)
        nvmlDeviceGetPowerUsage = function(lambda *_: 3, handle, out)

    monkeypatch.setattr(pynvml, "nvmlLib", Library())
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    found = opened()
    row = found.devices[0].read(lambda: EPOCH, EPOCH, 0)
    assert (found.driver, row["uuid"], row["energy_mj"], row["error"]) == ("1.2", "GPU-py", 1 << 40, "")
    # a field not supported, and one whose function the library does not have
    assert (row["power_w"], row["temperature_c"], row["throttle"]) == (None, None, None)
    nulls = found.devices[0].nulls
    assert nulls["power_w", "Not Supported"] == nulls["temperature_c", "Function Not Found"] == 1
