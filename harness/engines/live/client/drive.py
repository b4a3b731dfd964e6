"""Drives a workload with worker processes: started and ready first, then set off at one moment of one clock."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from harness.engines.live.client.chunk import one_line
from harness.engines.live.client.files import Folder, read_loop, read_observed, write_sends
from harness.engines.live.client.lateness import lateness_of
from harness.engines.live.client.observed import Observed
from harness.engines.live.client.open_loop import Progress
from harness.engines.live.client.report import ClientReport, WorkerUse
from harness.engines.live.client.sends import Send, sends_of, share
from harness.engines.live.client.target import Options, Target
from harness.engines.live.client.watch import LoopSamples
from harness.engines.live.client.worker import JOB, End
from harness.errors import RunFailed, UserError
from workloads.request import Workload

# What one worker is trusted with, well under what it can do (`scripts/client_throughput.py` measures that).
EVENTS_PER_WORKER_PER_S = 12_000.0
_PEAK_WINDOW_S = 5.0
_READY_TIMEOUT_S = 60.0
_LEAD_NS = 250_000_000
_GRACE_S = 30.0
_POLL_S = 0.2

OnProgress = Callable[[Progress], None]
Ask = Callable[[], str | None]


def drive(
    workload: Workload,
    target: Target,
    options: Options | None = None,
    *,
    workers: int | None = None,
    epoch_ns: int | None = None,
    on_progress: OnProgress | None = None,
    should_stop: Ask | None = None,
) -> ClientReport:
    """Start workers, drive the whole workload, and gather what they saw; see `Drive`."""
    with Drive(workload, target, options, workers=workers) as ready:
        return ready.run(epoch_ns, on_progress=on_progress, should_stop=should_stop)


def estimate_workers(workload: Workload, cores: int) -> int:
    """Worker processes that the workload's busiest seconds call for; at least 1, at most the cores.

    Counts every output token as one event, in the window in which its request is sent: a server that serves late
    spreads them further.
    """
    window_ns = round(_PEAK_WINDOW_S * 1e9)
    per_window: dict[int, int] = {}
    for request in workload.requests:
        window = request.intended_ns // window_ns
        per_window[window] = per_window.get(window, 0) + len(request.output)
    peak_per_s = max(per_window.values(), default=0) / _PEAK_WINDOW_S
    return max(1, min(cores, int(np.ceil(peak_per_s / EVENTS_PER_WORKER_PER_S))))


class Drive:
    """Worker processes that stand ready to drive one workload once.

    `with Drive(...) as ready:` starts them and returns when all have read their share; `ready.run(epoch_ns)` sets
    them off. However the block is left, no process of it remains.
    """

    def __init__(
        self,
        workload: Workload,
        target: Target,
        options: Options | None = None,
        *,
        workers: int | None = None,
    ) -> None:
        """Plan the run.

        Args:
            workers: how many processes; None: as many as `estimate_workers` says for this machine.

        Raises:
            UserError: a request cannot be sent as it is, or there is none.
        """
        sends = sends_of(workload)
        if not sends:
            raise UserError(
                f"workload {workload.name} has no request: choose other phases or a longer window"
            )
        if target.keys and (unknown := sorted({str(s.identity["tenant"]) for s in sends} - set(target.keys))):
            raise UserError(f"workload {workload.name}: tenant {unknown[0]} has no key; give each tenant one")
        cores = len(os.sched_getaffinity(0))
        count = estimate_workers(workload, cores) if workers is None else workers
        self._order = {send.request_id: i for i, send in enumerate(sends)}
        self._shares = share(sends, max(1, min(count, len(sends))))
        self._target = target
        self._options = options or Options()
        self._folder: Path | None = None
        self._workers: list[_Worker] = []

    @property
    def workers(self) -> int:
        """How many processes drive."""
        return len(self._shares)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that drive, once started."""
        return tuple(worker.pid for worker in self._workers)

    def __enter__(self) -> Drive:
        """Start the workers and wait until all are ready; RunFailed with the reason if one is not."""
        self._folder = Path(tempfile.mkdtemp(prefix="bench-client-"))
        try:
            job = {
                "target": msgspec.Raw(self._target.model_dump_json().encode()),
                "options": msgspec.Raw(self._options.model_dump_json().encode()),
            }
            (self._folder / JOB).write_bytes(msgspec.json.encode(job))
            for number, sends in enumerate(self._shares):
                self._workers.append(_Worker(Folder(self._folder, number), sends, self._target))
            self._wait("ready", _READY_TIMEOUT_S)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def run(
        self,
        epoch_ns: int | None = None,
        *,
        on_progress: OnProgress | None = None,
        should_stop: Ask | None = None,
    ) -> ClientReport:
        """Drive, and return when every request has ended.

        Args:
            epoch_ns: the run's start on CLOCK_MONOTONIC, a quarter of a second ahead or more; None: just that. A
                request whose time has passed when the workers are set off counts as late.
            on_progress: called about once a second with the sums over all workers.
            should_stop: asked several times a second; a reason ends the run with RunFailed.

        Raises:
            RunFailed: a worker died, or did not end in time.
        """
        epoch = time.monotonic_ns() + _LEAD_NS if epoch_ns is None else epoch_ns
        last_ns = max(sends[-1].intended_ns for sends in self._shares)
        limit_s = (epoch + last_ns - time.monotonic_ns()) / 1e9 + self._options.total_timeout_s + _GRACE_S
        for worker in self._workers:
            worker.tell(f"{epoch}\n")
        self._wait("done", limit_s, on_progress, should_stop)
        return self._gather(epoch)

    def _wait(
        self, word: str, limit_s: float, on_progress: OnProgress | None = None, ask: Ask | None = None
    ) -> None:
        """Until every worker has said the word."""
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            waiting = set(self._workers)
            while waiting:
                told = False
                for key, _ in selector.select(_POLL_S):
                    worker = key.data
                    alive = worker.listen()
                    told |= worker.news
                    if worker.said == word:
                        waiting.discard(worker)
                        selector.unregister(worker.output)
                    elif not alive:
                        raise RunFailed(worker.obituary())
                if told and on_progress is not None:
                    parts = [worker.progress for worker in self._workers]
                    on_progress(
                        Progress(*(sum(getattr(p, n) for p in parts) for n in ("sent", "ended", "tokens")))
                    )
                if ask is not None and (reason := ask()):
                    raise RunFailed(f"the client was stopped: {reason}")
                if time.monotonic() > deadline:
                    raise RunFailed(
                        f"client worker {min(w.number for w in waiting)} did not come to its end within {limit_s:.0f} s"
                        if word == "done"
                        else f"the client's workers were not ready within {limit_s:.0f} s: the machine is overloaded"
                    )

    def _gather(self, epoch_ns: int) -> ClientReport:
        parts: list[tuple[tuple[Observed, ...], LoopSamples]] = []
        use: list[WorkerUse] = []
        for worker in self._workers:
            observed, loop, end = worker.result()
            parts.append((observed, loop))
            use.append(
                WorkerUse(
                    requests=len(observed),
                    tokens=sum(one.output_tokens for one in observed),
                    chunks=sum(len(one.chunk_ns) for one in observed),
                    cpu_s=end.cpu_s,
                    wall_s=end.wall_s,
                    queued_s=end.queued_s,
                )
            )
        everyone = [one for share_, _ in parts for one in share_]
        everyone.sort(key=lambda one: self._order[one.request_id])
        return ClientReport(epoch_ns, tuple(everyone), lateness_of(parts), tuple(use))

    def _close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class _Worker:
    """One process and what it has said."""

    def __init__(self, files: Folder, sends: Sequence[Send], target: Target) -> None:
        self.number = files.worker
        self.said = ""
        self.news = False
        self.progress = Progress(0, 0, 0)
        self._files = files
        self._heard = b""
        write_sends(files.sends, sends)
        with files.log.open("wb") as log:
            # In a session of its own: Ctrl-C reaches the parent, which then ends it in order.
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "harness.engines.live.client.worker",
                    str(files.path),
                    str(files.worker),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                start_new_session=True,
            )
        self.tell(json.dumps({"api_key": target.api_key, "keys": dict(target.keys)}) + "\n")

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def output(self) -> Any:
        """Its standard output, to wait on."""
        return self._process.stdout

    def tell(self, line: str) -> None:
        """Write to it; a dead one is noticed where its output is read."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
        except BrokenPipeError:
            return

    def listen(self) -> bool:
        """Take what it has said; False once it says no more."""
        data = os.read(self.output.fileno(), 1 << 16)
        *lines, self._heard = (self._heard + data).split(b"\n")
        self.news = False
        for line in lines:
            word, *rest = line.decode("ascii", "replace").split()
            if word == "progress":
                self.progress = Progress(*map(int, rest))
                self.news = True
            else:
                self.said = word
        return bool(data)

    def result(self) -> tuple[tuple[Observed, ...], LoopSamples, End]:
        """What it left behind after `done`."""
        end = msgspec.json.decode(self._files.end.read_bytes(), type=End)
        return read_observed(self._files.observed), read_loop(self._files.loop, end.pauses_ns), end

    def obituary(self) -> str:
        """Why it died, in one line."""
        code = self._process.wait()
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        with self._files.log.open("rb") as log:
            log.seek(max(0, self._files.log.stat().st_size - 4096))
            lines = log.read().decode("utf-8", "replace").strip().splitlines()
        last = f" ({one_line(lines[-1])})" if lines else ""
        return f"client worker {self.number} ended {how}{last}; its requests are lost: run again"

    def close(self) -> None:
        """End it, if it has not ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            # its input is at an end, which it takes for an order to stop
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.output.close()
