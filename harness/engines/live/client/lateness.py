"""How late the client itself was: send delay, event loop lag, collector pauses, and whether it spoiled the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.engines.live.client.observed import Observed
from harness.engines.live.client.watch import LoopSamples, Samples
from harness.stats.measures import nearest_rank

NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Lateness:
    """The client's own delays over a run, all workers pooled; ms.

    The read delay of a request is the loop lag that its first token's reading may have suffered: such a wait is the
    client's and no server's.
    """

    requests: int
    send_delay_ms_p50: float
    send_delay_ms_p99: float
    send_delay_ms_max: float
    read_delay_ms_p99: float
    loop_lag_ms_p99: float
    loop_lag_ms_max: float
    gc_pauses: int
    gc_total_ms: float
    gc_max_ms: float

    @property
    def client_stall(self) -> str:
        """Why the run's latencies may not be believed; "" where nothing speaks against them."""
        # Here, because it brings pandas with it, which the worker processes can do without.
        from harness.metrics.validity import CLIENT_STALL_MS

        limit = f"at most {CLIENT_STALL_MS:g} ms is allowed"
        if self.send_delay_ms_p99 > CLIENT_STALL_MS:
            return f"the client sent late (p99 of the send delay {self.send_delay_ms_p99:.1f} ms, {limit})"
        if self.read_delay_ms_p99 > CLIENT_STALL_MS:
            return (
                f"the client read first tokens late (its event loop stood still for {self.read_delay_ms_p99:.1f} ms "
                f"around the p99 of them, {limit})"
            )
        return ""


def lateness_of(parts: Sequence[tuple[Sequence[Observed], LoopSamples]]) -> Lateness:
    """Pool what each process observed with its loop's samples."""
    observed = [one for share, _ in parts for one in share]
    delays = [o.send_delay_ns for o in observed if o.send_delay_ns is not None]
    send = _sorted_ms([np.array(delays, dtype=np.int64)])
    read = _sorted_ms([loop.read_delay_ns(share) for share, loop in parts])
    lag = _sorted_ms([loop.lag_ns for _, loop in parts])
    pauses = _sorted_ms([loop.pauses_ns for _, loop in parts])
    return Lateness(
        requests=len(send),
        send_delay_ms_p50=_at(send, 50),
        send_delay_ms_p99=_at(send, 99),
        send_delay_ms_max=_at(send, 100),
        read_delay_ms_p99=_at(read, 99),
        loop_lag_ms_p99=_at(lag, 99),
        loop_lag_ms_max=_at(lag, 100),
        gc_pauses=len(pauses),
        gc_total_ms=float(pauses.sum()),
        gc_max_ms=_at(pauses, 100),
    )


def _sorted_ms(parts: Sequence[Samples]) -> npt.NDArray[np.float64]:
    return np.sort(np.concatenate([*parts, np.zeros(0, dtype=np.int64)])) / NS_PER_MS


def _at(values: npt.NDArray[np.float64], percent: int) -> float:
    return float(nearest_rank(values, percent)) if len(values) else 0.0
