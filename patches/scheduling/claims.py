"""What waiting prompts will want of the next steps: tokens by class, as far as they are not cached."""

from __future__ import annotations

from typing import Any

Rank = tuple[float, ...]

# Weight of one admission in the running mean of what the cache does not hold.
_LEARN = 0.02


def class_of(info: Any) -> Rank:
    """Where a request stands among classes, best first: by vLLM's priority, inside one by its weight."""
    return info.priority, -info.weight


class Claims:
    """Waiting requests by class. Every call is O(1), or O(classes), which are few.

    Those that did not move in the last pass (no seats, no blocks, held by a gate) claim nothing until
    one of them moves or another comes: what is kept for them would be idle.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Rank, int]] = {}
        self._tokens: dict[Rank, int] = {}
        self._count: dict[Rank, int] = {}
        self._admitted = 0
        self.moving = True
        self.uncached_share = 1.0

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, request: Any, rank: Rank = ()) -> None:
        """It waits from now on."""
        self._waiting[request.request_id] = rank, request.num_tokens
        self._tokens[rank] = self._tokens.get(rank, 0) + request.num_tokens
        self._count[rank] = self._count.get(rank, 0) + 1
        self.moving = True

    def leave(self, request_id: str) -> bool:
        """It waits no more; False if it did not."""
        found = self._waiting.pop(request_id, None)
        if found is None:
            return False
        rank, tokens = found
        self._tokens[rank] -= tokens
        self._count[rank] -= 1
        if not self._count[rank]:
            del self._count[rank], self._tokens[rank]
        return True

    def admit(self, request_id: str, cached_tokens: int) -> None:
        """It was admitted, and the cache held so much of it; nothing happens if it did not wait."""
        found = self._waiting.get(request_id)
        if found is not None:
            share = 1 - min(cached_tokens, found[1]) / max(1, found[1])
            self.uncached_share += _LEARN * (share - self.uncached_share)
            self._admitted += 1
            self.leave(request_id)

    def end_pass(self) -> None:
        """A scheduling pass is over: see whether anybody moved."""
        self.moving = self._admitted > 0 or not self._waiting
        self._admitted = 0

    def wanted(self, better_than: Rank | None = None) -> int:
        """Tokens that those who move want, of all classes or of those better than one."""
        if not self.moving:
            return 0
        tokens = sum(t for rank, t in self._tokens.items() if better_than is None or rank < better_than)
        return int(tokens * self.uncached_share)

    def waits(self, better_than: Rank | None = None) -> bool:
        """Whether anybody waits who moves, of all classes or of those better than one."""
        if not self.moving:
            return False
        return any(better_than is None or rank < better_than for rank in self._count)
