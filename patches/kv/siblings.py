"""Prefixes that running prefills are about to land, and the waiting requests that share them."""

from __future__ import annotations

from typing import Any, NamedTuple

from patches.kv.probe import PrefixProbe, common_blocks

# Prefills with the same first block that are looked at for one request.
_MOST_LEADERS = 8


class Shared(NamedTuple):
    """What a waiting request would find if it waited for a running one."""

    leader: Any
    #: Leading tokens that both have alike and the cache does not hold yet, and where they end.
    gain_tokens: int
    until_tokens: int


class Leaders:
    """Requests that prefill now. A chunk's blocks can be found as soon as it is scheduled, not before.

    They are found by their first block, since whoever shares a prefix shares that; `find` is O(log blocks).
    """

    def __init__(self, probe: PrefixProbe, block_tokens: int) -> None:
        self._probe = probe
        self._block_tokens = block_tokens
        self._by_root: dict[Any, dict[str, Any]] = {}
        self._roots: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._roots)

    def __contains__(self, request: Any) -> bool:
        return request.request_id in self._roots

    def add(self, request: Any) -> None:
        """It was picked, or is being resumed."""
        if request.block_hashes and request.request_id not in self._roots:
            root = self._roots[request.request_id] = request.block_hashes[0]
            self._by_root.setdefault(root, {})[request.request_id] = request

    def remove(self, request: Any) -> bool:
        """It prefills no more; whether it did."""
        root = self._roots.pop(request.request_id, None)
        if root is None:
            return False
        group = self._by_root[root]
        del group[request.request_id]
        if not group:
            del self._by_root[root]
        return True

    def prefilling(self) -> list[Any]:
        """All of them."""
        return [request for group in self._by_root.values() for request in group.values()]

    def find(self, request: Any) -> Shared | None:
        """The running prefill that is to compute the next block of this request, and how far both go together."""
        group = self._by_root.get(request.block_hashes[0]) if request.block_hashes else None
        if not group:
            return None
        cached = self._probe.cached_blocks(request)
        usable = self._probe.usable_blocks(request)
        if cached >= usable:
            return None
        following = request.block_hashes[cached]
        for place, leader in enumerate(group.values()):
            if place == _MOST_LEADERS:
                break
            hashes = leader.block_hashes
            if leader is request or len(hashes) <= cached or hashes[cached] != following:
                continue
            end = common_blocks(request, leader, cached + 1, usable)
            return Shared(leader, (end - cached) * self._block_tokens, end * self._block_tokens)
        return None
