"""What the client reports of a run."""

from __future__ import annotations

from dataclasses import dataclass

from harness.engines.live.client.lateness import Lateness
from harness.engines.live.client.observed import Observed


@dataclass(frozen=True, slots=True)
class WorkerUse:
    """What one worker process did and what it cost.

    `queued_s` is how long it was ready to run and got no core: much of it says that the machine, not the client, is
    overloaded. None where the kernel does not tell.
    """

    requests: int
    tokens: int
    chunks: int
    cpu_s: float
    wall_s: float
    queued_s: float | None


@dataclass(frozen=True, slots=True, eq=False)
class ClientReport:
    """All requests, in the workload's order, and the client's conduct.

    Attributes:
        epoch_ns: the run's start on CLOCK_MONOTONIC; all times count from it.
        client_stall: why the latencies may not be believed, "" where nothing speaks against them.
    """

    epoch_ns: int
    requests: tuple[Observed, ...]
    lateness: Lateness
    workers: tuple[WorkerUse, ...]

    @property
    def client_stall(self) -> str:
        """The verdict on the client itself."""
        return self.lateness.client_stall
