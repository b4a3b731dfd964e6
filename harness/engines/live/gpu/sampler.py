"""The run's side of the sampler: start its process, end it, and say how it went."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from harness.engines.live.gpu.facts import Absent, Gpu
from harness.engines.live.gpu.writer import partial_of, salvage

HZ = 10.0
# The driver of a machine with eight GPUs and no persistence daemon takes this order of time to start.
START_S = 60.0
STOP_S = 10.0
KILL_S = 5.0


@dataclass(frozen=True, slots=True)
class SamplerReport:
    """How sampling went.

    Attributes:
        path: the file of samples; None where there is none.
        complete: the sampler ended in good order. Where it did not, `path` is what could be saved and `problem` says
            what happened.
        absent: why there was nothing to sample.
        gpus: what was sampled, and what could not be opened.
        driver: the driver's version.
        conduct: ticks, missed, late_p50_ms, late_p99_ms, late_max_ms, and nulls (fields that a GPU did not give,
            with the driver's word for it); empty where the sampler did not end in good order.
        problem: one line; empty where all went well.
    """

    path: Path | None
    complete: bool
    absent: Absent | None
    gpus: tuple[Gpu, ...]
    driver: str
    conduct: Mapping[str, Any]
    problem: str = ""

    def json(self) -> dict[str, Any]:
        """As a manifest holds it."""
        return {
            "complete": self.complete,
            "absent": self.absent.json() if self.absent else None,
            "gpus": [gpu.json() for gpu in self.gpus],
            "driver": self.driver,
            "conduct": dict(self.conduct),
            "problem": self.problem,
        }


class Sampler:
    """A sampler process. Made by `start`; `stop` may be called more than once and says the same each time."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        self._path, self._process, self._errors = path, process, errors
        self._buffer = b""
        self._silent = False
        self._report: SamplerReport | None = None
        self.gpus: tuple[Gpu, ...] = ()
        self.driver = ""
        self.absent: Absent | None = None

    @classmethod
    def start(
        cls,
        path: Path,
        *,
        epoch_ns: int,
        hz: float = HZ,
        first: int | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = START_S,
    ) -> Self:
        """Start sampling into `path`; returns when the first samples are taken, or none can be.

        Args:
            path: the `gpu.parquet` to be; what is there is removed.
            epoch_ns: `time.monotonic_ns()` at the run's start.
            hz: samples a second, 0.1 to 100.
            first: how many of the visible GPUs the engine uses, from the front; None for all.
            env: the environment that the engine gets, for CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; None for ours.

        A machine without GPUs, a driver that does not answer in time, and a process that cannot start are no
        errors: `absent` says why nothing is sampled.

        Raises:
            ValueError: `hz` or `first` is out of range.
        """
        if not 0.1 <= hz <= 100:
            raise ValueError(f"hz is {hz}, not 0.1 to 100")
        if first is not None and first < 1:
            raise ValueError(f"first is {first}, not 1 or more")
        command = [
            *(sys.executable, "-m", "harness.engines.live.gpu"),
            *("--out", str(path.absolute()), "--epoch-ns", str(epoch_ns)),
            *("--period-ns", str(round(1e9 / hz)), "--parent", str(os.getpid())),
            *(() if first is None else ("--first", str(first))),
        ]
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            # the libraries' own pools of threads would have nothing to do but take memory
            env={**(os.environ if env is None else env), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            # Ctrl-C on a terminal goes to the whole group; the sampler ends when its parent says so.
            start_new_session=True,
        )
        sampler = cls(path, process, errors)
        try:
            sampler._greet(timeout_s)
        except BaseException:
            sampler._end(0)
            raise
        return sampler

    @property
    def pid(self) -> int:
        """The sampler's process."""
        return self._process.pid

    def stop(self, timeout_s: float = STOP_S) -> SamplerReport:
        """Take the last sample, write the file, end the process; kill it where that takes too long."""
        if self._report is None:
            self._report = self._stop(timeout_s)
        return self._report

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _greet(self, timeout_s: float) -> None:
        said = self._hear(time.monotonic() + timeout_s)
        if said.get("said") == "ready":
            self.gpus = tuple(Gpu.from_json(gpu) for gpu in said["gpus"])
            self.driver = said["driver"]
            return
        if said.get("said") == "absent":
            self.absent = Absent(said["code"], said["text"])
        elif self._silent:
            self.absent = Absent("nvml_error", f"the sampler did not start: {self._last_error()}")
        else:
            self.absent = Absent("no_answer", f"the NVIDIA driver did not answer in {timeout_s:g} s")
        self._end(1.0)
        with contextlib.suppress(OSError):
            partial_of(self._path).unlink(missing_ok=True)

    def _stop(self, timeout_s: float) -> SamplerReport:
        if self.absent is not None:
            return SamplerReport(None, True, self.absent, (), "", {})
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        said = self._hear(time.monotonic() + timeout_s)
        last_error = self._last_error()
        # not by its state: the last thread of a process may outlive its end for a moment
        code = self._end(KILL_S if said or self._silent else 0.0)
        if said.get("said") == "done" and code == 0:
            conduct = {name: value for name, value in said.items() if name != "said"}
            return SamplerReport(self._path, True, None, self.gpus, self.driver, conduct)
        try:
            saved, fate = salvage(self._path), "were saved"
        except OSError as error:
            saved, fate = 0, f"were saved, as the file could not be written ({error.strerror})"
        how = "ended by itself" if self._silent else f"did not end in {timeout_s:g} s"
        problem = f"the GPU sampler {how} ({last_error or f'exit code {code}'}); {saved} rows {fate}"
        return SamplerReport(self._path if saved else None, False, None, self.gpus, self.driver, {}, problem)

    def _hear(self, until: float) -> dict[str, Any]:
        """The next line that the sampler says; empty where none comes in time, or ever (`_silent`)."""
        assert self._process.stdout is not None
        out = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([out], [], [], left)[0]:
                return {}
            chunk = os.read(out, 65536)
            if not chunk:
                self._silent = True
                return {}
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        value: dict[str, Any] = json.loads(line)
        return value

    def _end(self, grace_s: float) -> int:
        """Let the process end, then see to it; its exit code."""
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            # one that hangs inside the driver dies when the driver lets it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_S)
        self._process.stdout.close()
        self._errors.close()
        code = self._process.returncode
        return -signal.SIGKILL if code is None else code

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin
