"""What every generator is given: the text, the seed and the scales."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workloads.five_phase import phrases
from workloads.five_phase.corpus import Corpus
from workloads.five_phase.draft import Part, frozen
from workloads.five_phase.randomness import scaled, stream
from workloads.five_phase.tenants import TENANTS, TenantSpec
from workloads.request import TokenIds

# First part of a stream's key after the tenant: what the stream decides.
ARRIVALS, CONTENT, POPULARITY = range(3)


@dataclass(frozen=True, slots=True)
class Context:
    """Everything that a generator needs besides its tenant, its phase and its rate."""

    corpus: Corpus
    seed: int
    length_scale: float

    def stream(self, tenant: TenantSpec, *key: int) -> np.random.Generator:
        """A random stream of this tenant; the same key gives the same draws."""
        return stream(self.seed, TENANTS.index(tenant), *key)

    def scaled(self, tokens: float) -> int:
        """A length times the length scale, at least 1."""
        return scaled(tokens, self.length_scale)

    def encode(self, text: str) -> TokenIds:
        """Tokens of a text."""
        return self.corpus.tokenizer.encode(text)

    def system_part(self, tenant: TenantSpec, domain: phrases.Domain, version: str = "v1") -> Part:
        """The tenant's system prompt: its head, then rules up to the length that the table asks for."""
        length = self.scaled(tenant.system_tokens)
        pieces = [self.encode(phrases.system_prompt(domain, version))]
        while sum(map(len, pieces)) < length:
            pieces.append(self.encode(domain.rule(len(pieces) - 1)))
        return Part("system", f"{tenant.name}/{version}", frozen(np.concatenate(pieces)[:length]))
