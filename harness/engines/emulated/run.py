"""One workload through an emulated server: the tables of a record, and what the engine's process saw of each request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from harness.arms import Arm
from harness.assumptions import BASE, Assumptions
from harness.engines.emulated.launch import conduct, server_for
from harness.engines.live.client import ClientReport, Drive, Options, make_target
from harness.engines.live.served import served_model
from harness.engines.live.server import Ended, launch
from harness.engines.live.tables import record_tables, since_start
from harness.engines.live.telemetry.collect import Telemetry, collect
from harness.engines.live.warmup import warm_up
from harness.profiles import Profile
from patches.seam.plugin import TELEMETRY_ENV
from workloads.request import Workload

Say = Callable[[str], None]

# For the client's processes to be told before the first request is due, and for the engine to hear of the last.
_LEAD_NS = 500_000_000
_SETTLE_S = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class EmulatedRun:
    """What a run left.

    Attributes:
        tables: of `harness.schema`, as in a live run.
        engine: a row a request, in the workload's order, as the engine's process saw it (`telemetry.tables.ENGINE_REQUESTS`).
        telemetry: from the run's start on.
        report: the client's.
        conduct: how well the engine kept the time (`launch.conduct`).
        ended: how the server went down.
    """

    tables: dict[str, pa.Table]
    engine: pa.Table
    telemetry: Telemetry
    report: ClientReport
    conduct: Mapping[str, Any]
    ended: Ended


def emulate(
    profile: Profile,
    arm: Arm,
    workload: Workload,
    scratch: Path,
    *,
    assumed: Assumptions = BASE,
    warmup_s: float = 1.0,
    say: Say = lambda _: None,
) -> EmulatedRun:
    """Start a server of this arm, drive the workload, and end it.

    Raises:
        UserError, RunFailed: as `launch`, `warm_up` and the client do.
    """
    arguments = server_for(profile, workload, scratch, assumed)
    arguments["env"][TELEMETRY_ENV] = str(scratch / "telemetry")
    with launch(
        arm, log_path=scratch / "server.log", receipts_dir=scratch / "receipts", say=say, **arguments
    ) as server:
        warm_up(server, served_model(profile.model_dir).vocab_size, warmup_s, arm.flags.max_model_len)
        target = make_target(server.base_url, server.model_name, server.api_key)
        options = Options(send_priority=arm.flags.scheduling_policy == "priority")
        with Drive(workload, target, options) as ready:
            epoch_ns = time.monotonic_ns() + _LEAD_NS
            report = ready.run(epoch_ns, should_stop=server.exit_reason)
            time.sleep(_SETTLE_S)
        server.check()
    telemetry = since_start(collect(scratch / "telemetry", epoch_ns))
    tables, joined = record_tables(workload, report, telemetry)
    assert server.ended is not None
    return EmulatedRun(tables, joined.requests, telemetry, report, conduct(scratch), server.ended)
