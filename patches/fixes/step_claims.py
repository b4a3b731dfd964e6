"""What tenants below their floor still claim in one scheduling pass, and what the pass has granted."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Claim:
    """What a tenant below its floor would still take up to it, in this pass."""

    seats: int = 0
    blocks: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Pass:
    """One scheduling pass: what is left of the step, who claims what, and who was granted what."""

    left: int
    prefill_tokens: int
    prefill_weight: float
    claims: dict[str, Claim] = field(default_factory=dict)
    seats: int = 0
    blocks: int = 0
    tokens: int = 0
    # Blocks that prefills under way have yet to take.
    promised: int = 0
    # Who is served sooner as the pass begins, where another patch says so: smaller first.
    ranks: dict[str, float] = field(default_factory=dict)
    # Tokens by tenant, and whose prefill was cut.
    granted: dict[str, int] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)

    def claim(self, tenant: str, claim: Claim) -> None:
        """In place of what it claimed before."""
        self.drop(tenant)
        self.claims[tenant] = claim
        self.seats += claim.seats
        self.blocks += claim.blocks
        self.tokens += claim.tokens

    def drop(self, tenant: str) -> None:
        """It claims nothing any more."""
        old = self.claims.pop(tenant, None)
        if old is not None:
            self.seats -= old.seats
            self.blocks -= old.blocks
            self.tokens -= old.tokens

    def of_others(self, tenant: str, rank: float | None = None) -> Claim:
        """What all but this tenant claim together; with its own rank only those that are served sooner.

        Blocks are claimed by all, whatever their rank: whoever waits for many would keep everybody else waiting.
        """
        own = self.claims.get(tenant, Claim())
        blocks = self.blocks - own.blocks
        if rank is None:
            return Claim(self.seats - own.seats, blocks, self.tokens - own.tokens)
        ahead = [c for other, c in self.claims.items() if other != tenant and self.ranks[other] < rank]
        return Claim(sum(c.seats for c in ahead), blocks, sum(c.tokens for c in ahead))
