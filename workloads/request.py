"""What a workload is made of: tenants, phases and the requests that will be sent.

A workload is data plus a seed. Everything here is a frozen value; the same seed gives the same
bytes on any machine, in any process.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tenant:
    """One customer of the server.

    `weight` is the share it is entitled to under contention; `priority` is vLLM's native request
    priority (smaller is served first). `slo_ttft_ms` is already scaled by the profile's SLO factor.
    """

    name: str
    tier: str
    kind: str
    weight: int
    priority: int
    slo_ttft_ms: float
    short: bool

    @property
    def identity(self) -> dict[str, str | int | float]:
        """Who it is, as its requests carry it to the engine (`SamplingParams.extra_args`)."""
        return {
            "tenant": self.name,
            "tier": self.tier,
            "weight": self.weight,
            "slo_ttft_ms": self.slo_ttft_ms,
        }


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the run with one arrival rate per tenant; times are ns from the run's start."""

    number: int
    name: str
    start_ns: int
    end_ns: int
    measured: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """A named run of prompt tokens: two requests with the same (kind, name) share its content."""

    kind: str
    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request as it will be sent.

    Attributes:
        index: position in the workload, in order of `intended_ns`.
        request_id: unique within the workload.
        tenant: name of the tenant.
        phase: number of the phase in which it is sent.
        intended_ns: when it is to be sent, ns from the run's start.
        prompt: token ids, shape (prompt_tokens,), int32.
        output: the true output's token ids, shape (output_tokens,), int32.
        segments: the parts of the prompt, in order; their tokens sum to the prompt's length.
        cancel_ns: when the client closes the stream if it has not ended by then, or None.
        session: groups the keystrokes of one completion session or the turns of one chat, or "".
    """

    index: int
    request_id: str
    tenant: str
    phase: int
    intended_ns: int
    prompt: TokenIds
    output: TokenIds
    segments: tuple[Segment, ...]
    cancel_ns: int | None = None
    session: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """A whole trace, ready to be replayed on any engine.

    `requests` are sorted by `intended_ns` (ties by tenant, then by order of creation). Requests of
    a phase that is not measured are replayed to build up backlog and cache, and are left out of the
    metrics.
    """

    name: str
    seed: int
    tenants: tuple[Tenant, ...]
    phases: tuple[Phase, ...]
    requests: tuple[PlannedRequest, ...]
    sha256: str
    corpus_sha256: str
    slo_factor: float = 1.0
    notes: tuple[str, ...] = field(default=())

    def tenant(self, name: str) -> Tenant:
        """The tenant of that name; KeyError if there is none."""
        for tenant in self.tenants:
            if tenant.name == name:
                return tenant
        raise KeyError(name)

    def of_tenant(self, name: str) -> Workload:
        """This tenant's requests alone, as and when they are sent here; KeyError if there is no such tenant."""
        requests = (request for request in self.requests if request.tenant == name)
        return replace(
            self,
            tenants=(self.tenant(name),),
            requests=tuple(replace(request, index=i) for i, request in enumerate(requests)),
            sha256=hashlib.sha256(f"{self.sha256} {name}".encode()).hexdigest(),
        )
