"""One arm and one seed on a real server, its device real or emulated: a fresh server, the traffic, every witness, one record."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness.arms import Arm
from harness.engines.live import cache_table, gpu, host, priority, receipt_check, receipts, tables, verdict
from harness.engines.live import command as server_command
from harness.engines.live.client import ClientReport, Drive, Options, make_target
from harness.engines.live.client.open_loop import Progress as ClientProgress
from harness.engines.live.manifest import manifest_of
from harness.engines.live.prometheus import Metrics, Scrape, Scraper, write_scrapes
from harness.engines.live.server import Server, launch
from harness.engines.live.serving import conduct_of, launch_arguments
from harness.engines.live.telemetry.collect import Telemetry, collect
from harness.engines.live.telemetry.reconcile import reconcile
from harness.engines.live.warmup import WarmUp, warm_up
from harness.errors import RunFailed
from harness.plan import RunPlan
from harness.records import write_arm
from harness.tenant_keys import issue
from patches.seam.plugin import TELEMETRY_ENV
from workloads.request import Workload

Say = Callable[[str], None]
# Seconds since the run's start, requests that ended, tokens received.
Progress = Callable[[float, int, int], None]

# Time for the sampler to start and for the client to be told, before the first request is due.
_LEAD_S = 1.5
# Table of `telemetry.tables.ENGINE_REQUESTS`, a row a request in the workload's order.
ENGINE_TIMES = "engine_requests"
_LEAST_LEAD_S = 0.4
# The engine hears of the last streams that were closed before its counters are read.
_SETTLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Finished:
    """What the display shows of a task that came to its end."""

    start_s: float
    run_s: float
    wall_s: float
    send_delay_ms_p99: float
    found: tuple[verdict.Finding, ...]

    @property
    def valid(self) -> bool:
        """Whether its figures may be believed."""
        return not any(one.fatal for one in self.found)


@dataclass(frozen=True, slots=True, eq=False)
class Driven:
    """What one server was seen to do, all in memory or in the scratch folder."""

    server: Server
    warm: WarmUp
    epoch_ns: int
    report: ClientReport
    scrapes: tuple[Scrape, ...]
    sampler: gpu.SamplerReport
    priority: str
    emulation: Mapping[str, Any] | None
    cache: tuple[pa.Table | None, str]


def run_task(
    plan: RunPlan,
    arm: Arm,
    seed: int,
    workload: Workload,
    run_dir: Path,
    command: Sequence[str],
    progress: Progress,
    say: Say,
    plan_sha256: str,
) -> Finished:
    """Serve the trace with this arm's server and write `run_dir/<arm>/seed-<n>/`.

    Args:
        progress: told about once a second how far the traffic is. say: told what happens before it.
        plan_sha256: the plan's, as it was when the run began: sources may change under a run that takes minutes.

    Raises:
        UserError: the server refuses the arm's flags, or the model cannot be what is served.
        RunFailed: the server or the client did not come to its end; nothing is written.
    """
    started, began = datetime.now(UTC), time.monotonic()
    facts = host.facts()
    scratch = Path(tempfile.mkdtemp(prefix="bench-live-"))
    try:
        log = run_dir / "logs" / f"{arm.name}-seed-{seed}.server.log"
        driven = _drive(plan, arm, workload, scratch, log, progress, say)
        telemetry = collect(scratch / "telemetry", driven.epoch_ns)
        evidence = _evidence(arm, workload, driven, telemetry)
        found = tuple(verdict.findings(evidence))
        window_ns = measured_window(workload)
        manifest = manifest_of(
            plan,
            workload,
            evidence,
            verdict.validity(found),
            command,
            plan_sha256=plan_sha256,
            server={**driven.server.facts(), "warm_up": driven.warm.json()},
            host={**facts, "priority": driven.priority},
            gpu=_gpu_facts(driven.sampler, window_ns, evidence),
            emulation=driven.emulation or {},
        )
        wall_s = time.monotonic() - began
        manifest["run_facts"] |= {"wall_s": wall_s, "started": started.isoformat(timespec="seconds")}
        files = _files(scratch, driven, evidence)
        assert evidence.receipt is not None
        write_arm(run_dir / arm.name / f"seed-{seed}", evidence.tables, manifest, evidence.receipt, files)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Finished(
        start_s=driven.server.start_s,
        run_s=run_seconds(driven.report),
        wall_s=wall_s,
        send_delay_ms_p99=driven.report.lateness.send_delay_ms_p99,
        found=found,
    )


def measured_window(workload: Workload) -> tuple[int, int]:
    """From the first measured phase's start to the last one's end, ns."""
    measured = [phase for phase in workload.phases if phase.measured]
    return measured[0].start_ns, measured[-1].end_ns


def run_seconds(report: ClientReport) -> float:
    """From the run's start until the last request ended."""
    return max((one.end_ns or 0 for one in report.requests), default=0) / 1e9


