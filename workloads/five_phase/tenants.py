"""The seven tenants: who they are, what they are owed and what one request of theirs looks like."""

from __future__ import annotations

from dataclasses import dataclass

from workloads.request import Tenant


@dataclass(frozen=True, slots=True)
class TenantSpec:
    """One row of the workload's table.

    Attributes:
        kind: which generator writes its requests: "chat", "completion" or "rag".
        slo_ttft_ms: the target for the p99 of TTFT on a data-centre GPU.
        output_tokens: mean length of an answer.
        system_tokens: length of the system prompt.
        question_tokens: mean length of the user's part at the end of the prompt.
    """

    name: str
    tier: str
    kind: str
    weight: int
    priority: int
    slo_ttft_ms: float
    short: bool
    output_tokens: int
    system_tokens: int
    question_tokens: int

    def tenant(self, slo_factor: float) -> Tenant:
        """The tenant as the run sees it, with its SLO on this profile's GPU."""
        return Tenant(
            name=self.name,
            tier=self.tier,
            kind=self.kind,
            weight=self.weight,
            priority=self.priority,
            slo_ttft_ms=self.slo_ttft_ms * slo_factor,
            short=self.short,
        )


def _gold(name: str, kind: str, output: int, system: int, question: int) -> TenantSpec:
    return TenantSpec(name, "gold", kind, 4, 0, 200.0, True, output, system, question)


def _silver(name: str) -> TenantSpec:
    return TenantSpec(name, "silver", "chat", 2, 1, 500.0, True, 120, 250, 30)


def _bronze(name: str) -> TenantSpec:
    return TenantSpec(name, "bronze", "rag", 1, 2, 3_000.0, False, 300, 150, 30)


# Gold-a answers in 200 tokens and carries its history: with a bare question and 100 tokens, four
# times its traffic is too cheap for anybody to notice.
TENANTS: tuple[TenantSpec, ...] = (
    _gold("gold-a", "chat", 200, 300, 25),
    _gold("gold-b", "completion", 50, 60, 0),
    _silver("silver-0"),
    _silver("silver-1"),
    _silver("silver-2"),
    _bronze("bronze-0"),
    _bronze("bronze-1"),
)

NOTES: tuple[str, ...] = (
    "gold-a carries 1-6 turns of history and answers in 200 tokens on average: a bare question and 100 "
    "tokens make its burst too cheap to matter",
)
