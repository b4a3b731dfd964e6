"""Says at random what blocks are worth, within the rule: none less than its descendants."""

from __future__ import annotations

import random
from typing import Any

from patches.seam.patch import Hooks
from patches.seam.runtime import RUNTIME_ATTR
from tests.seam.toys import toy


class Whims:
    """A table of worths that `change` draws anew."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.rng = random.Random(context.seed)
        self.requests: list[Any] = []
        self.wanted: list[tuple[tuple[bytes, ...], float]] = []
        self.dead: bytes | None = None

    def worth(self, block: Any) -> float:
        """What is said of it: blocks that came later behind a dead one are dead as well."""
        if block.block_hash is None:
            return 0.0
        name = block.block_hash[:-4]
        worth = sum(value for chain, value in self.wanted if name in chain)
        if self.dead is not None and any(
            self.dead == r.block_hashes[0] and name in r.block_hashes for r in self.requests if r.block_hashes
        ):
            worth -= 4.0
        return worth

    def draw(self, requests: list[Any]) -> None:
        """Some requests' prefixes are wanted, and one first block is dead, with all that come behind it."""
        rng = self.rng
        self.requests = requests
        self.wanted = [
            (tuple(request.block_hashes[: rng.randint(0, 40)]), rng.choice([0.5, 2.0]))
            for request in rng.sample(requests, rng.randrange(3))
        ]
        roots = [request.block_hashes[0] for request in requests if request.block_hashes]
        self.dead = rng.choice(roots) if roots and rng.random() < 0.5 else None
        pool = self.context.scheduler.kv_cache_manager.block_pool
        for block in rng.sample(pool.blocks, len(pool.blocks)):
            self.context.revalue(block)


_made: dict[int, Whims] = {}


def change(scheduler: Any, requests: list[Any]) -> None:
    """Draw anew every few calls, where this patch is in force; nothing elsewhere."""
    runtime = scheduler.__dict__.get(RUNTIME_ATTR)
    whims = _made.get(id(runtime))
    if whims is not None and whims.rng.random() < 0.3:
        whims.draw(requests)


def build(knobs: Any, context: Any) -> Hooks:
    """The hint alone."""
    _made.clear()
    _made[id(context._runtime)] = whims = Whims(context)
    return Hooks(eviction_hint=whims.worth)


PATCH = toy("whims", build, "eviction_hint", area="kv")
