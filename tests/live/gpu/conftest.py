"""A driver library that does as it is told, loaded the way the real one is."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pynvml
import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")
LIBRARY = "libnvidia-ml.so.1"


@pytest.fixture(autouse=True)
def _no_real_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine shows of its own GPUs, and scripts of other tests, stay out."""
    for name in list(os.environ):
        if name.startswith("FAKE_NVML_") or name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def fake_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the fake library; tests that need it skip where no C compiler is."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc, clang) to build the fake NVML library with")
    folder = tmp_path_factory.mktemp("nvml")
    subprocess.run(
        [compiler, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", folder / LIBRARY, SOURCE],
        check=True,
    )
    return folder


@pytest.fixture
def fake_process(fake_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started from here load the fake library by the name of the real one."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_folder))


@dataclass(slots=True)
class FakeTime:
    """The clock of the fake library and of whoever samples it; a wait is over at once."""

    library: ctypes.CDLL
    now_ns: int = 5_000_000_000
    stop_ns: int = 0

    def __post_init__(self) -> None:
        self.set(self.now_ns)

    def set(self, now_ns: int) -> None:
        """Move to a time."""
        self.now_ns = now_ns
        self.library.fake_nvml_set_ns(ctypes.c_longlong(now_ns))

    def clock(self) -> int:
        """The time, ns."""
        return self.now_ns

    def wait(self, until_ns: int) -> bool:
        """As `loop.sample` wants it: until the stop."""
        self.set(max(self.now_ns, min(until_ns, self.stop_ns)))
        return until_ns >= self.stop_ns


@pytest.fixture
def fake_time(fake_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTime]:
    """The fake library within this process, on a clock that the test moves."""
    library = ctypes.CDLL(str(fake_folder / LIBRARY))
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    yield FakeTime(library)
    library.fake_nvml_set_ns(ctypes.c_longlong(-1))
