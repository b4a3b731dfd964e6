"""The 29: every optimisation and fix of the project, built or planned, in canonical order."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the catalogue. `number` is S, K, D, P or F and a digit; `area` its package below `patches`."""

    number: str
    name: str
    area: str
    summary: str

    @property
    def module(self) -> str:
        """Import path of its module, whether or not it exists yet."""
        return f"patches.{self.area}.{self.name}"

    @property
    def built(self) -> bool:
        """Whether its module exists; nothing is imported to find out."""
        return importlib.util.find_spec(self.module) is not None

    @property
    def state(self) -> str:
        """`built` or `planned`."""
        return "built" if self.built else "planned"


_ROWS = (
    ("S1", "qos", "scheduling", "effective priority: API priority, prompt-length class, ageing by backlog"),
    ("S2", "watermark", "scheduling", "KV levels that hold low priorities back before memory runs out"),
    ("S3", "admission", "scheduling", "refuses early, with a Retry-After from backlog and drain rate"),
    ("S4", "ratelimit", "scheduling", "a token bucket per request; spare budget is never left idle"),
    ("S5", "edf", "scheduling", "earliest deadline first; expired requests end with 408"),
    ("S6", "wfq", "scheduling", "weighted fair queueing over tenants; idle share is borrowed"),
    ("S7", "mlfq", "scheduling", "multi-level feedback queue by tokens consumed"),
    ("S8", "tiering", "scheduling", "KV blocks to host memory and disk; preemption saves, not recomputes"),
    ("K1", "cacheaware", "kv", "least uncached prefill first; siblings wait for their prefix's leader"),
    ("K2", "slru", "kv", "segmented eviction with adaptive protection and ghost lists"),
    ("K3", "shield", "kv", "keeps the prefix of preempted and of soon-needed requests findable"),
    ("K4", "warmup", "kv", "warms hot prefixes at start and on a new prompt version"),
    ("K5", "cachedash", "kv", "hits, misses, evictions and reuse by tenant, prefix and tier"),
    ("D1", "suffix", "spec", "drafts from the longest suffix match in the request's own text"),
    ("D2", "sam", "spec", "suffix automaton over arrays, constant time a token"),
    ("D3", "adaptive", "spec", "draft count from measured acceptance and load; off when it costs"),
    ("D4", "sharedtree", "spec", "suffixes shared across one tenant's requests, bounded memory"),
    ("D5", "specdash", "spec", "acceptance, match length and wasted drafts by tenant and kind"),
    ("P1", "pd", "pd", "prefill and decode instances over a KV connector of our own"),
    ("P2", "router", "pd", "routes by load, prefix and class; failover loses no request"),
    ("P3", "pdsched", "pd", "prefill-only and decode-only scheduling"),
    ("P4", "transfer", "pd", "KV transfer by chunk and layer, optionally FP8 with a bound"),
    ("P5", "pdprefix", "pd", "sends only the blocks that the decode instance lacks"),
    ("P6", "fleet", "pd", "N prefill to M decode instances that join, leave and drain"),
    ("F1", "cancel", "fixes", "keeps and ranks the prefix of cancelled completions"),
    ("F2", "version", "fixes", "demotes dead blocks when a prompt version changes"),
    ("F3", "prefillbudget", "fixes", "decodes first, a reserved prefill share for short prompts"),
    ("F4", "tenant", "fixes", "floors and ceilings by tenant, borrowed elastically"),
    ("F5", "overload", "fixes", "admission by violation rate; late work yields; floors hold"),
)

CATALOGUE: tuple[Entry, ...] = tuple(Entry(*row) for row in _ROWS)
BY_NAME: dict[str, Entry] = {entry.name: entry for entry in CATALOGUE}