def _drive(
    plan: RunPlan,
    arm: Arm,
    workload: Workload,
    scratch: Path,
    log: Path,
    progress: Progress,
    say: Say,
) -> Driven:
    """Start the server, warm it up, drive it, and end it."""
    live = plan.live
    assert live is not None
    arguments = launch_arguments(plan, workload, scratch)
    env = {**arguments.pop("env"), TELEMETRY_ENV: str(scratch / "telemetry")}
    # Who a request is comes from its key, as in production: nothing in it can promote it.
    identity = scratch / "identity.toml"
    keys = issue(workload.tenants, identity)
    with launch(
        arm,
        log_path=log,
        receipts_dir=scratch / "receipts",
        env=env,
        identity=identity,
        say=say,
        **arguments,
    ) as server:
        say(f"ready after {server.start_s:.0f} s; warming up")
        warm = warm_up(server, live.vocab_size, live.warmup_s, arm.flags.max_model_len)
        target = make_target(server.base_url, server.model_name, server.api_key, keys=keys)
        with Drive(workload, target, Options()) as ready:
            first = priority.client_first(ready.pids, server.pids)
            # An emulated device draws no power, whatever this machine has.
            gpus = 0 if live.emulated else live.tensor_parallel
            sampler, epoch_ns = _start_sampler(scratch / "gpu.parquet", gpus)
            with sampler, Scraper(server.base_url, epoch_ns, api_key=server.api_key) as scraper:
                report = _run(ready, server, epoch_ns, progress)
                time.sleep(_SETTLE_S)
            cache = (
                cache_table.fetch(server.base_url, server.api_key, epoch_ns)
                if cache_table.PATCH in arm.patches
                else (None, "")
            )
            server.check()
    emulation = conduct_of(scratch) if live.emulated else None
    scrapes = tuple(scraper.scrapes)
    return Driven(server, warm, epoch_ns, report, scrapes, sampler.stop(), first, emulation, cache)


def _run(ready: Drive, server: Server, epoch_ns: int, progress: Progress) -> ClientReport:
    def on_progress(so_far: ClientProgress) -> None:
        progress((time.monotonic_ns() - epoch_ns) / 1e9, so_far.ended, so_far.tokens)

    try:
        return ready.run(epoch_ns, on_progress=on_progress, should_stop=server.exit_reason)
    except RunFailed:
        # Says more of a dead server than that the client was stopped.
        server.check()
        raise


def _start_sampler(path: Path, gpus: int) -> tuple[gpu.Sampler, int]:
    """A sampler, and the run's start: soon, but not before everybody is told."""
    lead_s = _LEAD_S
    while True:
        epoch_ns = time.monotonic_ns() + round(lead_s * 1e9)
        seen = None if gpus else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        sampler = gpu.Sampler.start(path, epoch_ns=epoch_ns, first=gpus or None, env=seen)
        if epoch_ns - time.monotonic_ns() > _LEAST_LEAD_S * 1e9:
            return sampler, epoch_ns
        if sampler.absent is not None:
            return sampler, time.monotonic_ns() + round(_LEAD_S * 1e9)
        # The driver took its time; now that it is awake a longer lead will do.
        sampler.stop()
        lead_s *= 4


def _evidence(arm: Arm, workload: Workload, driven: Driven, everything: Telemetry) -> verdict.Evidence:
    telemetry = tables.since_start(everything)
    record, joined = tables.record_tables(workload, driven.report, telemetry)
    if driven.cache[0] is not None:
        record["cache"] = driven.cache[0]
    metrics = Metrics(driven.scrapes)
    left = driven.server.receipts()
    spawned = server_command.is_cpu_build()
    evidence = verdict.Evidence(
        arm=arm,
        workload=workload,
        report=driven.report,
        tables=record,
        joined=joined,
        telemetry=telemetry,
        metrics=metrics,
        # With the warm-up: the counters are compared over the time that they span.
        disagreements=reconcile(everything, record["requests"].to_pandas(), metrics),
        warm_up=driven.warm.short,
        receipt=receipts.merged(arm.plan, left),
        receipt_faults=receipt_check.faults(arm.plan, driven.server.processes, left, spawned=spawned),
        emulation=driven.emulation,
        notes=tuple(_notes(driven)),
    )
    if driven.sampler.path is None:
        return evidence
    held = gpu.throttled(gpu.load(driven.sampler.path), *measured_window(workload))
    return replace(evidence, throttled=held)


def _notes(driven: Driven) -> list[verdict.Finding]:
    ended = driven.server.ended
    notes = []
    if ended is not None and not ended.clean:
        notes.append(
            verdict.Finding(
                "unclean_end",
                f"the server did not end by itself: {len(ended.killed)} processes were killed, "
                f"{len(ended.shared_memory)} pieces of shared memory removed",
                fatal=False,
            )
        )
    if driven.cache[1]:
        text = f"what cachedash counted could not be had from the server ({driven.cache[1]})"
        notes.append(verdict.Finding("cache_table", text, fatal=False))
    if driven.sampler.problem:
        notes.append(verdict.Finding("gpu_samples", driven.sampler.problem, fatal=False))
    return notes


def _gpu_facts(
    sampler: gpu.SamplerReport, window_ns: tuple[int, int], evidence: verdict.Evidence
) -> dict[str, Any]:
    facts = sampler.json()
    if sampler.path is not None:
        times = evidence.tables["tokens"]["t_ns"].to_numpy()
        received = int(((times >= window_ns[0]) & (times < window_ns[1])).sum())
        facts["figures"] = gpu.figures_of(gpu.load(sampler.path), *window_ns, received)
    return facts


def _files(scratch: Path, driven: Driven, evidence: verdict.Evidence) -> dict[str, Path]:
    """What lies beside the tables: the server's counters as scraped, the engine's own times of requests, and each step's batch."""
    scrapes, batches, engine = (
        scratch / f"{name}.parquet" for name in ("prometheus", "batches", ENGINE_TIMES)
    )
    write_scrapes(scrapes, driven.scrapes)
    pq.write_table(evidence.telemetry.batches, batches, compression="zstd")
    pq.write_table(evidence.joined.requests, engine, compression="zstd")
    files = {path.name: path for path in (scrapes, batches, engine)}
    if driven.sampler.path is not None:
        files["gpu.parquet"] = driven.sampler.path
    return files
