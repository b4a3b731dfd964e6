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

    def of_others(self, tenant: str) -> Claim:
        """What all but this tenant claim together."""
        own = self.claims.get(tenant)
        if own is None:
            return Claim(self.seats, self.blocks, self.tokens)
        return Claim(self.seats - own.seats, self.blocks - own.blocks, self.tokens - own.tokens)
