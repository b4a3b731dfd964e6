"""The most asked prefixes of a cache, in a table of fixed size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PrefixCount:
    """Look-ups of prompts that begin with one block: requests, blocks asked for, blocks found, and who came last."""

    tenant: int
    requests: int = 0
    asked: int = 0
    found: int = 0


class PrefixTable:
    """Counts by first block, told by the first 8 bytes of its hash.

    When it is full, the half with the fewest requests goes; what it had counted is in `dropped`. So what is asked for
    often enough is counted whole, unless it was rare at first.

    Args:
        most: entries at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: dict[bytes, PrefixCount] = {}
        self.dropped = PrefixCount(0)

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, first_hash: bytes, tenant: int, asked: int, found: int) -> None:
        """Note one look-up."""
        name = first_hash[:8]
        one = self._counts.get(name)
        if one is None:
            if len(self._counts) >= self._most:
                self._drop_half()
            one = self._counts[name] = PrefixCount(tenant)
        one.tenant = tenant
        one.requests += 1
        one.asked += asked
        one.found += found

    def most_asked(self) -> list[tuple[str, PrefixCount]]:
        """All entries, by blocks asked for: hexadecimal id and counts."""
        return sorted(
            ((name.hex(), one) for name, one in self._counts.items()), key=lambda row: (-row[1].asked, row[0])
        )

    def _drop_half(self) -> None:
        by_use = sorted(self._counts.items(), key=lambda row: row[1].requests)
        for name, one in by_use[: (len(by_use) + 1) // 2]:
            self.dropped.requests += one.requests
            self.dropped.asked += one.asked
            self.dropped.found += one.found
            del self._counts[name]
